"""The contract of gangs: where ranks come from, and what is done with them once they are there."""

import math
import pickle
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar, final

from braidax.errors import ArgumentError, GangError, RankFailed, WaitTimeout
from braidax.gang.member import Failure, pack_call, unpack_answer

_OTHERS_SECONDS = 2.0  # that the other ranks have to answer when one has failed: one of them may have failed earlier

Result = TypeVar("Result")
_Kind = TypeVar("_Kind", bound="Gang")


@dataclass(frozen=True)
class Ended:
    """The process of a rank ended by itself.

    **Fields:** `host`, `pid`: of the process; `pid` is None where nobody knows it. `how`: in words, such as `was ended
    by signal 9 (SIGKILL)`. `time_seconds`: when that was seen (`time.time`). `log`: the last lines that it wrote.
    """

    host: str
    pid: int | None
    how: str
    time_seconds: float
    log: tuple[str, ...] = ()


class Ranks(ABC):
    """The ranks of one epoch of a gang. Every rank owes one answer when it has joined, and one for each call.

    A rank is a process that makes a `Member`, answers what its `join` returned and then, for each call, what `call`
    returned. One thread uses this.
    """

    @abstractmethod
    def call(self, call: bytes) -> None:
        """Begins to send a call to every rank; each one has answered all before."""

    @abstractmethod
    def answers(self, *, timeout_seconds: float | None) -> Mapping[int, bytes | bytearray | Ended]:
        """Waits until ranks have answered or ended, and returns what is new, by rank; empty behind the limit.

        Of each rank that owes an answer, that answer or its end comes once.
        """

    @abstractmethod
    def end(self) -> None:
        """Ends all processes, by force where they do not end within seconds, and gives up everything else.

        It raises nothing but `KeyboardInterrupt`. A second call does nothing.
        """


class Gang(ABC):
    """Ranks that hold one communicator among them and call functions together; a context manager.

    A gang whose function raised or whose rank died has ended its ranks; `restart` brings new ones. One thread uses it.

    **Arguments:** `size`: the number of ranks. `job`: the name of the job, without `/`. `timeout_seconds`: how long all
    ranks together may take to start and to meet.
    """

    def __init__(self, size: int, *, job: str, timeout_seconds: float) -> None:
        if size < 1:
            raise ArgumentError(f"{size=}: expected at least 1 rank")
        if not timeout_seconds > 0:
            raise ArgumentError(f"{timeout_seconds=}: expected seconds > 0")
        self._size = size
        self._job = job
        self._start_seconds = timeout_seconds
        self._epoch = -1
        self._ranks: Ranks | None = None
        self._hosts: tuple[str, ...] = ()
        self._why_not = "it was not started: call start(), or use it in a with block"

    @abstractmethod
    def _begin(self, epoch: int, deadline: float) -> Ranks:
        """Starts all ranks of an epoch, without waiting for them to join; they give up joining at the deadline.

        **Raises:** `GangError` when they cannot be started; nothing is left behind then.
        """

    @abstractmethod
    def _close(self) -> None:
        """Gives up what is kept over epochs; `start` may follow. A second call does nothing."""

    @property
    @final
    def size(self) -> int:
        """The number of ranks."""
        return self._size

    @property
    @final
    def job(self) -> str:
        """The name of the job."""
        return self._job

    @property
    @final
    def epoch(self) -> int:
        """How many lives the ranks had before this one; -1 before the first one."""
        return self._epoch

    @property
    @final
    def hosts(self) -> tuple[str, ...]:
        """The name of each rank's host, by rank, as of the last start."""
        return self._hosts

    @final
    def start(self) -> None:
        """Starts all ranks, and returns when each has heard of all others.

        **Raises:** `GangError` when they cannot be started, `RankFailed` when one cannot join; `WaitTimeout` naming the
        ranks that have not started within the limit. All ranks are ended then.
        """
        if self._ranks is not None:
            raise GangError("the gang runs already; restart() begins anew")
        self._epoch += 1
        deadline = time.monotonic() + self._start_seconds
        self._ranks = self._begin(self._epoch, deadline)
        self._hosts = tuple(self._gather_started(self._ranks, deadline))

    @final
    def run(self, fn: Callable[..., Result], *args: Any, timeout_seconds: float | None = None) -> list[Result]:
        """Calls `fn(comm, *args)` on every rank.

        **Arguments:** `fn`: a function; one of a script or notebook travels by value. `args`: pickled once for all
        ranks. `timeout_seconds`: how long the slowest rank may take; None waits for as long as all of them live.

        **Returns:** the results, in rank order. **Raises:** `RankFailed` naming the rank that failed first, with its
        traceback as a note and what it raised as the cause; `WaitTimeout` naming the ranks that have not answered. All
        ranks are ended then. `GangError` when there are none; `ArgumentError` for what cannot be sent.
        """
        if self._ranks is None:
            raise GangError(f"the gang cannot run a function: {self._why_not}")
        call = pack_call(fn, args)
        try:
            self._ranks.call(call)
        except BaseException:
            self._end("it was interrupted: call restart()")
            raise
        return self._gather(self._ranks, timeout_seconds=timeout_seconds)

    @final
    def restart(self) -> None:
        """Ends all ranks, if there are any, and starts all again under a new epoch."""
        self._end("it is being restarted")
        self.start()

    @final
    def stop(self) -> None:
        """Ends all ranks and gives up everything. A second call does nothing."""
        try:
            self._end("it was stopped: call start()")
        finally:
            self._close()

    @final
    def __enter__(self: _Kind) -> _Kind:
        if self._ranks is None:
            try:
                self.start()
            except BaseException:
                self.stop()
                raise
        return self

    @final
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _end(self, why_not: str) -> None:
        self._why_not = why_not
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.end()

    def _gather_started(self, ranks: Ranks, deadline: float) -> list[Any]:
        """Returns the answers of all ranks when they have joined; a little later they tell why they could not."""
        seconds = max(0.0, deadline - time.monotonic()) + _OTHERS_SECONDS
        results, troubles, missing = self._answers(ranks, seconds)
        if missing and (not troubles or isinstance(_first(troubles, missing).cause, WaitTimeout)):
            self._end(f"{_listed(missing)} did not start in time: call restart()")
            raise WaitTimeout(
                f"{_listed(missing)} of {self._size} did not start and join the others within "
                f"timeout_seconds={self._start_seconds:g}; all ranks were ended: allow more seconds, or see what they "
                "wrote"
            )
        return self._settled(results, troubles, missing)

    def _gather(self, ranks: Ranks, *, timeout_seconds: float | None) -> list[Any]:
        """Returns the answers of all ranks to what they were asked last; if one failed or is late, ends them all."""
        results, troubles, missing = self._answers(ranks, timeout_seconds)
        if missing and not troubles:
            self._end(f"{_listed(missing)} did not answer in time: call restart()")
            raise WaitTimeout(
                f"{_listed(missing)} of {self._size} did not answer within {timeout_seconds=}; all ranks were ended: "
                "allow more seconds, or find out what they wait for"
            )
        return self._settled(results, troubles, missing)

    def _answers(self, ranks: Ranks, seconds: float | None) -> tuple[dict[int, Any], dict[int, "_Trouble"], list[int]]:
        """Returns the results, the troubles, and the ranks that have neither within the limit."""
        try:
            results, troubles = _gathered(ranks, self._size, seconds)
        except BaseException:
            self._end("it was interrupted: call restart()")
            raise
        return results, troubles, [rank for rank in range(self._size) if rank not in results and rank not in troubles]

    def _settled(self, results: dict[int, Any], troubles: dict[int, "_Trouble"], missing: list[int]) -> list[Any]:
        if troubles:
            trouble = _first(troubles, missing)
            self._end(f"rank {trouble.error.rank} failed: call restart()")
            raise trouble.error from trouble.cause
        return [results[rank] for rank in range(self._size)]


