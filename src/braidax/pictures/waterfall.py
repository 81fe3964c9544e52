"""What held up each step of a loop, as one page of HTML: steps below one another, and in each what ran when."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .drawing import Box, Drawing, Shape, Stroke, Words
from .page import legend, page, section

Spanned = tuple[str, str, str, float, float, int, str]
"""Lane, name, thread, start and seconds, bytes, and the process."""

_WIDTH, _LEFT, _RIGHT = 880.0, 76.0, 150.0
_ROW, _STRIP = 30.0, 8.0
_ROLES = {
    ("devices", "gradients"): (0, "compute"),
    ("devices", "apply"): (0, "less"),
    ("loop", "operations"): (0, "compute"),
    ("loop", "data wait"): (1, "data_wait"),
    ("loop", "dispatch"): (1, "dispatch"),
    ("loop", "snapshot stall"): (1, "snapshot_stall"),
}
_BEHIND = {"comm": "exposed_communication", "checkpoint": "persist_interference"}
_LEGEND = (
    ("compute", "gradients"),
    ("less", "apply"),
    ("data_wait", "data wait"),
    ("dispatch", "dispatch"),
    ("snapshot_stall", "snapshot stall"),
    ("other", "reads, copies"),
    ("persist_interference", "checkpoint"),
    ("exposed_communication", "messages"),
)
_NOT_BEHIND = {"step", "loop", "devices", "wait"}


class _Step(NamedTuple):
    """A step. **Fields:** `number`; `start`: the one before was over; `end`; whether a session begins with it."""

    number: str
    start: float
    end: float
    is_first: bool


class _Piece(NamedTuple):
    """What one lane did without a break. **Fields:** `strip`: of a row; `role`: of the palette."""

    start: float
    end: float
    strip: int
    role: str
    name: str


def waterfall_page(spans: Iterable[Spanned], *, num_steps: int) -> str:
    """Returns the page of the latest steps of each process. Who points at a box is told its seconds.

    **Arguments:** `spans`: some of them steps. `num_steps`: how many are drawn.
    """
    of: defaultdict[str, list[Spanned]] = defaultdict(list)
    for span in spans:
        of[span[6]].append(span)
    parts: list[str] = []
    for process, own in sorted(of.items()):
        steps = _steps(own)
        if steps:
            shown = steps[-num_steps:]
            pieces = _pieces(own, shown[0].start, shown[-1].end)
            title = f"Steps of {process}" if process else "Steps"
            parts.append(section(title, _told(shown, len(steps), pieces), _drawn(shown, pieces)))
    return page("What held up each step", parts)


def _steps(spans: Sequence[Spanned]) -> list[_Step]:
    """Returns the steps of a process in order; an evaluation between two belongs to none."""
    begins = sorted(one[3] for one in spans if one[:2] == ("loop", "begin"))
    over = sorted(
        start + seconds for lane, name, _, start, seconds, *_ in spans if (lane, name) == ("loop", "evaluation")
    )
    done = sorted(
        (start + seconds, start, name.removeprefix("step "))
        for lane, name, _, start, seconds, *_ in spans
        if lane == "step" and name.removeprefix("step ").isdecimal()
    )
    found: list[_Step] = []
    for end, start, number in done:
        at = bisect_right(begins, end) - 1
        begin = begins[at] if at >= 0 else None
        before = found[-1].end if found else None
        is_first = before is None or (begin is not None and begin >= before)
        first = begin if is_first and begin is not None else start if before is None else before
        evaluated = bisect_right(over, start)
        first = max(first, over[evaluated - 1]) if evaluated else first
        found.append(_Step(number, min(first, end), end, is_first))
    return found


def _pieces(spans: Sequence[Spanned], begin: float, end: float) -> list[_Piece]:
    """Returns what is drawn of spans between two instants: of threads of one lane at once, all as one."""
    lanes: defaultdict[tuple[int, str, str], list[tuple[float, float]]] = defaultdict(list)
    for lane, name, _, start, seconds, *_ in spans:
        if start > end or start + seconds < begin or not seconds:
            continue
        if (lane, name) in _ROLES:
            lanes[(*_ROLES[lane, name], name)].append((start, start + seconds))
        elif lane not in _NOT_BEHIND:
            lanes[2, _BEHIND.get(lane, "other"), lane].append((start, start + seconds))
    least = (end - begin) / 1e5  # what no eye tells apart
    return [
        _Piece(first, last, strip, role, name)
        for (strip, role, name), each in lanes.items()
        for first, last in _union(each, least)
    ]


def _union(intervals: Iterable[tuple[float, float]], least: float = 0.0) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1] + least:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def _stalled(step: _Step, pieces: Sequence[_Piece]) -> float:
    """Returns the seconds of a step in which devices had nothing to do and the loop waited for data."""
    busy = _union((one.start, one.end) for one in pieces if one.strip == 0)
    seconds = 0.0
    for one in pieces:
        if one.role == "data_wait":
            start, end = max(one.start, step.start), min(one.end, step.end)
            covered = sum(max(0.0, min(end, last) - max(start, first)) for first, last in busy)
            seconds += max(0.0, end - start - covered)
    return seconds


def _told(steps: Sequence[_Step], num_all: int, pieces: Sequence[_Piece]) -> str:
    counted = [step for step in steps if not step.is_first] or steps
    seconds = sum(step.end - step.start for step in counted)
    stalled = sum(_stalled(step, pieces) for step in counted)
    return (
        f"The latest {len(steps)} of {num_all:,} steps, on one scale: {_milliseconds(seconds / len(counted))} each on "
        f"average; devices waited for data for {100 * stalled / seconds if seconds else 0:.1f} % of the time. In each "
        f"row from above: devices, the loop's thread, and what goes on behind it."
    )


def _drawn(steps: Sequence[_Step], pieces: Sequence[_Piece]) -> Drawing:
    longest = max((step.end - step.start for step in steps if not step.is_first), default=0.0)
    longest = longest or max(step.end - step.start for step in steps) or 1.0
    scale, top = (_WIDTH - _LEFT - _RIGHT) / longest, 26.0
    shapes = legend(_LEGEND, _WIDTH)
    for row, step in enumerate(steps):
        shapes += _row(step, pieces, top + row * _ROW, scale)
    bottom = top + len(steps) * _ROW
    for tick in range(5):
        at = longest * tick / 4
        x = _LEFT + at * scale
        shapes += [Stroke(x, bottom, x, bottom + 4), Words(x, bottom + 16, _milliseconds(at), 10, "middle", "faint")]
    return Drawing("What held up each step", _WIDTH, bottom + 22, tuple(shapes))


def _row(step: _Step, pieces: Sequence[_Piece], y: float, scale: float) -> list[Shape]:
    edge = _WIDTH - _RIGHT
    shapes: list[Shape] = [Words(_LEFT - 8, y + 15, f"step {step.number}", 11, "end", "faint")]
    for one in pieces:
        start, end = max(one.start, step.start), min(one.end, step.end)
        x = _LEFT + (start - step.start) * scale
        if end > start and x < edge:
            tip = f"{one.name}: {_milliseconds(end - start)}, {_milliseconds(start - step.start)} into the step"
            wide = max(0.5, min((end - start) * scale, edge - x))
            shapes.append(
                Box(x, y + one.strip * _STRIP, wide, _STRIP - 1, one.role, tip, 1.0 if one.strip < 2 else 0.6)
            )
    seconds, stalled = step.end - step.start, _stalled(step, pieces)
    words = _milliseconds(seconds) + (", compiles" if step.is_first else "")
    words += f", waits {_milliseconds(stalled)}" if stalled > 0.001 * seconds and not step.is_first else ""
    shapes.append(Words(min(_LEFT + seconds * scale, edge) + 6, y + 15, words, 10))
    return [*shapes, Stroke(_LEFT, y + 3 * _STRIP + 1, edge, y + 3 * _STRIP + 1, "line", 0.5)]


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
