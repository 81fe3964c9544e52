"""The thread that gives calls to ranks and hears of them. Calls of disjoint ranks run at once, others in order."""

import contextlib
import pickle
import threading
import time
from collections import deque
from collections.abc import Collection, Generator, Iterable, Sequence
from typing import final

from braidax.errors import BraidaxError, CallFailed, GangError, PeerLost, WaitTimeout
from braidax.gang.calling.call import Call, Sent
from braidax.gang.calling.orders import DONE, Order
from braidax.gang.calling.parcels import Parcel
from braidax.gang.calling.ranks import Ended, Message, Ranks
from braidax.gang.calling.verdict import Trouble, ended, failed, first
from braidax.gang.calling.worlds import Worlds
from braidax.gang.keeping.kept import Names, listed

MAX_WAITING = 1000
"""Calls that may wait until their ranks are free."""

OTHERS_SECONDS = 2.0
"""That the other ranks have to answer when one has failed (one of them may have failed earlier), and all of them have
when a limit has passed and the call was aborted."""

_SLICE_SECONDS = 0.5  # of a wait


@final
class Dispatch:
    """Serves the calls of a gang, in a thread of its own, until `close`. Any thread may call its methods.

    **Arguments:** `ranks`: it is used by the thread alone, but while `paused` or closed. `worlds`: where ranks meet.

    **Fields:** `names`: what the ranks keep. `lost`: the ranks that have no process, and why.
    """

    def __init__(self, ranks: Ranks, worlds: Worlds, size: int) -> None:
        self._ranks = ranks
        self._worlds = worlds
        self._lock = threading.Lock()
        self._size = size
        self.names = Names(size)
        self.lost: dict[int, Trouble] = {}
        self._told: set[int] = set()  # lost ranks of which somebody has been told
        self._last_call = 0
        self._waiting: deque[Call] = deque()
        self._busy: dict[int, Call] = {}  # by rank, until the rank has answered and the call is judged
        self._late: list[Call] = []  # whose limit has passed
        self._is_ending = False
        self._why_not = ""
        self._broken: BaseException | None = None
        self._may_go_on, self._is_idle = threading.Event(), threading.Event()
        self._may_go_on.set()
        self._thread = threading.Thread(target=self._serve, name="braidax-gang", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def paused(self) -> Generator[None, None, None]:
        """Leaves `ranks` to the caller's thread; calls that are under way go on, and are heard of afterwards."""
        self._may_go_on.clear()
        try:
            self._ranks.wake()
            while self._thread.is_alive() and not self._is_idle.wait(_SLICE_SECONDS):
                pass
            yield
        finally:
            self._is_idle.clear()
            self._may_go_on.set()

    def close(self, why: str) -> None:
        """Ends the thread, and the calls with an error that says why."""
        self._is_ending = True
        self._may_go_on.set()
        self._ranks.wake()
        self._thread.join()
        with self._lock:
            self._why_not = why
            for call in {*self._waiting, *self._busy.values()}:
                call.finish(GangError(f"{listed(call.ranks)} did not answer: {why}"))
            self._waiting.clear()
            self._busy.clear()

    def submit(self, call: Call) -> None:
        """Puts a call in line, a meeting at its front. **Raises:** `GangError` when too many wait."""
        with self._lock:
            if self._why_not:
                raise GangError(f"the gang cannot run a function: {self._why_not}") from self._broken
            if len(self._waiting) >= MAX_WAITING:
                raise GangError(
                    f"{len(self._waiting):,} calls wait for their ranks; expected at most {MAX_WAITING:,}: take the "
                    "results of some first"
                )
            if call.kind == "meet":
                self._waiting.appendleft(call)
            else:
                self._waiting.append(call)
        self._ranks.wake()

    def expire(self, call: Call, limit_seconds: float) -> None:
        """Ends a call whose limit has passed: ranks that do not come back when it is aborted are ended by force."""
        with self._lock:
            call.limit_seconds = limit_seconds
            self._late.append(call)
        self._ranks.wake()

    def lose(self, ranks: Collection[int], how: str) -> tuple[int, ...]:
        """Notes that ranks have been ended by force, refuses what waits for them, and returns all that are lost."""
        with self._lock:
            for rank in ranks:
                self._lose(rank, Trouble(PeerLost(f"rank {rank} {how}", rank), None, time.time()))
            self._judge_calls()
            for call in list(self._waiting):
                if call.kind != "sweep" and not self.lost.keys().isdisjoint(call.ranks):
                    self._refuse(call)
            return tuple(sorted(self.lost))

    def find(self, ranks: Collection[int]) -> None:
        """Notes that ranks that were lost have new processes."""
        with self._lock:
            for rank in ranks:
                del self.lost[rank]
            self._told.difference_update(ranks)

    def _serve(self) -> None:
        try:
            while not self._is_ending:
                if not self._may_go_on.is_set():
                    self._is_idle.set()
                    self._may_go_on.wait()
                    continue
                with self._lock:
                    self._begin_calls()
                    due = min((call.judged_at for call in self._busy.values()), default=float("inf"))
                limit = None if due == float("inf") else max(0.0, due - time.monotonic())
                news = self._ranks.answers(timeout_seconds=limit)
                with self._lock:
                    for rank, told in news.items():
                        self._note(rank, told)
                    self._note_late_calls()
                    self._judge_calls()
        except BaseException as error:  # noqa: BLE001 (whoever waits for a call must hear of it)
            with self._lock:
                self._broken = error
                self._why_not = f"it is broken: {type(error).__name__}: {error}: call restart()"
                for call in {*self._waiting, *self._busy.values()}:
                    call.finish(GangError(f"{listed(call.ranks)} did not answer: {self._why_not}"), error)
        finally:
            self._is_idle.set()

    def _begin_calls(self) -> None:
        """Begins the calls whose ranks are free, and for which no earlier call waits."""
        taken = set(self._busy)
        waiting, self._waiting = self._waiting, deque()
        while waiting:
            call = waiting.popleft()
            if call.is_finished:
                continue
            if taken.isdisjoint(call.ranks):
                self._begin(call)
                taken.update(rank for rank in call.ranks if rank in self._busy)
            else:
                self._waiting.append(call)
                taken.update(call.ranks)

    def _refuse(self, call: Call) -> bool:
        """Ends a call that cannot begin, and says whether that is so."""
        try:
            self._check(call)
        except BraidaxError as error:
            call.finish(error, error.__cause__)
            return True
        return False

    def _begin(self, call: Call) -> None:
        if self._refuse(call):
            return
        sent = call.sent
        assert sent is not None
        if call.kind == "delete" and not self._narrowed(call):
            return
        self._last_call += 1
        call.number = self._last_call
        meeting = self._worlds.meeting(call.ranks) if call.kind in ("meet", "world") else None
        messages: dict[int, Message] = {}
        for place, rank in enumerate(call.ranks):
            order = Order(call.number, meeting, self._worlds.of(rank), self.names.of(rank), call.keep)
            head: Parcel = [pickle.dumps(order), *(sent.own[place] if sent.own else ())]
            messages[rank] = Message(head, sent.body)
            self._busy[rank] = call
        call.sent = None
        self._ranks.ask(messages)

    def _narrowed(self, call: Call) -> bool:
        """Forgets the name of a call that deletes, and says whether ranks are left that are to hear of it."""
        assert call.keep is not None
        self.names.delete(call.keep)
        call.keep, call.ranks = None, tuple(rank for rank in call.ranks if rank not in self.lost)
        call.owing = set(call.ranks)
        if not call.ranks:
            call.finish()
        return bool(call.ranks)

    def _check(self, call: Call) -> None:
        """Checks that a call can begin. A lost rank of which nobody was told is told as if it were lost now."""
        if call.kind == "delete" and call.keep is not None:
            self.names.check(call.keep, ())
            return
        lost = [rank for rank in call.ranks if rank in self.lost]
        if lost:
            new = {rank: self.lost[rank] for rank in lost if rank not in self._told}
            self._told.update(lost)
            if new:
                raise first(new, ()).error
            words = "; ".join(str(self.lost[rank].error).partition("; the last lines")[0] for rank in lost)
            raise GangError(
                f"the gang cannot run a function in {listed(call.ranks)}: {words}; call replace() for other processes "
                "in place of those, or restart() for all"
            )
        for name in sorted(call.names):
            self.names.check(name, call.ranks)

    def _note(self, rank: int, told: Parcel | Ended) -> None:
        if isinstance(told, Ended):
            self._lose(rank, ended(rank, told))
            return
        call = self._busy.get(rank)
        if call is None or rank not in call.owing:
            return
        call.owing.discard(rank)
        if bytes(told[0]) == DONE:
            call.results[rank] = told[1:]
        else:
            self._add_trouble(call, rank, failed(rank, told[1:]))

    def _lose(self, rank: int, trouble: Trouble) -> None:
        if rank in self.lost:
            return
        self.lost[rank] = trouble
        self.names.lose(rank)
        self._worlds.lose(rank)
        call = self._busy.get(rank)
        if call is not None and rank in call.owing:
            call.owing.discard(rank)
            self._add_trouble(call, rank, trouble)
            self._ranks.abort(call.owing, call.number, f"rank {rank} ended")

    def _add_trouble(self, call: Call, rank: int, trouble: Trouble) -> None:
        call.troubles[rank] = trouble
        call.judged_at = min(call.judged_at, time.monotonic() + OTHERS_SECONDS)

    def _note_late_calls(self) -> None:
        late, self._late = self._late, []
        for call in late:
            if call.is_finished or call.troubles:  # it is judged soon
                continue
            call.late = tuple(sorted(call.owing))
            if call.number:
                call.judged_at = min(call.judged_at, time.monotonic() + OTHERS_SECONDS)
                self._ranks.abort(call.owing, call.number, "the limit of the call has passed")
            else:
                call.finish(
                    WaitTimeout(
                        f"{listed(call.ranks)} of {self._size} did not begin the call within "
                        f"timeout_seconds={call.limit_seconds:g}: {listed(r for r in call.ranks if r in self._busy)} "
                        "had not answered an earlier one; wait for longer, or end it by replace(ranks)"
                    )
                )

    def _judge_calls(self) -> None:
        now = time.monotonic()
        for call in dict.fromkeys(self._busy.values()):
            if not call.is_finished and (not call.owing or now >= call.judged_at):
                self._judge(call)
        self._busy = {
            rank: call
            for rank, call in self._busy.items()
            if rank not in self.lost and not (call.is_finished and rank not in call.owing)
        }

    def _judge(self, call: Call) -> None:
        if call.kind == "delete":  # a rank that is lost meanwhile keeps nothing, and has not answered
            call.ranks = tuple(rank for rank in call.ranks if rank in call.results)
        if call.kind == "delete" or not (call.troubles or call.owing):
            if call.keep is not None:
                self.names.note(call.keep, call.ranks, call.number)
            call.finish()
            return
        if call.kind in ("meet", "world"):
            self._worlds.end(call.ranks)
        missing = sorted(call.owing)
        error, cause = self._verdict(call, missing)
        if call.keep is not None:
            self._sweep(rank for rank in call.ranks if rank not in call.owing)
        if call.kind != "sweep":  # of which nobody hears
            self._told.update(self._told_by(error, call, missing))
        call.finish(error, cause)

    def _told_by(self, error: BaseException, call: Call, missing: Sequence[int]) -> list[int]:
        """Returns the lost ranks of which an error tells; with one of them, that others of the call are to be replaced.

        An error that a rank raised which lives tells of none: the next call does. **Arguments:** `missing`: the ranks
        that had not answered, of which those that were ended by force are named by an error of the limit.
        """
        if isinstance(error, CallFailed | PeerLost) and error.rank not in self.lost:
            return []
        told = missing if isinstance(error, WaitTimeout) else call.ranks
        return [rank for rank in told if rank in self.lost]

    def _verdict(self, call: Call, missing: Sequence[int]) -> tuple[BaseException, BaseException | None]:
        """Returns what a call that failed raises, and its cause; ends the ranks that must be.

        **Arguments:** `missing`: the ranks that have not answered.
        """
        if call.late and call.kind != "meet":
            self._end_by_force(missing, "was ended by force: it did not answer in time, nor when the call was aborted")
            were = "were" if len(missing) > 1 else "was"
            forced = (
                f"{listed(missing)} did not even then and {were} ended by force: call replace(); " if missing else ""
            )
            return WaitTimeout(
                f"{listed(call.late)} of {self._size} did not answer within timeout_seconds={call.limit_seconds:g}, so "
                f"the call was aborted; {forced}allow more seconds, or find out what they wait for"
            ), None
        found = first(call.troubles, missing) if call.troubles else None
        if (
            call.kind == "meet"
            and missing
            and (found is None or found.is_consequence or isinstance(found.cause, WaitTimeout))
        ):
            return WaitTimeout(
                f"{listed(missing)} of {self._size} did not start and join the others within "
                f"timeout_seconds={call.limit_seconds:g}"
            ), None
        assert found is not None
        if found.lost is not None and not found.is_consequence:
            known = self.lost.get(found.lost.rank)  # which says how it ended
            self._end_by_force([found.lost.rank], "was ended by force: it was frozen or cut off")
            found = known or found
        if missing:
            found.error.add_note(f"{listed(missing)} had not answered; the next call there waits for that.")
        return found.error, found.cause

    def _end_by_force(self, ranks: Collection[int], how: str) -> None:
        self._ranks.kill(ranks)
        for rank in ranks:
            self._lose(rank, Trouble(PeerLost(f"rank {rank} {how}", rank), None, time.time()))

    def _sweep(self, ranks: Iterable[int]) -> None:
        """Lets ranks give up what they need no longer have, when they are free."""
        for rank in ranks:
            if rank not in self.lost:
                self._waiting.appendleft(Call(Sent("sweep", (rank,)), lambda: None))
