"""Spans: seconds and bytes on a lane, and the trace that collects them.

The engines record what they do as spans on the lanes `read`, `decode`, `host-to-device`, `wait`, `step`, `checkpoint`
and `comm`; a report, what the loop and its devices do, on `loop` and `devices`. A span goes to the trace that is active
on the current thread; without one it costs a context-variable look-up and nothing else.
"""

import contextlib
import gzip
import itertools
import json
import threading
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, final

from braidax.errors import ArgumentError

OPERATIONS = ("loop", "operations")
"""Lane and name of a span in which the loop's thread is in `update`, and devices compute already: operations of stages
are dispatched, or a program is computed while it is called."""

_MAX_SPANS = 20_000  # about 5 MB
_MAX_NOTES = 256  # which are counted at once: a lock and a total take as long as all else of a note
_LANE_OF, _SECONDS_OF, _BYTES_OF = itemgetter(0), itemgetter(4), itemgetter(5)
_Plain = tuple[str, str, str, float, float, int, str]  # a span; making a `Span` takes longer than noting one


class Span(NamedTuple):
    """One piece of work: `lane`, `name`, thread, `start` and `seconds` (`time.perf_counter` seconds), `num_bytes`.

    `process` is empty for this process; for others it says which one, such as `"rank 1 · host-b"`.
    """

    lane: str
    name: str
    thread: str
    start: float
    seconds: float
    num_bytes: int
    process: str = ""

    @property
    def end(self) -> float:
        """When it was over."""
        return self.start + self.seconds


@dataclass(frozen=True)
class LaneTotal:
    """What a lane has added up to: number of spans, seconds (summed over threads) and bytes.

    A span inside another counts for its own lane only, so the lanes of one thread never count a second twice.
    """

    num_spans: int = 0
    seconds: float = 0.0
    num_bytes: int = 0


Told = tuple[Sequence[Span], Mapping[str, LaneTotal]]
"""Spans, and what they add up to by lane."""


class _Total:
    """A `LaneTotal` that grows."""

    __slots__ = ("num_bytes", "num_spans", "seconds")

    def __init__(self) -> None:
        self.num_spans, self.seconds, self.num_bytes = 0, 0.0, 0


