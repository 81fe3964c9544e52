"""The store of ranks on Ray: an actor with a name."""

import re
from typing import Any, final

from braidax.comm.stores.limits import check_amount, check_value, key_bytes
from braidax.comm.stores.store import Store, missing
from braidax.errors import ArgumentError, CommError, import_extra

SCHEME = "ray:"
"""What addresses begin with."""

ANSWER_SECONDS = 30.0
"""That an actor on a busy host may take to answer."""

_COLOR = re.compile(r"\x1b\[[0-9;]*m")


@final
class RayStore(Store):
    """A store in an actor of Ray, reached by whatever Ray itself talks over.

    **Arguments:** `address`: `ray:NAMESPACE/NAME` of an actor that a `RayGang` holds; it ends with the gang.

    **Raises:** `ArgumentError` for another address, `CommError` when Ray knows no such actor.
    """

    def __init__(self, address: str) -> None:
        namespace, slash, name = address.removeprefix(SCHEME).partition("/")
        if not address.startswith(SCHEME) or not slash or not name:
            raise ArgumentError(f"{address=}: expected {SCHEME}NAMESPACE/NAME, as RayStore.address gives it")
        self._ray = import_ray()
        self._address = address
        try:
            self._actor = self._ray.get_actor(name, namespace=namespace)
        except ValueError as error:
            raise CommError(
                f"{address}: Ray knows no such actor ({error}); it ends with the gang that holds it: is "
                "this the same Ray cluster, and does the gang run?"
            ) from error

    @property
    def address(self) -> str:
        return self._address

    def set(self, key: str, value: bytes) -> None:
        check_value(key, value)
        self._answer(self._actor.set.remote(key_bytes(key), value), 0.0)

    def get(self, key: str, *, timeout_seconds: float) -> bytes:
        value = self._answer(self._actor.get.remote(key_bytes(key), timeout_seconds), timeout_seconds)
        if value is None:
            raise missing(key, self._address, timeout_seconds)
        return value

    def add(self, key: str, amount: int) -> int:
        check_amount(amount)
        return self._answer(self._actor.add.remote(key_bytes(key), amount), 0.0)

    def close(self) -> None:
        pass  # the gang ends the actor

    def _answer(self, call: Any, seconds: float) -> Any:
        limit = seconds + ANSWER_SECONDS
        try:
            return self._ray.get(call, timeout=limit)
        except self._ray.exceptions.GetTimeoutError as error:
            raise CommError(f"{self._address} did not answer within {limit:g} s; is its host alive?") from error
        except self._ray.exceptions.RayError as error:
            raise CommError(
                f"{self._address} cannot be reached: {told(error)}; it ends with the gang that holds it: "
                "does the gang run?"
            ) from error


def import_ray() -> Any:
    """Returns the package of Ray, or raises `MissingExtra`."""
    return import_extra("ray", "ray", purpose="a gang on Ray")


def told(error: Exception) -> str:
    """Returns what Ray says in one line, without its colors and its guesses."""
    text = _COLOR.sub("", str(error)).rpartition("The actor is dead because ")[2].partition("Some common causes")[0]
    return " ".join(text.split()) or type(error).__name__
