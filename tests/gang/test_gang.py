"""What a gang makes of the answers of ranks, whatever starts them."""

import queue
import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal

import pytest

from braidax.comm.stores.memory import MemoryStore
from braidax.errors import CallFailed, GangError, PeerLost, WaitTimeout
from braidax.gang.calling.orders import FAILED
from braidax.gang.calling.parcels import Parcel
from braidax.gang.calling.ranks import Ended, Message, Ranks
from braidax.gang.gang import Gang
from braidax.gang.member import Member
from tests.support.gang import clusters


class _Threads(Ranks):
    """Ranks that are threads.

    **Arguments:** `patience`: by rank, the seconds that each has to meet the others first; without, it never answers.
    """

    def __init__(self, patience: Mapping[int, float]) -> None:
        store = MemoryStore()
        self._pool = ThreadPoolExecutor(len(patience))
        self._news: queue.SimpleQueue[tuple[int, Parcel | Ended] | None] = queue.SimpleQueue()
        self.broken: Exception | None = None
        self.members = {
            rank: Member(
                store, rank=rank, transport="tcp", timeout_seconds=60, first_deadline=time.monotonic() + seconds
            )
            for rank, seconds in patience.items()
        }

    def ask(self, messages: Mapping[int, Message]) -> None:
        if self.broken is not None:
            raise self.broken
        for rank, message in messages.items():
            if rank in self.members:
                answer = self._pool.submit(self.members[rank].answer, message.head, message.body)
                answer.add_done_callback(lambda done, rank=rank: self.tell(rank, done))

    def tell(self, rank: int, done: "Future[Parcel]") -> None:
        """Says what a rank answered."""
        self._news.put((rank, done.result()))

    def end_rank(self, rank: int, how: str) -> None:
        """Says that a rank ended."""
        self._news.put((rank, Ended("h", 7, how, time.time())))

    def answers(self, *, timeout_seconds: float | None) -> Mapping[int, Parcel | Ended]:
        try:
            told = self._news.get(timeout=timeout_seconds)
        except queue.Empty:
            return {}
        return {} if told is None else {told[0]: told[1]}

    def wake(self) -> None:
        self._news.put(None)

    def abort(self, ranks: Collection[int], call: int, reason: str) -> None:
        for rank in ranks:
            if rank in self.members:
                self.members[rank].abort(call, reason)

    def kill(self, ranks: Collection[int]) -> None:
        pass

    def replace(self, ranks: Collection[int], deadline: float) -> None:
        raise GangError("no thread is left")

    def end(self, reason: Literal["stop", "interrupt"]) -> None:
        for member in self.members.values():
            member.dismiss("the gang ends")
        self._pool.shutdown()
        for member in self.members.values():
            member.leave()


class _Gang(Gang):
    def __init__(self, size: int, patience: Mapping[int, float], timeout_seconds: float) -> None:
        super().__init__(size, job="j", timeout_seconds=timeout_seconds, transport="tcp")
        self.patience = patience

    def _begin(self, deadline: float) -> Ranks:
        self.started = _Threads(self.patience)
        return self.started

    def _close(self) -> None:
        pass


def test_ranks_that_hear_of_one_that_gave_up_do_not_hide_who_never_came() -> None:
    gang: Any = _Gang(3, {0: 0.2, 2: 60.0}, 1.0)  # the patience of rank 0 ends first, and rank 1 never comes
    with pytest.raises(WaitTimeout, match=r"^rank 1 of 3 did not start and join the others within timeout_seconds=1;"):
        gang.start()
    with pytest.raises(GangError, match=r"rank 1 of 3 did not start and join .*: call start\(\)"):
        gang.run(print)


def test_a_gang_whose_ranks_cannot_be_asked_is_broken_and_says_so() -> None:
    with _Gang(2, {0: 60.0, 1: 60.0}, 60.0) as gang:
        gang.started.broken = OSError("the cluster is gone")
        for _ in range(2):
            with pytest.raises(GangError, match=r"it is broken: OSError: the cluster is gone: call restart\(\)"):
                gang.run(lambda comm: None)
            with pytest.raises(GangError, match="no thread is left"):
                gang.replace([1])
        gang.restart()
        assert gang.run(lambda comm: comm.rank) == [0, 1]


def test_ranks_that_cannot_be_replaced_stay_lost() -> None:
    with _Gang(2, {0: 60.0, 1: 60.0}, 60.0) as gang:
        gang.replace()  # nothing is lost
        with pytest.raises(GangError, match="no thread is left"):
            gang.replace([1])
        assert gang.lost == (1,)
        assert gang.run(lambda comm: comm.size, ranks=[0]) == [1]


def test_what_is_no_answer_is_told() -> None:
    def answer(head: Parcel, body: Parcel) -> Parcel:
        return [FAILED, b"no pickle"]

    with _Gang(2, {0: 60.0, 1: 60.0}, 60.0) as gang:
        gang.started.members[1].answer = answer  # type: ignore[method-assign]
        with pytest.raises(CallFailed, match="rank 1 answered what cannot be read: UnpicklingError"):
            gang.run(lambda comm: None)


def test_a_call_whose_rank_ended_does_not_wait_for_its_answer() -> None:
    """And an answer that comes later, or another end of the same rank, changes nothing."""
    with _Gang(2, {0: 60.0, 1: 60.0}, 60.0) as gang:
        gang.put("x", [1, 2])
        waiting = gang.submit(clusters.wait_for_one_another)
        gang.started.end_rank(1, "ended on purpose")
        with pytest.raises(PeerLost, match=r"^rank 1 \(host h, pid 7\) ended on purpose$"):
            waiting.result(timeout_seconds=30)
        gang.started.end_rank(1, "ended twice")
        assert gang.run(lambda comm: comm.size, ranks=[0]) == [1]
        assert (gang.lost, gang.get("x", ranks=[0])) == ((1,), [1])


@pytest.mark.parametrize("ranks", [None, [0]])
def test_an_abort_that_is_quicker_than_its_call_counts(ranks: list[int] | None) -> None:
    """Also where the ranks have yet to meet, as those of a subset have here."""
    with _Gang(2, {0: 60.0, 1: 60.0}, 60.0) as gang:
        dispatch: Any = gang._dispatch
        gang.started.members[0].abort(dispatch._last_call + 1, "on purpose")
        with pytest.raises(CallFailed, match=r"Aborted: .*on purpose"):
            gang.run(lambda comm: comm.barrier(), ranks=ranks)
        gang.run(lambda comm: comm.barrier(), ranks=ranks)


def test_a_member_gives_up_whatever_an_order_does_not_name() -> None:
    with _Gang(1, {0: 60.0}, 60.0) as gang:
        member: Any = gang.started.members[0]
        gang.put("x", [1])
        gang.run(lambda comm: 2, keep="y")
        gang.run(lambda comm: 3, keep="y")
        with pytest.raises(CallFailed):
            gang.run(lambda comm: 1 / 0, keep="z")
        gang.delete("x")
        assert {name: value for name, (_, value) in member._kept.items()} == {"y": 3}
        assert member._made is None
