"""What a gang makes of the answers of ranks, whatever starts them."""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import pytest

from braidax.comm.stores.memory import MemoryStore
from braidax.errors import WaitTimeout
from braidax.gang.gang import Ended, Gang, Ranks
from braidax.gang.member import Member


class _Threads(Ranks):
    """Ranks 0 and 2 of three, as threads; the patience of rank 0 ends first, and rank 1 never comes."""

    def __init__(self, epoch: int) -> None:
        store = MemoryStore()
        self._pool = ThreadPoolExecutor(2)
        self._members = {
            rank: Member(store, rank=rank, size=3, job="j", epoch=epoch, transport="tcp", timeout_seconds=60)
            for rank in (0, 2)
        }
        self._joining: dict[Future[bytes], int] = {
            self._pool.submit(member.join, timeout_seconds=0.2 if rank == 0 else 60): rank
            for rank, member in self._members.items()
        }

    def call(self, call: bytes) -> None:
        raise AssertionError("no rank has joined")

    def answers(self, *, timeout_seconds: float | None) -> Mapping[int, bytes | bytearray | Ended]:
        done = wait(self._joining, timeout_seconds, "FIRST_COMPLETED").done
        return {self._joining.pop(future): future.result() for future in done}

    def end(self) -> None:
        for member in self._members.values():
            member.leave()
        self._pool.shutdown()


class _Gang(Gang):
    def _begin(self, epoch: int, deadline: float) -> Ranks:
        return _Threads(epoch)

    def _close(self) -> None:
        pass


def test_ranks_that_hear_of_one_that_gave_up_do_not_hide_who_never_came() -> None:
    gang: Any = _Gang(3, job="j", timeout_seconds=1.0)
    with pytest.raises(WaitTimeout, match=r"^rank 1 of 3 did not start and join the others within timeout_seconds=1;"):
        gang.start()