class Trace:
    """Collects spans from any number of threads.

    **Arguments:** `max_spans`: how many of the latest spans are kept for export, 0 for none; totals per lane are always
    kept.
    """

    def __init__(self, *, max_spans: int = _MAX_SPANS) -> None:
        if max_spans < 0:
            raise ArgumentError(f"max_spans={max_spans!r}: expected how many spans to keep, 0 or more")
        self._spans: deque[_Plain] = deque(maxlen=max_spans)
        self._notes: deque[_Plain] = deque()  # that are not yet among the spans and in the totals
        self._totals: defaultdict[str, _Total] = defaultdict(_Total)
        self._lock = threading.Lock()
        self._of_thread = threading.local()  # its name, which takes long to ask for

    def record(self, span: Span, *, inner_seconds: float = 0.0) -> None:
        """Adds a finished span, of which `inner_seconds` were spent in spans inside it."""
        self._add(span, span.seconds - inner_seconds)

    def note(self, lane: str, name: str, start: float, num_bytes: int) -> None:
        """Adds what began at `start` (`time.perf_counter`) and ends now on this thread; as `timed`, and quicker."""
        seconds = time.perf_counter() - start
        try:
            thread = self._of_thread.name
        except AttributeError:
            thread = self._of_thread.name = threading.current_thread().name
        notes = self._notes
        notes.append((lane, name, thread, start, seconds, num_bytes, ""))
        if len(notes) >= _MAX_NOTES:
            with self._lock:
                self._take_notes()

    def spanned(
        self, lane: str, name: str, start: float, seconds: float, num_bytes: int, *, inner_seconds: float = 0.0
    ) -> None:
        """Adds what took so long on this thread; as `record`, and quicker."""
        try:
            thread = self._of_thread.name
        except AttributeError:
            thread = self._of_thread.name = threading.current_thread().name
        noted = (lane, name, thread, start, seconds, num_bytes, "")
        if inner_seconds:
            self._add(noted, seconds - inner_seconds)
            return
        self._notes.append(noted)
        if len(self._notes) >= _MAX_NOTES:
            with self._lock:
                self._take_notes()

    def take(self, spans: Sequence[Span], totals: Mapping[str, LaneTotal]) -> None:
        """Takes over what another process has recorded, by a clock that is this one's.

        **Arguments:** `spans`: with their `process`. `totals`: of each lane.
        """
        with self._lock:
            self._take_notes()
            self._spans.extend(spans)
            for lane, more in totals.items():
                total = self._totals[lane]
                total.num_spans += more.num_spans
                total.seconds += more.seconds
                total.num_bytes += more.num_bytes

    def totals(self) -> dict[str, LaneTotal]:
        """Returns the total of every lane that has recorded anything."""
        with self._lock:
            self._take_notes()
            return {
                lane: LaneTotal(each.num_spans, each.seconds, each.num_bytes) for lane, each in self._totals.items()
            }

    def _add(self, span: _Plain, seconds: float) -> None:
        with self._lock:
            self._take_notes()
            self._spans.append(span)
            total = self._totals[span[0]]
            total.num_spans += 1
            total.seconds += seconds
            total.num_bytes += span[5]

    def _take_notes(self) -> None:
        """Lets the notes be spans, and counts them; in the fewest steps, since each note pays for its part."""
        notes = self._notes
        taken = [notes.popleft() for _ in range(len(notes))]
        self._spans.extend(taken)
        totals = self._totals
        for lane, of_lane in itertools.groupby(taken, _LANE_OF):  # most notes come of one lane in a row
            several = list(of_lane)
            total = totals[lane]
            total.num_spans += len(several)
            total.seconds += sum(map(_SECONDS_OF, several))
            total.num_bytes += sum(map(_BYTES_OF, several))

    @property
    def spans(self) -> list[Span]:
        """The latest spans, oldest first."""
        with self._lock:
            self._take_notes()
            return [Span(*each) for each in self._spans]

    def active(self) -> contextlib.AbstractContextManager["Trace"]:
        """Makes this the trace that `span` records to, on this thread, inside the `with` block."""
        return _Active(self)

    def timed(self, lane: str, name: str, *, num_bytes: int = 0) -> contextlib.AbstractContextManager[None]:
        """Records the time that the `with` block takes here, whichever trace is active.

        **Arguments:** as for `span`; the time of spans inside it is not taken off.
        """
        return _Timed(self, lane, name, num_bytes)

    def save(self, path: str | Path) -> None:
        """Writes the kept spans as Chrome trace events, which ui.perfetto.dev opens.

        Each process has a group of tracks, and in it one per lane and thread.

        **Arguments:** `path`: of the file; one whose name ends in `.gz` is compressed, which Perfetto reads, too.

        **Raises:** `ArgumentError` when there are none, and nothing is written, or when the file cannot be.
        """
        spans = self.spans
        if not spans:
            why = (
                "max_spans=0 keeps none; make it with Trace()"
                if self._spans.maxlen == 0
                else "nothing has recorded to it yet; save it after the loop, from the loader, checkpointer or report "
                "that it was given to"
            )
            raise ArgumentError(f"path={str(path)!r}: this trace has no spans to write: {why}")
        data = json.dumps({"traceEvents": _events(spans), "displayTimeUnit": "ms"}).encode()
        if Path(path).suffix == ".gz":
            data = gzip.compress(data, mtime=0)
        try:
            Path(path).write_bytes(data)
        except OSError as error:
            raise ArgumentError(
                f"path={str(path)!r}: the trace cannot be written ({error.strerror}); expected a file in a folder that "
                "is there: give another path, or change its permissions"
            ) from error

    def to_html(self, *, num_steps: int = 24) -> str:
        """Returns a page of HTML that needs nothing else: a row for each of the latest steps, and what held it up.

        **Arguments:** `num_steps`: how many, of each process.

        **Raises:** `ArgumentError` where there is no step: a report records them, as `Report(trace=…)` of `fit` does.
        """
        from braidax.pictures.waterfall import waterfall_page

        if num_steps < 1:
            raise ArgumentError(f"num_steps={num_steps!r}: expected how many of the latest steps to draw, 1 or more")
        spans = self.spans
        if not any(span.lane == "step" for span in spans):
            raise ArgumentError(
                "this trace has no step to draw: expected the trace of a Report that has followed a loop, "
                "Report(trace=…) of fit"
            )
        return waterfall_page(spans, num_steps=num_steps)


