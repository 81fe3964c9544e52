"""Ranks that are threads, and that stay from test to test: to meet anew takes longer than most queries."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

from braidax.comm import Communicator, MemoryStore, connect
from tests.support.comm.ranks import outcomes, transports

LIMIT_SECONDS = 20.0  # of a wait: a query of these tables takes a hundredth of a second


class Worlds:
    """Worlds of some sizes. One in which a query fails is left, and each later query of its size has one of its own."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._kept: dict[int, list[Communicator]] = {}
        for size in sizes:
            self._kept[size] = _met(size)

    def run(self, size: int, call: Callable[[Communicator], Any]) -> list[Any]:
        """Returns what each rank returns; all of them must come to the same point of their messages."""
        kept = self._kept.get(size)
        if kept is None:
            return outcomes(size, call, timeout_seconds=LIMIT_SECONDS)

        def call_and_meet(comm: Communicator) -> Any:
            found = call(comm)
            comm.barrier()
            return found

        found = _on_threads([lambda comm=comm: call_and_meet(comm) for comm in kept])
        if any(isinstance(outcome, BaseException) for outcome in found):
            self._leave(size)
        return found

    def close(self) -> None:
        """Ends all worlds."""
        for size in list(self._kept):
            self._leave(size)

    def _leave(self, size: int) -> None:
        _on_threads([comm.close for comm in self._kept.pop(size)])


def _met(size: int) -> list[Communicator]:
    store, chosen = MemoryStore(), transports("in-process", size)
    met = _on_threads(
        [
            lambda rank=rank: connect(
                store, rank=rank, size=size, transport=chosen[rank], job="frames", timeout_seconds=LIMIT_SECONDS
            )
            for rank in range(size)
        ]
    )
    for comm in met:
        if isinstance(comm, BaseException):
            raise comm
    return met


def _on_threads(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    found: list[Any] = [None] * len(calls)

    def call_one(rank: int) -> None:
        try:
            found[rank] = calls[rank]()
        except BaseException as error:  # noqa: BLE001 (the test looks at it)
            found[rank] = error

    threads = [threading.Thread(target=call_one, args=(rank,), name=f"rank-{rank}") for rank in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(4 * LIMIT_SECONDS)
        assert not thread.is_alive(), f"{thread.name} hangs"
    return found
