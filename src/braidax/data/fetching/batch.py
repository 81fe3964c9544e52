"""Batches under way: what has been read of them, and what they wait for when several processes load them together."""

import math
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from braidax.data.sharding.load_plan import Reading
from braidax.errors import WaitTimeout

Rows = list[NDArray[Any] | None]
"""Of each leaf, where it is read to."""


@dataclass
class Confirmation:
    """Whether all processes have read their part of a batch.

    **Fields:** `future`: done when they have. `deadline`: until when somebody waits for it, `time.monotonic` seconds;
    as long as nobody does, there is no limit: loops pause, and one process may be further ahead than another.
    """

    future: "Future[None]" = field(default_factory=Future[None])
    deadline: float = math.inf

    def wait(self, *, timeout_seconds: float, what: str) -> None:
        """Waits until all have read their part. **Raises:** what another process raised; `WaitTimeout`."""
        try:
            self.future.result(timeout=timeout_seconds)
        except TimeoutError as error:
            if self.future.done():
                raise
            raise WaitTimeout(
                f"this process has read its part of {what}, but did not hear within {timeout_seconds:g} s that the "
                "others have: one may hang or be cut off; look at their logs, or raise Knobs(timeout_seconds=...)"
            ) from error


@dataclass(eq=False)
class Read:
    """What one read brings: when it began, attempts that ended, the rows of a hedge that was first."""

    reading: Reading
    began: float = math.inf
    is_hedged: bool = False
    is_done: bool = False
    num_ended: int = 0
    apart: Rows | None = None

    @property
    def is_late(self) -> bool:
        """Whether the hedge was first, and the read itself is still under way."""
        return self.is_done and self.num_ended == 1 and math.isfinite(self.began)


@dataclass(eq=False, slots=True)
class Part:
    """One of several batches that are read at once.

    **Fields:** `future`: of the load arrays of each, or where that fails, of batches that are read by themselves.
    `place`: which one. `confirmed`: whether other processes have theirs.
    """

    future: Future[list[Any]]
    place: int
    confirmed: Confirmation | None = None

    @property
    def local(self) -> Future[Any]:
        """The future of what is read of this batch; another one where it is read by itself after all."""
        if self.future.done() and isinstance(found := self.future.result()[self.place], Batch):
            return found.local
        return self.future


@dataclass(eq=False)
class Batch:
    """A batch under way: the future of its load arrays, whether other processes have theirs, the reads left."""

    future: Future[Any] = field(default_factory=Future[Any])
    confirmed: Confirmation | None = None
    source: Any = None
    indices: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    memory: NDArray[np.uint8] | None = None
    reads: list[Read] = field(default_factory=list[Read], init=False)
    num_left: int = field(default=0, init=False)
    error: BaseException | None = field(default=None, init=False)  # that of the first rows, whichever read ends first
    _error_start: float = field(default=math.inf, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def local(self) -> Future[Any]:
        """The future of what is read."""
        return self.future

    def is_last(self, read: Read, error: BaseException | None, apart: Any) -> bool:
        """Counts an attempt that ended: in place, or `apart`; returns whether the batch is complete by it.

        The first attempt that succeeds counts, or the last one that fails.
        """
        with self._lock:
            read.num_ended += 1
            if read.is_done or (error is not None and read.is_hedged and read.num_ended == 1):
                return False
            read.is_done = True
            read.apart = apart
            if error is not None and read.reading.start < self._error_start:
                self.error, self._error_start = error, read.reading.start
            self.num_left -= 1
            return self.num_left == 0
