"""A call of a function in ranks: what is sent, what has come back, and the handle that users hold."""

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar, cast, final

from braidax.errors import CallFailed, WaitTimeout
from braidax.gang.calling.parcels import Parcel, unpack
from braidax.gang.calling.verdict import Trouble
from braidax.gang.keeping.kept import listed

Result = TypeVar("Result")
_SLICE_SECONDS = 0.5  # of a wait

Kind = Literal["meet", "world", "alone", "delete", "sweep"]
"""What the ranks of a call do: only meet; call a function with their communicator; call one without any; give up what
is kept under the name `keep`; or give up whatever they need no longer have.
"""


@dataclass(frozen=True)
class Sent:
    """What a call is made of.

    **Fields:** `kind`. `ranks`: in order. `body`: function and arguments, the same for all; empty for none. `own`: for
    each of the ranks what is its own; empty for nothing. `names`: of kept things that it asks for. `keep`: the name
    under which results are kept.
    """

    kind: Kind
    ranks: tuple[int, ...]
    body: Parcel = field(default_factory=Parcel, repr=False)
    own: Sequence[Parcel] = field(default=(), repr=False)
    names: frozenset[str] = frozenset()
    keep: str | None = None


@final
class Call:
    """A call, from when it is submitted until its results are taken. The thread that serves the gang changes it.

    **Fields:** `number`: 0 for one that has not begun. `owing`: the ranks that have not answered. `results`: parcels
    by rank. `troubles`: by rank. `late`: the ranks that had not answered when its limit, `limit_seconds`, passed.
    `judged_at`: when those that have not answered are not waited for any longer (`time.monotonic`).
    """

    def __init__(self, sent: Sent, interrupted: Callable[[], None]) -> None:
        self.sent: Sent | None = sent
        self.ranks = sent.ranks
        self.kind: Kind = sent.kind
        self.names, self.keep = sent.names, sent.keep
        self.number = 0
        self.owing = set(sent.ranks)
        self.results: dict[int, Parcel] = {}
        self.troubles: dict[int, Trouble] = {}
        self.late: tuple[int, ...] = ()
        self.limit_seconds = math.inf
        self.judged_at = math.inf
        self._interrupted = interrupted
        self._error: BaseException | None = None
        self._cause: BaseException | None = None
        self._values: list[Any] | None = None
        self._taking = threading.Lock()
        self._finished = threading.Event()

    @property
    def is_finished(self) -> bool:
        """Whether it has its results or its error."""
        return self._finished.is_set()

    def finish(self, error: BaseException | None = None, cause: BaseException | None = None) -> None:
        """Ends the call: with what it has, or with an error. A second call does nothing."""
        if not self.is_finished:
            self._error, self._cause = error, cause
            self.sent = None
            if error is not None:
                self.results = {}
            self._finished.set()

    def wait(self, timeout_seconds: float | None) -> bool:
        """Waits until the call is finished, and says whether it is.

        It waits in slices: a signal that another thread has got is handled when this one, the main one, wakes.
        """
        deadline = math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds
        try:
            while not self.is_finished and (left := deadline - time.monotonic()) > 0:
                self._finished.wait(min(left, _SLICE_SECONDS))
        except BaseException:
            self._interrupted()
            raise
        return self.is_finished

    def take(self) -> list[Any]:
        """Returns the results of a finished call in rank order, the same ones each time. **Raises:** its error."""
        if self._error is not None:
            raise self._error from self._cause
        with self._taking:
            if self._values is None:
                self._values = [self._read(rank) for rank in self.ranks]
                self.results = {}
            return self._values

    def _read(self, rank: int) -> Any:
        try:
            return unpack(self.results[rank])
        except Exception as error:
            raise CallFailed(
                f"rank {rank}: its result cannot be unpickled here: {type(error).__name__}: {error}; return what both "
                "sides can import, such as NumPy arrays",
                rank,
            ) from error


@final
@dataclass(frozen=True, eq=False)
class GangFuture(Generic[Result]):
    """A call that a gang was given by `submit`.

    **Fields:** `ranks`: that it is for, in order.
    """

    ranks: tuple[int, ...]
    _call: Call = field(repr=False)

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._call.is_finished

    def result(self, *, timeout_seconds: float | None = None) -> list[Result]:
        """Waits until all its ranks have answered. Ctrl-C meanwhile ends all ranks of the gang.

        **Arguments:** `timeout_seconds`: how long this waits; the call goes on behind the limit. None waits for as long
        as its ranks live.

        **Returns:** the results, in rank order, the same ones each time.

        **Raises:** as `Gang.run`; `WaitTimeout` naming the ranks that have not answered.
        """
        if not self._call.wait(timeout_seconds):
            state = "goes on" if self._call.number else "waits for its ranks to be free, and stays in line"
            raise WaitTimeout(
                f"{listed(sorted(self._call.owing))} did not answer within {timeout_seconds=}; the call {state}: wait "
                "for longer, or gang.replace() those ranks to end it"
            )
        return cast("list[Result]", self._call.take())
