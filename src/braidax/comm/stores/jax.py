"""The store of processes that have called `jax.distributed.initialize`: JAX's coordination service."""

import math
import time
from typing import Protocol, final, runtime_checkable
from urllib.parse import quote

from jax.errors import JaxRuntimeError

from braidax.comm.stores.limits import check_amount, check_value, key_bytes
from braidax.comm.stores.store import Store, missing
from braidax.errors import CommError

_SLICE_SECONDS = 1.0  # of a wait inside JAX, which Ctrl-C cannot end


@runtime_checkable
class CoordinationClient(Protocol):
    """What is used of JAX's client of its coordination service."""

    def key_value_set_bytes(self, key: str, value: bytes, allow_overwrite: bool = False) -> None:
        """Sets a value."""
        ...

    def key_value_try_get_bytes(self, key: str) -> bytes:
        """Returns a value, or raises `JaxRuntimeError` with NOT_FOUND."""
        ...

    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes:
        """Waits for a value; raises `JaxRuntimeError` with DEADLINE_EXCEEDED."""
        ...

    def key_value_increment(self, key: str, increment: int) -> int:
        """Adds to a counter, and returns the sum."""
        ...


@final
class JaxStore(Store):
    """Values in the coordination service that `jax.distributed.initialize` has started: no server besides JAX's own.

    JAX has no public name for its client yet, so it is given. The address is a name for messages: other processes get
    at the service through their own client.

    **Arguments:** `client`: of this process, once `jax.distributed.is_initialized()`.
    """

    def __init__(self, client: CoordinationClient) -> None:
        self._client = client

    @property
    def address(self) -> str:
        return "jax:"

    def set(self, key: str, value: bytes) -> None:
        check_value(key, value)
        try:
            self._client.key_value_set_bytes(_name(key, "values"), value, allow_overwrite=True)
        except JaxRuntimeError as error:
            raise self._unusable(error) from error

    def get(self, key: str, *, timeout_seconds: float) -> bytes:
        name = _name(key, "values")
        deadline = time.monotonic() + timeout_seconds
        left = timeout_seconds
        while True:
            try:
                if left <= 0:
                    return self._client.key_value_try_get_bytes(name)
                return self._client.blocking_key_value_get_bytes(name, math.ceil(1000 * min(left, _SLICE_SECONDS)))
            except JaxRuntimeError as error:
                if not str(error).startswith(("DEADLINE_EXCEEDED", "NOT_FOUND")):
                    raise self._unusable(error) from error
                if left <= 0:
                    raise missing(key, self.address, timeout_seconds) from None
            left = deadline - time.monotonic()

    def add(self, key: str, amount: int) -> int:
        check_amount(amount)
        try:
            return self._client.key_value_increment(_name(key, "counters"), amount)
        except JaxRuntimeError as error:
            raise self._unusable(error) from error

    def close(self) -> None:
        """Does nothing: the service is JAX's."""

    def _unusable(self, error: RuntimeError) -> CommError:
        return CommError(
            f"{self.address}: JAX's coordination service does not answer as expected ({error}); is the first process "
            "alive, and has nobody called jax.distributed.shutdown?"
        )


def _name(key: str, kind: str) -> str:
    # The service takes `/a//b/` for `a/b`, so a key must not hold its own slashes.
    return f"braidax/{kind}/{quote(key_bytes(key), safe='')}"
