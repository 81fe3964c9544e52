"""The values and counters of the stores of Ray and of Dask, in an actor."""

import asyncio


class ActorStore:
    """Values and counters by key, in one event loop: that of the actor that this is.

    Waiting for a value keeps nobody else waiting. What is waited for is bounded by the one who asks.
    """

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}
        self._sums: dict[bytes, int] = {}
        self._waiting: dict[bytes, list[asyncio.Future[None]]] = {}

    async def set(self, key: bytes, value: bytes) -> None:
        """Sets the value of a key, and wakes those that wait for it."""
        self._values[key] = value
        for future in self._waiting.pop(key, ()):
            if not future.done():
                future.set_result(None)

    async def get(self, key: bytes, timeout_seconds: float) -> bytes | None:
        """Returns the value of a key, or None when it has none within the limit."""
        if key not in self._values and timeout_seconds > 0:
            future = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(key, []).append(future)
            await asyncio.wait([future], timeout=timeout_seconds)
            if not future.done():
                self._waiting[key].remove(future)
                if not self._waiting[key]:
                    del self._waiting[key]
        return self._values.get(key)

    async def add(self, key: bytes, amount: int) -> int:
        """Adds to a counter, which begins at 0, and returns the sum."""
        self._sums[key] = self._sums.get(key, 0) + amount
        return self._sums[key]
