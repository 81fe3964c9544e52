"""The store of ranks on Dask: an actor on one of the workers."""

import os
import time
from typing import Any, final

from braidax.comm.stores.limits import check_amount, check_value, key_bytes
from braidax.comm.stores.store import Store, missing
from braidax.errors import ArgumentError, CommError, GangError, import_extra
from braidax.gang.actor_store import ActorStore

SCHEME = "dask:"
"""What addresses begin with."""

ANSWER_SECONDS = 30.0
"""That an actor on a busy worker may take to answer."""

ALIVE = ("pending", "finished")
"""What Dask says of an actor whose worker is there."""

_SLICE_SECONDS = 0.5  # of a wait, between looks whether the store has been closed


@final
class DaskStore(Store):
    """A store in an actor on a worker of Dask, reached over Dask's own connections.

    It is opened in a task or an actor of the cluster, or where a client of it is the current one
    (`with client.as_current()`); any thread may use it then.

    **Arguments:** `address`: `dask:WORKER#KEY` of an actor that a `DaskGang` holds; it ends with the gang.

    **Raises:** `ArgumentError` for another address, `CommError` where there is no client.
    """

    def __init__(self, address: str) -> None:
        worker, _, key = address.removeprefix(SCHEME).partition("#")
        if not address.startswith(SCHEME) or not worker or not key:
            raise ArgumentError(f"{address=}: expected {SCHEME}WORKER#KEY, as DaskStore.address gives it")
        distributed = import_distributed()
        self._address = address
        self._is_closed = False
        try:
            client = distributed.get_client()
        except ValueError as error:
            raise CommError(
                f"{address} cannot be opened: {error}; open it in a task of the cluster, or inside "
                "`with client.as_current()`"
            ) from error
        self._actor = distributed.Actor(ActorStore, worker, key)
        self._known = distributed.Future(key, client)

    @property
    def address(self) -> str:
        return self._address

    def set(self, key: str, value: bytes) -> None:
        check_value(key, value)
        self._ask("set", key_bytes(key), value)

    def get(self, key: str, *, timeout_seconds: float) -> bytes:
        value = self._ask("get", key_bytes(key), timeout_seconds, seconds=timeout_seconds)
        if value is None:
            raise missing(key, self._address, timeout_seconds)
        return value

    def add(self, key: str, amount: int) -> int:
        check_amount(amount)
        return self._ask("add", key_bytes(key), amount)

    def close(self) -> None:
        """Ends the waits of all threads that use this object; the gang ends the actor."""
        self._is_closed = True

    def _ask(self, method: str, *args: Any, seconds: float = 0.0) -> Any:
        limit = seconds + ANSWER_SECONDS
        try:
            return self._answer(getattr(self._actor, method)(*args), time.monotonic() + limit)
        except TimeoutError as error:
            raise CommError(
                f"{self._address} did not answer within {limit:g} s; it ends with the gang that holds it: "
                "does the gang run, and is the worker alive?"
            ) from error
        except (OSError, RuntimeError) as error:
            raise CommError(
                f"{self._address} cannot be reached: {error}; it ends with the gang that holds it: does "
                "the gang run, and is the worker alive?"
            ) from error

    def _answer(self, answer: Any, deadline: float) -> Any:
        """Waits in slices: another thread may close this meanwhile."""
        while not self._is_closed:
            left = deadline - time.monotonic()
            try:
                return answer.result(timeout=max(0.0, min(left, _SLICE_SECONDS)))
            except TimeoutError:
                if self._known.status not in ALIVE:  # then Dask's own wait may have no end
                    raise OSError(f"the scheduler says that it is {self._known.status}") from None
                if left <= 0:
                    raise
        raise CommError(f"{self._address}: this DaskStore is closed; open another one")


def open_client(address: str | None) -> Any:
    """Returns a client of a Dask cluster, to be closed.

    **Arguments:** `address`: of the scheduler, such as `tcp://host:8786`; None is what `DASK_SCHEDULER_ADDRESS` says.

    **Raises:** `ArgumentError` when nobody says, `GangError` when the scheduler does not answer.
    """
    distributed = import_distributed()
    address = address or os.environ.get("DASK_SCHEDULER_ADDRESS")
    if not address:
        raise ArgumentError(
            "address=None, and the environment variable DASK_SCHEDULER_ADDRESS is not set; expected the address of "
            "Dask's scheduler in one of them (--scheduler), such as tcp://host:8786"
        )
    try:
        return distributed.Client(address, set_as_default=False)
    except (OSError, ValueError) as error:
        raise GangError(f"{address}: no scheduler of Dask answers there ({error}); does it run?") from error


def import_distributed() -> Any:
    """Returns the package of Dask's distributed workers, or raises `MissingExtra`."""
    return import_extra("distributed", "dask", purpose="a gang on Dask")
