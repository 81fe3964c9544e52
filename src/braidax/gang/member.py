"""What runs in a rank, whatever started it: it joins the others, and calls what the gang sends.

A rank lives as long as its epoch, and so does its process: what a function leaves in a module's globals is there for
the next one. Nothing here imports JAX; a function that needs it does so when it is unpickled.
"""

import contextlib
import io
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import cloudpickle

from braidax.comm import Communicator, Store, Tuning, connect
from braidax.comm.rendezvous import DEFAULT
from braidax.errors import Aborted, ArgumentError, CommError, GangError, PeerLost


@dataclass(frozen=True)
class Failure:
    """What went wrong in a rank, in a form that travels.

    **Fields:** `rank`: of the gang. `where`: the rank in words, with host and process. `what`: the type and message of
    what was raised. `traceback`: its text. `time_seconds`: when, by the rank's clock (`time.time`). `is_consequence`:
    whether it only says that another rank failed. `lost`: the rank that it says is lost. `error`: what was raised,
    pickled, if that can be done.
    """

    rank: int
    where: str
    what: str
    traceback: str
    time_seconds: float
    is_consequence: bool
    lost: int | None
    error: bytes | None


@final
class Member:
    """One rank of one epoch of a gang. One thread uses it.

    **Arguments:** `store`: where the ranks of the job meet; it is closed by `leave`. `rank`, `size`: of this process
    and of the gang. `job`, `epoch`: of the gang. `transport`, `timeout_seconds`, `tuning`: as `connect` takes them.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        size: int,
        job: str,
        epoch: int,
        transport: str,
        timeout_seconds: float,
        tuning: Tuning = DEFAULT,
    ) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._job = job
        self._epoch = epoch
        self._transport = transport
        self._timeout_seconds = timeout_seconds
        self._tuning = tuning
        self._comm: Communicator | None = None

    def join(self, *, timeout_seconds: float) -> bytes:
        """Waits until all ranks are there, and returns the answer: the name of this host, or what was raised.

        **Arguments:** `timeout_seconds`: the limit of this; later waits have that of the constructor.
        """
        return self._answer(lambda: self._join(timeout_seconds))

    def call(self, call: bytes | bytearray) -> bytes:
        """Calls what `pack_call` packed, as `fn(comm, *args)`, and returns the answer: the result or what was raised.

        What raises here ends the epoch: the other ranks raise `Aborted` at their next message rather than wait.
        """
        return self._answer(lambda: self._call(call))

    def abort(self, reason: str) -> None:
        """Ends the epoch: the call under way raises `Aborted` at its next message, here and on all ranks.

        A `join` under way raises when its store sees that it was closed. Any thread may call this.
        """
        comm = self._comm
        if comm is not None:
            comm.abort(reason)
        else:
            self._store.close()

    def leave(self) -> None:
        """Leaves the other ranks and the store. A second call does nothing."""
        comm, self._comm = self._comm, None
        try:
            if comm is not None:
                comm.close()
        finally:
            self._store.close()

    def _join(self, timeout_seconds: float) -> str:
        self._comm = connect(
            self._store,
            rank=self._rank,
            size=self._size,
            transport=self._transport,
            job=self._job,
            epoch=self._epoch,
            timeout_seconds=timeout_seconds,
            tuning=self._tuning,
        )
        self._comm.timeout_seconds = self._timeout_seconds
        return self._comm.hosts[self._rank]

    def _call(self, call: bytes | bytearray) -> Any:
        if self._comm is None:
            raise GangError(f"rank {self._rank} was called before it joined the others; call join() first")
        fn, args = pickle.loads(call)
        result = fn(self._comm, *args)
        self._comm.settle()
        return result

    def _answer(self, fn: Callable[[], Any]) -> bytes:
        try:
            result = fn()
        except BaseException as error:  # noqa: BLE001 (the gang raises it)
            return self._failed(error)
        try:
            return _dumps((None, result))
        except Exception as error:  # noqa: BLE001 (whatever pickling raises)
            kind = type(result)
            told = GangError(
                f"the result cannot be sent: it is of type {kind.__module__}.{kind.__qualname__}, and pickling it "
                f"raised {type(error).__name__}: {error}; return what can be pickled, such as NumPy arrays"
            )
            told.__cause__ = error
            return self._failed(told)

    def _failed(self, error: BaseException) -> bytes:
        seconds = time.time()
        what = f"{type(error).__qualname__}: {_text(error)}"
        host = socket.gethostname()
        if self._comm is not None:
            host = self._comm.hosts[self._rank]
            with contextlib.suppress(CommError):  # the others are gone already
                self._comm.abort(what)
        failure = Failure(
            rank=self._rank,
            where=f"rank {self._rank} (host {host}, pid {os.getpid()})",
            what=what,
            traceback="".join(traceback.format_exception(error)),
            time_seconds=seconds,
            is_consequence=is_consequence(error),
            lost=next((link.rank for link in _chain(error) if isinstance(link, PeerLost)), None),
            error=_pickled(error),
        )
        return _dumps((failure, None))


def pack_call(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Returns a function and its arguments as `Member.call` takes them.

    Functions and classes of `__main__` travel by value, so no script needs a guard; those of modules by name.

    **Raises:** `ArgumentError` naming what cannot be pickled.
    """
    try:
        return _dumps((fn, args))
    except Exception as error:
        name, value = _culprit(fn, args)
        shown = repr(value)
        shown = shown if len(shown) <= 80 else shown[:80] + "…"
        raise ArgumentError(
            f"{name} is {shown}, which cannot be sent to the ranks: {type(error).__name__}: {error}; make it in the "
            "function itself, or pass what it is made from"
        ) from error


def unpack_answer(answer: bytes | bytearray) -> tuple[Failure | None, Any]:
    """Returns what an answer holds: the failure, or None and the result."""
    return pickle.loads(answer)


def is_consequence(error: BaseException) -> bool:
    """Says whether an error came from the failure of another rank."""
    return any(isinstance(link, PeerLost | Aborted) for link in _chain(error))


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
