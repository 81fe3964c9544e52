"""The store of processes that have called `jax.distributed.initialize`: JAX's coordination service."""

from typing import final
from urllib.parse import quote

from braidax.comm.stores.limits import check_amount, check_value, key_bytes
from braidax.comm.stores.store import Store, missing
from braidax.connections.coordination import Coordination


@final
class JaxStore(Store):
    """Values in the coordination service that `jax.distributed.initialize` has started: no server besides JAX's own.

    The address is a name for messages: other processes get at the service through their own client.

    **Arguments:** `service`: of this process: `braidax.program.coordination.coordination()`, once
    `jax.distributed.is_initialized()`.
    """

    def __init__(self, service: Coordination) -> None:
        self._values, self._counters = service.under("values"), service.under("counters")

    @property
    def address(self) -> str:
        return "jax:"

    def set(self, key: str, value: bytes) -> None:
        check_value(key, value)
        self._values.set(_name(key), value, known="replace")

    def get(self, key: str, *, timeout_seconds: float) -> bytes:
        found = self._values.find(_name(key), timeout_seconds=timeout_seconds)
        if found is None:
            raise missing(key, self.address, timeout_seconds)
        return found

    def add(self, key: str, amount: int) -> int:
        check_amount(amount)
        return self._counters.add(_name(key), amount)

    def close(self) -> None:
        """Does nothing: the service is JAX's."""


def _name(key: str) -> str:
    # The service takes `/a//b/` for `a/b`, so a key must not hold its own slashes.
    return quote(key_bytes(key), safe="")
