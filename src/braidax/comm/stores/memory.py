"""The store of ranks that are threads of one process."""

from typing import final

from braidax.comm.condition import Condition
from braidax.comm.stores.limits import check_amount, check_value, key_bytes
from braidax.comm.stores.store import Store, missing


@final
class MemoryStore(Store):
    """Values in this process: all ranks share the object. For tests, and for ranks that are threads.

    Its address is a name for messages; no other process can open it.
    """

    def __init__(self) -> None:
        self._changed = Condition()
        self._values: dict[bytes, bytes] = {}
        self._counters: dict[bytes, int] = {}

    @property
    def address(self) -> str:
        return f"memory:{id(self):x}"

    def set(self, key: str, value: bytes) -> None:
        check_value(key, value)
        with self._changed.lock:
            self._values[key_bytes(key)] = value
            self._changed.notify_all()

    def get(self, key: str, *, timeout_seconds: float) -> bytes:
        name = key_bytes(key)
        if not self._changed.wait_for(lambda: name in self._values, timeout_seconds):
            raise missing(key, self.address, timeout_seconds)
        return self._values[name]

    def add(self, key: str, amount: int) -> int:
        check_amount(amount)
        name = key_bytes(key)
        with self._changed.lock:
            self._counters[name] = self._counters.get(name, 0) + amount
            return self._counters[name]

    def close(self) -> None:
        """Does nothing: the other threads go on."""
