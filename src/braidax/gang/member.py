"""What runs in a rank, whatever started it: it meets the others, calls what the gang sends, and keeps what it is told.

A rank lives on when a call has failed, and so does its process: what it keeps is there for the next one. Nothing here
imports JAX; a function that needs it does so when it is unpickled.
"""

import contextlib
import io
import os
import pickle
import socket
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, final

import cloudpickle

from braidax.comm import Communicator, Store, Tuning, connect
from braidax.comm.rendezvous import DEFAULT, give_up_meeting
from braidax.errors import Aborted, ArgumentError, BraidaxError, CommError, GangError, PeerLost
from braidax.gang.calling.orders import DONE, FAILED, Failure, LostRank, Meeting, Order
from braidax.gang.calling.parcels import Parcel, pack, unpack
from braidax.gang.keeping.kept import Handed, Kept


@final
class Member:
    """One rank of a gang. One thread uses it, but for `abort`.

    **Arguments:** `store`: where the ranks meet; it is closed by `leave`. `rank`: of the gang. `transport`,
    `timeout_seconds`, `tuning`: as `connect` takes them. `first_deadline`: until when the first meeting must be over,
    by `time.monotonic`; None for what the gang says.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        transport: str,
        timeout_seconds: float,
        tuning: Tuning = DEFAULT,
        first_deadline: float | None = None,
    ) -> None:
        self._store = store
        self._rank = rank
        self._transport = transport
        self._timeout_seconds = timeout_seconds
        self._tuning = tuning
        self._first_deadline = first_deadline
        self._comms: dict[tuple[str, int], Communicator] = {}
        self._kept: dict[str, tuple[int, Any]] = {}
        self._made: tuple[str, int, Any] | None = None  # by the last call; the next order says whether it is kept
        self._handed: dict[str, Any] = {}  # by token; other threads put it there
        self._lock = threading.Lock()
        self._order: Order | None = None  # of the call under way
        self._aborted: tuple[int, str] = (0, "")  # the call that is to end, which may not have begun, and why
        self._dismissed = ""  # why all are

    def answer(self, head: Parcel, body: Parcel) -> Parcel:
        """Does what an order says, and returns the answer: the result, or what was raised.

        What a function raises ends the generation of its meeting: the other ranks raise `Aborted` at their next message
        rather than wait.

        **Arguments:** `head`: the pickled `Order`, and behind it the parcel of what is this rank's own, if anything is.
        `body`: of `pack_call`; empty to meet only.
        """
        order: Order = pickle.loads(head[0])
        with self._lock:
            self._order = order
        try:
            self._give_up_all_but(order)
            result = self._done(order, head[1:], body)
            if order.keep is not None:
                self._made, result = (order.keep, order.number, result), None
            return [DONE, *_packed(result)]
        except BaseException as error:  # noqa: BLE001 (the gang raises it)
            return [FAILED, pickle.dumps(self._failure(order.meeting, error))]
        finally:
            with self._lock:
                self._order = None

    def hand(self, token: str, value: Any) -> None:
        """Has a value ready for the call that names it by its token (`Handed`). Any thread may call this."""
        self._handed[token] = value

    def take_back(self, token: str) -> None:
        """Gives up what was handed over and not taken. Any thread may call this."""
        self._handed.pop(token, None)

    def kept(self, name: str) -> Any:
        """Returns what is kept under a name. Any thread may call this. **Raises:** `GangError` where nothing is."""
        return self._look_up(name)

    def abort(self, call: int, reason: str) -> None:
        """Ends the generation of a call, if that is under way: it raises `Aborted` at its next message, on all its
        ranks.

        One that waits for others to meet does so within about a second. Any thread may call this.
        """
        with self._lock:
            self._aborted = call, reason
            order = self._order
            meeting = None if order is None or order.number != call else order.meeting
            comm = None if meeting is None else self._comms.get((meeting.job, meeting.generation))
        if comm is not None:
            comm.abort(reason)
        elif meeting is not None:
            self._abort_meeting(meeting, reason)

    def dismiss(self, reason: str) -> None:
        """Ends the call under way, if there is one, for `leave` follows: it raises at its next message.

        One that waits for others to meet does so when its store sees that it was closed. Any thread may call this.
        """
        with self._lock:
            self._dismissed = reason
            meeting = None if self._order is None else self._order.meeting
            comm = None if meeting is None else self._comms.get((meeting.job, meeting.generation))
        if comm is not None:
            comm.abort(reason)
        else:
            self._store.close()

    def move(self, store: Store) -> None:
        """Meets at another store from now on; the former one is closed."""
        former, self._store = self._store, store
        former.close()

    def leave(self) -> None:
        """Leaves the other ranks and the store, and gives up all that is kept. A second call does nothing."""
        self._kept, self._made = {}, None
        self._handed.clear()
        try:
            for key in list(self._comms):
                self._close(key)
        finally:
            self._store.close()

    def _give_up_all_but(self, order: Order) -> None:
        """Gives up what an order does not name: deleted names, results that are not kept, generations that ended."""
        made, self._made = self._made, None
        if made is not None and order.kept.get(made[0]) == made[1]:
            self._kept[made[0]] = made[1:]
        self._kept = {name: kept for name, kept in self._kept.items() if order.kept.get(name) == kept[0]}
        for key in [key for key in self._comms if key not in order.meetings]:
            self._close(key)

    def _close(self, key: tuple[str, int]) -> None:
        comm = self._comms.pop(key)
        with contextlib.suppress(BraidaxError):  # the call that failed has told of it, or a peer has gone
            comm.close()

    def _done(self, order: Order, own: Parcel, body: Parcel) -> Any:
        comm = None if order.meeting is None else self._joined(order.meeting)
        if not body:
            return socket.gethostname() if comm is None else comm.hosts[comm.rank]
        fn, args = unpack(body, look_up=self._look_up)
        args = (*args, *([unpack(own, look_up=self._look_up)] if own else []))
        result = fn(comm, *args)
        if comm is not None:
            comm.settle()
        return result

    def _joined(self, meeting: Meeting) -> Communicator:
        key = meeting.job, meeting.generation
        if key not in self._comms:
            comm = self._connected(meeting)
            with self._lock:
                self._comms[key] = comm
        with self._lock:
            reason = self._reason
        if reason:  # it was told to before the call began, or while all met
            self._comms[key].abort(reason)
        return self._comms[key]

    @property
    def _reason(self) -> str:
        """Why the call under way is to end, if it is."""
        call, reason = self._aborted
        return self._dismissed or (reason if self._order is not None and self._order.number == call else "")

    def _connected(self, meeting: Meeting) -> Communicator:
        with self._lock:
            reason = self._reason
        if reason:
            self._abort_meeting(meeting, reason)
        seconds = meeting.timeout_seconds
        if self._first_deadline is not None:
            seconds = max(1e-3, min(seconds, self._first_deadline - time.monotonic()))
            self._first_deadline = None
        comm = connect(
            self._store,
            rank=meeting.ranks.index(self._rank),
            size=len(meeting.ranks),
            transport=self._transport,
            job=meeting.job,
            generation=meeting.generation,
            timeout_seconds=seconds,
            tuning=self._tuning,
        )
        comm.timeout_seconds = self._timeout_seconds
        return comm

    def _abort_meeting(self, meeting: Meeting, reason: str) -> None:
        with contextlib.suppress(BraidaxError):  # a store that cannot be reached ends the meeting, too
            give_up_meeting(self._store, job=meeting.job, generation=meeting.generation, reason=reason)

    def _look_up(self, name: str) -> Any:
        if name in self._handed:
            return self._handed.pop(name)
        if name not in self._kept:
            raise GangError(
                f"rank {self._rank} does not keep {name!r}, which the gang believes it does; call restart()"
            )
        return self._kept[name][1]

    def _failure(self, meeting: Meeting | None, error: BaseException) -> Failure:
        seconds = time.time()
        what = f"{type(error).__qualname__}: {_text(error)}"
        host = self._tuning.host or socket.gethostname()
        comm = None if meeting is None else self._comms.get((meeting.job, meeting.generation))
        lost = None if meeting is None else _lost(meeting, comm, error)
        if comm is not None:
            with contextlib.suppress(CommError):  # the others are gone already
                comm.abort(what)
        return Failure(
            host=host,
            where=f"rank {self._rank} (host {host}, pid {os.getpid()})",
            what=what,
            traceback="".join(traceback.format_exception(error)),
            time_seconds=seconds,
            is_consequence=is_consequence(error),
            lost=lost,
            error=_pickled(error),
        )


def pack_call(fn: Callable[..., Any], args: tuple[Any, ...], job: str) -> tuple[Parcel, frozenset[str]]:
    """Returns a function and its arguments as `Member.answer` takes them, and the names of kept things that they name.

    **Arguments:** `job`: of the gang.

    **Raises:** `ArgumentError` naming what cannot be pickled, or what another gang keeps.
    """
    try:
        return pack_value((fn, args), job)
    except ArgumentError:
        raise
    except Exception as error:
        name, value = _culprit(fn, args)
        raise _unsendable(name, value, error) from error


def pack_own(name: str, value: Any, job: str) -> tuple[Parcel, frozenset[str]]:
    """Returns what one rank alone gets, as `pack_call` does. **Arguments:** `name`: of the value, in an error."""
    try:
        return pack_value(value, job)
    except ArgumentError:
        raise
    except Exception as error:
        raise _unsendable(name, value, error) from error


def pack_value(value: Any, job: str) -> tuple[Parcel, frozenset[str]]:
    """Returns the parcel of a value, and the names of kept things in it. **Raises:** whatever pickling raises."""
    names: set[str] = set()

    def refer(part: Any) -> str | None:
        if isinstance(part, Handed) and part.job == job:
            return part.token
        if not isinstance(part, Kept):
            return None
        if part.job != job:
            raise ArgumentError(f"kept({part.name!r}) is of the gang {part.job}, this one is {job}: use its own kept()")
        names.add(part.name)
        return part.name

    return pack(value, refer=refer), frozenset(names)


def is_consequence(error: BaseException, of: tuple[type[BaseException], ...] = (PeerLost, Aborted)) -> bool:
    """Says whether an error came from the failure of another rank. **Arguments:** `of`: what tells of such a one."""
    return any(isinstance(link, of) for link in _chain(error))


def _lost(meeting: Meeting, comm: Communicator | None, error: BaseException) -> LostRank | None:
    """Returns the rank that the communicator of a call has lost, if an error came from that.

    Others that a function has, those of a loader for instance, number their processes in their own way.
    """
    found = next((link for link in _chain(error) if isinstance(link, PeerLost)), None)
    if found is not None and comm is not None:
        found = comm.failure
    return LostRank(meeting.ranks[found.rank], found.host) if isinstance(found, PeerLost) else None


def _packed(result: Any) -> Parcel:
    try:
        return pack(result)
    except Exception as error:
        kind = type(result)
        raise GangError(
            f"the result cannot be sent: it is of type {kind.__module__}.{kind.__qualname__}, and pickling it "
            f"raised {type(error).__name__}: {error}; return what can be pickled, such as NumPy arrays, or keep it "
            "there (keep=)"
        ) from error


def _unsendable(name: str, value: Any, error: Exception) -> ArgumentError:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:80] + "…"
    return ArgumentError(
        f"{name} is {shown}, which cannot be sent to the ranks: {type(error).__name__}: {error}; make it in the "
        "function itself, or pass what it is made from"
    )


def _dumps(value: Any) -> bytes:
    with io.BytesIO() as file:
        cloudpickle.Pickler(file, protocol=5).dump(value)
        return file.getvalue()


def _culprit(fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[str, Any]:
    """Returns the first part of a call that cannot be pickled alone, with its name."""
    parts = {"fn": fn, **{f"args[{number}]": arg for number, arg in enumerate(args)}}
    for name, part in parts.items():
        try:
            _dumps(part)
        except Exception:  # noqa: BLE001 (the caller raises the first error)
            return name, part
    return "args", args


def _pickled(error: BaseException) -> bytes | None:
    """Returns an error pickled, or None if it cannot be: a user's own kind may fail in any way."""
    try:
        data = _dumps(error)
        pickle.loads(data)
    except Exception:  # noqa: BLE001 (in any way)
        return None
    return data


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 (a user's own kind may fail in any way)
        return "(its message cannot be shown)"


def _chain(error: BaseException) -> list[BaseException]:
    """Returns an error and what it came from."""
    found: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in found:
        found.append(link)
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return found