def _events(spans: Sequence[Span]) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    processes: dict[str, int] = {name: at for at, name in enumerate(sorted({span.process for span in spans}), 1)}
    tracks: dict[tuple[str, str, str], int] = {}
    origin = min(span.start for span in spans)
    for span in sorted(spans, key=lambda one: (one.process, _lane_rank(one.lane), one.lane, one.thread, one.start)):
        track = tracks.setdefault((span.process, span.lane, span.thread), len(tracks) + 1)
        events.append(
            {
                "ph": "X",
                "pid": processes[span.process],
                "tid": track,
                "cat": span.lane,
                "name": span.name,
                "ts": (span.start - origin) * 1e6,
                "dur": span.seconds * 1e6,
                "args": {"bytes": span.num_bytes},
            }
        )
    names: list[dict[str, Any]] = []
    for process, number in processes.items():
        names.append({"ph": "M", "pid": number, "name": "process_name", "args": {"name": process or "braidax"}})
    for (process, lane, thread), track in tracks.items():
        about: dict[str, dict[str, Any]] = {
            "thread_name": {"name": f"{lane} · {thread}"},
            "thread_sort_index": {"sort_index": track},
        }
        pid = processes[process]
        names += [{"ph": "M", "pid": pid, "tid": track, "name": name, "args": args} for name, args in about.items()]
    return names + events


@final
class _Timed(contextlib.AbstractContextManager[None]):
    """A `with` block whose time is recorded; a generator would take as long as a small message."""

    def __init__(self, trace: Trace, lane: str, name: str, num_bytes: int) -> None:
        self._trace, self._lane, self._name, self._num_bytes = trace, lane, name, num_bytes
        self._start = 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._trace.note(self._lane, self._name, self._start, self._num_bytes)


@final
class _Active(contextlib.AbstractContextManager[Trace]):
    """A `with` block in which a trace is the active one."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    def __enter__(self) -> Trace:
        self._tokens = _active.set(self._trace), _inner_seconds.set(None)
        return self._trace

    def __exit__(self, *_: object) -> None:
        active, inner = self._tokens
        _inner_seconds.reset(inner)
        _active.reset(active)


@final
class _Spanned(contextlib.AbstractContextManager[None]):
    """A `with` block whose time goes to the active trace, without that of the ones inside it."""

    def __init__(self, lane: str, name: str, num_bytes: int) -> None:
        self._lane, self._name, self._num_bytes = lane, name, num_bytes
        self._trace: Trace | None = None

    def __enter__(self) -> None:
        self._trace = _active.get()
        if self._trace is not None:
            self._inner: list[float] = []
            self._token = _inner_seconds.set(self._inner)
            self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        if self._trace is None:
            return
        seconds = time.perf_counter() - self._start
        _inner_seconds.reset(self._token)
        outer = _inner_seconds.get()
        if outer is not None:
            outer.append(seconds)
        inner = sum(self._inner)
        self._trace.spanned(self._lane, self._name, self._start, seconds, self._num_bytes, inner_seconds=inner)


def span(lane: str, name: str = "", *, num_bytes: int = 0) -> contextlib.AbstractContextManager[None]:
    """Records the time that the `with` block takes, on a lane of the active trace, if there is one.

    **Arguments:** `lane`: one of the lanes above, or another. `name`: what is done; the lane's name by default.
    `num_bytes`: bytes that were moved.
    """
    return _Spanned(lane, name or lane, num_bytes)


def note_since(lane: str, name: str, start: float) -> None:
    """Adds what began at `start` (`time.perf_counter`) and ends now to the active trace, if there is one."""
    trace = _active.get()
    if trace is not None:
        trace.note(lane, name, start, 0)


def take_told(process: str, told: Told) -> None:
    """Lets the active trace, if there is one, take what another process of this host, with this clock, has recorded.

    It counts as time inside the span that is open on this thread.

    **Arguments:** `process`: how to call the other one. `told`: its spans, and their totals by lane.
    """
    trace, outer = _active.get(), _inner_seconds.get()
    if trace is None:
        return
    spans, totals = told
    trace.take([each._replace(process=process) for each in spans], totals)
    if outer is not None:
        outer.append(sum(total.seconds for total in totals.values()))


def _lane_rank(lane: str) -> int:
    return _LANES.index(lane) if lane in _LANES else len(_LANES)


_LANES = ("step", "loop", "devices", "wait", "host-to-device", "read", "decode", "checkpoint", "comm")
_active: ContextVar[Trace | None] = ContextVar("braidax_active_trace", default=None)
_inner_seconds: ContextVar[list[float] | None] = ContextVar("braidax_inner_seconds", default=None)