@dataclass(frozen=True)
class _Trouble:
    """What the gang would raise for one rank, and what decides whether it does."""

    error: RankFailed
    cause: BaseException | None
    time_seconds: float
    is_consequence: bool = False
    lost: int | None = None


def _gathered(ranks: Ranks, size: int, timeout_seconds: float | None) -> tuple[dict[int, Any], dict[int, _Trouble]]:
    """Returns the results and the troubles by rank; the ranks that did not answer in time are in neither."""
    deadline = math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds
    results: dict[int, Any] = {}
    troubles: dict[int, _Trouble] = {}
    while len(results) + len(troubles) < size:
        left = deadline - time.monotonic()
        new = ranks.answers(timeout_seconds=None if math.isinf(left) else max(0.0, left))
        if not new and left <= 0:
            break
        had_trouble = bool(troubles)
        for rank, answer in new.items():
            read = _ended(rank, answer) if isinstance(answer, Ended) else _read(rank, answer, results)
            if read is not None:
                troubles[rank] = read
        if troubles and not had_trouble:
            deadline = min(deadline, time.monotonic() + _OTHERS_SECONDS)
    return results, troubles


def _read(rank: int, answer: bytes | bytearray, results: dict[int, Any]) -> _Trouble | None:
    """Puts the result that an answer holds into its place, or returns the trouble that it tells of."""
    try:
        failure, result = unpack_answer(answer)
    except Exception as error:  # noqa: BLE001 (a user's own class may fail in any way)
        told = RankFailed(
            f"rank {rank}: its result cannot be unpickled here: {type(error).__name__}: {error}; return what both "
            "sides can import, such as NumPy arrays",
            rank,
        )
        return _Trouble(told, error, time.time())
    if failure is None:
        results[rank] = result
        return None
    told = RankFailed(f"{failure.where}: {failure.what}", rank)
    told.add_note(f"In {failure.where}:\n{failure.traceback}")
    return _Trouble(told, _cause(failure), failure.time_seconds, failure.is_consequence, failure.lost)


def _cause(failure: Failure) -> BaseException | None:
    if failure.error is None:
        return None
    try:
        return pickle.loads(failure.error)
    except Exception:  # noqa: BLE001 (its class may be known to the rank only)
        return None


def _ended(rank: int, ended: Ended) -> _Trouble:
    pid = "" if ended.pid is None else f", pid {ended.pid}"
    message = f"rank {rank} (host {ended.host}{pid}) {ended.how}"
    if ended.log:
        message = "\n".join([f"{message}; the last lines that it wrote:", *ended.log])
    return _Trouble(RankFailed(message, rank), None, ended.time_seconds)


def _first(troubles: Mapping[int, _Trouble], missing: list[int]) -> _Trouble:
    """Returns the trouble that came first, those that only tell of another rank's behind all others."""
    first = min(troubles.values(), key=lambda trouble: (trouble.is_consequence, trouble.time_seconds))
    if not first.is_consequence or first.lost not in missing:
        return first
    told = RankFailed(f"rank {first.lost} does not answer: it is frozen or cut off; {first.error}", first.lost)
    return _Trouble(told, first.cause, first.time_seconds)


def _listed(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
