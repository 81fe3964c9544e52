"""Gangs: ranks that stay, call functions together, and keep things between calls."""

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Literal, TypeVar, final

from braidax.errors import ArgumentError, CallFailed, GangError, PeerLost, WaitTimeout
from braidax.gang.calling.call import Call, GangFuture, Kind, Sent
from braidax.gang.calling.dispatch import OTHERS_SECONDS, Dispatch
from braidax.gang.calling.parcels import Parcel
from braidax.gang.calling.ranks import Ranks
from braidax.gang.calling.worlds import Worlds
from braidax.gang.keeping.kept import Kept, check_name
from braidax.gang.keeping.rows import divided
from braidax.gang.member import pack_call, pack_own

Result = TypeVar("Result")
_Self = TypeVar("_Self", bound="Gang")


class Gang(ABC):
    """Ranks that call functions with a communicator among them, and stay; a context manager.

    A call that raises fails alone: the ranks go on with all that they keep, and meet anew for the next call. When a
    rank dies, the others stay: `lost` names it, `replace` brings another process in its place, `restart` a whole new
    gang. One thread starts, restarts and stops it; any thread may call the rest.

    **Arguments:** `size`: the number of ranks. `job`: the name of the job, without `/`. `timeout_seconds`: how long all
    ranks together may take to start and to meet. `transport`: what carries the ranks' messages.
    """

    def __init__(self, size: int, *, job: str, timeout_seconds: float, transport: str) -> None:
        if size < 1:
            raise ArgumentError(f"{size=}: expected at least 1 rank")
        if not timeout_seconds > 0:
            raise ArgumentError(f"{timeout_seconds=}: expected seconds > 0")
        self._size = size
        self._job = job
        self._transport = transport
        self._start_seconds = timeout_seconds
        self._worlds = Worlds(job, size, timeout_seconds)
        self._ranks: Ranks | None = None
        self._dispatch: Dispatch | None = None
        self._hosts: tuple[str, ...] = ()
        self._replacing = threading.Lock()
        self._due: deque[str] = deque()
        self._why_not = "it was not started: call start(), or use it in a with block"

    @abstractmethod
    def _begin(self, deadline: float) -> Ranks:
        """Starts all ranks, without waiting for them to meet; they give up meeting first at the deadline.

        **Raises:** `GangError` when they cannot be started; nothing is left behind then.
        """

    @abstractmethod
    def _close(self) -> None:
        """Gives up what is kept over restarts; `start` may follow. A second call does nothing."""

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
    def transport(self) -> str:
        """What carries the ranks' messages, such as "tcp"."""
        return self._transport

    @property
    @final
    def generation(self) -> int:
        """How often all ranks had met before they met last; -1 before the first time."""
        return self._worlds.generation

    @property
    @final
    def hosts(self) -> tuple[str, ...]:
        """The name of each rank's host, by rank, as of the last start or replacement."""
        return self._hosts

    @property
    @final
    def lost(self) -> tuple[int, ...]:
        """The ranks that have no process any more, as far as that is known."""
        return () if self._dispatch is None else tuple(sorted(self._dispatch.lost))

    @final
    def start(self) -> None:
        """Starts all ranks, and returns when each has heard of all others.

        **Raises:** `GangError` when they cannot be started, `CallFailed` or `PeerLost` when one cannot meet the others;
        `WaitTimeout` naming the ranks that have not started within the limit. All ranks are ended then.
        """
        if self._ranks is not None:
            raise GangError("the gang runs already; restart() begins anew")
        deadline = time.monotonic() + self._start_seconds
        self._ranks = self._begin(deadline)
        try:
            self._dispatch = Dispatch(self._ranks, self._worlds, self._size)
            self._meet(deadline, self._all)
        except WaitTimeout as error:
            self._end(f"{str(error).partition(';')[0]}: call start()")
            raise WaitTimeout(f"{error}; all ranks were ended: allow more seconds, or see what they wrote") from None
        except (CallFailed, PeerLost) as failed:
            self._end(f"rank {failed.rank} failed: call start()")
            raise
        except BaseException:
            self._end("it was interrupted: call restart()")
            raise

    @final
    def submit(
        self,
        fn: Callable[..., Result],
        *args: Any,
        per_rank: Sequence[Any] | None = None,
        ranks: Sequence[int] | None = None,
        keep: str | None = None,
    ) -> GangFuture[Result]:
        """Begins to call `fn(comm, *args)` on ranks, and does not wait.

        Calls of disjoint ranks run at once; one for ranks that are busy waits in line. Large buffers of arguments are
        sent as they are: do not change them before the call has ended.

        **Arguments:** `fn`: a function; one of a script or notebook travels by value. `args`: pickled once for all
        ranks; `kept(name)` among them is what each rank keeps. `per_rank`: one more argument for each rank, that only
        this rank gets, as the last one. `ranks`: those that call, in ascending order; None is all. Their communicator
        has these ranks alone, numbered from 0, and stays for the next call of the same ones. `keep`: the name under
        which each rank keeps its result, in place of sending it; the results are None then.

        **Returns:** a handle with the results. **Raises:** `GangError` when the gang does not run, or too many calls
        wait; `ArgumentError` for what cannot be sent, or ranks that are not there.
        """
        call = self._call("world", self._checked(ranks), fn, args, per_rank, keep)
        self._running().submit(call)
        return GangFuture(call.ranks, call)

    @final
    def run(
        self,
        fn: Callable[..., Result],
        *args: Any,
        per_rank: Sequence[Any] | None = None,
        ranks: Sequence[int] | None = None,
        keep: str | None = None,
        timeout_seconds: float | None = None,
    ) -> list[Result]:
        """Calls `fn(comm, *args)` on ranks, and waits for the results.

        **Arguments:** as `submit` takes them. `timeout_seconds`: how long all of this may take; None waits for as long
        as the ranks live. Behind the limit the call is aborted, and ranks that do not come back by that within two
        seconds are ended by force: they are lost.

        **Returns:** the results, in rank order.

        **Raises:** as `submit`; of the rank that failed first `CallFailed` with its traceback when the function raised,
        and what that was as the cause, or `PeerLost` when its process ended, froze or was cut off; `WaitTimeout` naming
        the ranks that have not answered; `GangError` when ranks are lost or lack what they should keep;
        `ArgumentError` for a name that nothing is kept under. Nothing new is kept then.
        """
        self._delete_due()
        call = self._call("world", self._checked(ranks), fn, args, per_rank, keep)
        return self._result(call, timeout_seconds)

    @final
    def put(self, name: str, values: Sequence[Any]) -> None:
        """Keeps values on the ranks under a name, in place of what was kept so before.

        **Arguments:** `values`: a list as long as the gang, one value for each rank; or one of any other length, of
        arrays or tables (NumPy, pyarrow, Polars) whose rows are divided evenly, in order. They go from here to the
        ranks.

        **Raises:** `ArgumentError` for values that are neither, or cannot be sent; otherwise as `run`.
        """
        check_name(name)
        if not isinstance(values, list | tuple) or not values:
            raise ArgumentError(
                f"values= is {'empty' if isinstance(values, list | tuple) else f'a {type(values).__qualname__}'}: "
                f"expected a list with a value for each of the {self._size} ranks, or with arrays or tables whose rows "
                "are to be divided, such as [table]"
            )
        mine = values if len(values) == self._size else divided(values, self._size)
        self._result(self._call("alone", self._all, _itself, (), mine, name), None)

    @final
    def get(self, name: str, *, ranks: Sequence[int] | None = None) -> list[Any]:
        """Returns what the ranks keep under a name, in rank order: a copy, brought here.

        **Arguments:** `ranks`: of which; None is all.

        **Raises:** `ArgumentError` for a name that is not there, `GangError` naming ranks that lack it; otherwise as
        `run`.
        """
        return self._result(self._call("alone", self._checked(ranks), _itself, (self.kept(name),), None, None), None)

    @final
    def delete(self, name: str) -> None:
        """Gives up what the ranks keep under a name, when the calls before have ended.

        **Raises:** `ArgumentError` for a name that is not there.
        """
        self._result(Call(Sent("delete", self._all, keep=name), self._interrupted), None)

    @final
    def delete_later(self, name: str) -> None:
        """Gives up what the ranks keep under a name before the next `run`; also from a finalizer, in any thread.

        Nothing happens for a name that is not there by then.
        """
        self._due.append(name)

    def _delete_due(self) -> None:
        with contextlib.suppress(IndexError):  # another thread takes names, too
            while True:
                name = self._due.popleft()
                if name in self.names():
                    self.delete(name)

    @final
    def names(self) -> tuple[str, ...]:
        """Returns the names under which ranks keep something."""
        return () if self._dispatch is None else tuple(sorted(self._dispatch.names))

    @final
    def lacking(self, name: str) -> tuple[int, ...]:
        """Returns the ranks that keep nothing under a name: lost ones, and those that have not made it."""
        return self._all if self._dispatch is None else self._dispatch.names.lacking(name)

    @final
    def kept(self, name: str) -> Kept:
        """Returns what stands, anywhere in the arguments of a call, for that which each rank keeps under a name."""
        check_name(name)
        return Kept(name, self._job)

    @final
    def replace(self, ranks: Sequence[int] = (), *, others: Literal["wait", "leave"] = "wait") -> None:
        """Starts another process for each lost rank, and returns when all ranks have met under the next generation.

        The others stay, with what they keep; what the lost ones kept is gone. Nothing happens when none is lost.

        **Arguments:** `ranks`: to replace besides: they are ended by force, such as one that hangs. Calls that wait for
        ranks that are lost are refused. `others`: "leave": those that stay may be busy, and all meet in their next
        call; this returns when the new ones have met.

        **Raises:** `GangError` when no process can be started, `CallFailed` or `PeerLost` when a rank fails meanwhile;
        `WaitTimeout` when a rank is busy, or late. The gang stays as far as it is there: call it again.
        """
        asked = self._checked(ranks) if ranks else ()
        with self._replacing:
            self._replace(asked, others)

    def _replace(self, asked: tuple[int, ...], others: Literal["wait", "leave"]) -> None:
        dispatch, started = self._running(), self._ranks
        if started is None or not (asked or dispatch.lost):
            return
        deadline = time.monotonic() + self._start_seconds
        try:
            with dispatch.paused():
                started.kill(asked)
                lost = dispatch.lose(asked, "was ended by force: it is being replaced")
                started.replace(lost, deadline)
                dispatch.find(lost)
        except (GangError, PeerLost):
            raise
        except BaseException:
            self._interrupted()
            raise
        self._meet(deadline, self._all if others == "wait" else lost)

    @final
    def restart(self) -> None:
        """Ends all ranks, if there are any, and starts all again under a new generation. Nothing is kept."""
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
    def __enter__(self: _Self) -> _Self:
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

    @property
    def _all(self) -> tuple[int, ...]:
        return tuple(range(self._size))

    def _checked(self, ranks: Sequence[int] | None) -> tuple[int, ...]:
        if ranks is None:
            return self._all
        found = tuple(ranks)
        if not found or list(found) != sorted(set(found)) or not set(found) <= set(self._all):
            raise ArgumentError(
                f"ranks={ranks!r}: expected different ranks of 0 to {self._size - 1} in ascending order, at least one"
            )
        return found

    def _running(self) -> Dispatch:
        if self._dispatch is None:
            raise GangError(f"the gang cannot run a function: {self._why_not}")
        return self._dispatch

    def _call(
        self,
        kind: Kind,
        ranks: tuple[int, ...],
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        per_rank: Sequence[Any] | None,
        keep: str | None,
    ) -> Call:
        self._running()
        if keep is not None:
            check_name(keep)
        body, names = pack_call(fn, args, self._job)
        own: list[Parcel] = []
        if per_rank is not None:
            if len(per_rank) != len(ranks):
                raise ArgumentError(
                    f"per_rank= has {len(per_rank)} values; expected one for each of {len(ranks)} ranks"
                )
            for rank, value in zip(ranks, per_rank, strict=True):
                parcel, more = pack_own(f"per_rank[{rank}]", value, self._job)
                own.append(parcel)
                names |= more
        return Call(Sent(kind, ranks, body, own, names, keep), self._interrupted)

    def _result(self, call: Call, timeout_seconds: float | None, *, limit_seconds: float | None = None) -> list[Any]:
        """Submits a call and waits for its results. **Arguments:** `limit_seconds`: the limit, as it is told."""
        dispatch = self._running()
        try:
            dispatch.submit(call)
            if not call.wait(timeout_seconds):
                dispatch.expire(call, limit_seconds or timeout_seconds or 0.0)
                call.wait(None)
        except (GangError, PeerLost):
            raise
        except BaseException:  # a rank may be quick enough to interrupt what begins its call
            self._interrupted()
            raise
        return call.take()

    def _meet(self, deadline: float, ranks: tuple[int, ...]) -> None:
        """Lets ranks meet; a little after the deadline they tell why they could not."""
        call = Call(Sent("meet", ranks), self._interrupted)
        call.limit_seconds = self._start_seconds
        left = max(0.0, deadline - time.monotonic()) + OTHERS_SECONDS
        hosts = self._result(call, left, limit_seconds=self._start_seconds)
        found = dict(enumerate(self._hosts)) | dict(zip(ranks, hosts, strict=True))
        self._hosts = tuple(found[rank] for rank in self._all)

    def _interrupted(self) -> None:
        self._end("it was interrupted: call restart()", "interrupt")

    def _end(self, why_not: str, reason: Literal["stop", "interrupt"] = "stop") -> None:
        dispatch, self._dispatch = self._dispatch, None
        ranks, self._ranks = self._ranks, None
        self._why_not = why_not
        self._worlds.end_all()
        try:
            if dispatch is not None:
                dispatch.close(why_not)
        finally:
            if ranks is not None:
                ranks.end(reason)


def _itself(comm: object, value: Result) -> Result:
    """Returns what a rank got, or keeps."""
    return value
