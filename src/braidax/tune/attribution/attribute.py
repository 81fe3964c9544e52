"""`attribute`: where the wall time of each step went, from what loop, devices and checkpoints have recorded."""

import statistics
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from braidax.errors import ArgumentError
from braidax.spans import Trace

from .estimates import Measured, bubbles_of, interference_of
from .intervals import Interval, both, length, union, within, without
from .recorded import Ended, Recorded, recorded
from .step_time import LANES, Attribution, Lane, StepTime

_IDLE: tuple[Lane, ...] = ("snapshot stall", "data wait", "exposed communication", "dispatch")
"""What devices without a program wait for; the first one counts where several do."""


def attribute(traces: Trace | Iterable[Trace], *, alone: Attribution | None = None) -> Attribution:
    """Returns where the time of each step went.

    A step lasts from the end of the one before to its own, both when the last program of an update is done on the
    devices; evaluations between steps are left out. Each instant of it is in one lane, so that lanes add up to it.

    *Measured.* While devices have no program to run, the loop's thread says why; the first of these counts:
    `snapshot stall` (in the saver: `before_apply`, `update`), `data wait` (in the loader), `exposed communication`
    (spans `comm` of this thread: calls of a communicator, pulls from servers and waits for pushes), `dispatch` (the
    rest of `step.update`), `other` (the rest of the loop). Of several processes whose steps end as one, all of them
    wait while one has no program to run: an instant in which any has none is in its lane.

    *Estimated.* While all have programs to run, the instants are `compute`, less three parts whose seconds are known
    and whose instants are not. `persist interference`: steps beside a checkpoint's copy or writing, against the
    median of those without: the median over steps of (longer by) ÷ (seconds beside), by the latter's weight, times the
    latter; never negative, never more than the seconds beside; 0 with less than 3 undisturbed steps. `bubble`: where
    stages were measured (one update of a hundred), the share of the time from the first to the last operation in which
    devices computed nothing, times the time of the gradients. `exposed communication` inside of compiled programs: with
    `alone`, by how much longer the median `compute` is than there; without, it stays in `compute`.

    **Arguments:** `traces`: of a report, of one process or several, such as `gather_traces` gives; a loop of your own
    tells a `Report` what `fit` tells it. `alone`: of the same step without communication, on one device with its part
    of the batch say.

    **Returns:** the steps that all processes have. **Raises:** `ArgumentError` where a trace has no step.
    """
    given = [traces] if isinstance(traces, Trace) else list(traces)
    processes = list(_processes(given).values())
    windows = _windows(processes)
    measured = [_measured(window, processes) for window in windows]
    interference, bubbles = interference_of(measured), bubbles_of(measured, processes)
    steps = [
        _step(one, disturbed, bubble) for one, disturbed, bubble in zip(measured, interference, bubbles, strict=True)
    ]
    return Attribution(tuple(steps if alone is None else _against(steps, alone)))


def _processes(traces: Sequence[Trace]) -> dict[str, Recorded]:
    found: dict[str, Recorded] = {}
    for at, trace in enumerate(traces):
        here = recorded(trace.spans)
        if not here:
            raise ArgumentError(
                f"traces[{at}] has no step: expected the trace of a Report that has followed a loop: "
                "Report(trace=…) of fit, behind the run"
            )
        found |= {f"{at} {process}": each for process, each in here.items()}
    if not found:
        raise ArgumentError("traces is empty: expected the traces of a run, one of each process")
    return found


@dataclass(frozen=True)
class _Window:
    """The instants of a step. **Fields:** `ends`: of each process. `compiles`: whether a session begins with it."""

    number: int
    start: float
    ends: tuple[float, ...]
    compiles: bool

    @property
    def end(self) -> float:
        return max(self.ends)


def _windows(processes: Sequence[Recorded]) -> list[_Window]:
    """Returns the steps that all processes have, the latest of each number where a session did one again."""
    rows = list(_of_all([process.steps for process in processes]))
    begins = sorted(begin for process in processes for begin in process.begins)
    between = union(one for process in processes for one in process.evaluations)
    found: list[_Window] = []
    before: float | None = None
    for number, ends in rows:
        end = max(ends)
        begun = bisect_right(begins, end) - 1
        begin = begins[begun] if begun >= 0 else None
        compiles = before is None or (begin is not None and begin >= before)
        start = before if before is not None else (begin if begin is not None else end)
        if begin is not None and start < begin:
            start = begin
        start = max([start, *(until for _, until in between if until < end)])
        found.append(_Window(number, min(start, end), ends, compiles))
        before = end
    return found


def _of_all(steps: Sequence[Sequence[Ended]]) -> Iterable[tuple[int, tuple[float, ...]]]:
    """Yields the steps that all processes have ended, in order: the n-th time that one of that number did."""
    seen: list[dict[tuple[int, int], float]] = []
    for each in steps:
        times: dict[int, int] = {}
        ends: dict[tuple[int, int], float] = {}
        for number, end in reversed(each):  # the latest ones are those that all have kept
            times[number] = times.get(number, 0) + 1
            ends[number, times[number]] = end
        seen.append(ends)
    shared = set(seen[0]).intersection(*seen[1:])
    rows = [(key[0], tuple(ends[key] for ends in seen)) for key in shared]
    return sorted(rows, key=lambda row: max(row[1]))


def _measured(window: _Window, processes: Sequence[Recorded]) -> Measured:
    """Returns what can be seen of a step."""
    idle: list[Interval] = []
    causes: dict[Lane, list[Interval]] = {lane: [] for lane in _IDLE}
    for process, end in zip(processes, window.ends, strict=True):
        own = without([(window.start, end)] if end > window.start else [], within(process.busy, window.start, end))
        idle += own
        for lane, found in causes.items():
            found += both(own, process.loop.get(lane, []))
    left = union(idle)
    busy = without([(window.start, window.end)] if window.end > window.start else [], left)
    lanes: dict[Lane, float] = {}
    for lane, found in causes.items():
        taken = both(left, union(found))
        lanes[lane], left = length(taken), without(left, taken)
    lanes["other"] = length(left)
    saving = union(one for process in processes for one in within(process.saving, window.start, window.end))
    applying = union(one for process in processes for one in within(process.applying, window.start, window.end))
    return Measured(
        window.number,
        window.start,
        window.end,
        window.compiles,
        lanes,
        busy_seconds=length(busy),
        applying_seconds=length(both(busy, applying)),
        beside_seconds=length(both(busy, saving)),
    )


def _step(one: Measured, interference: float, bubble: float) -> StepTime:
    left = one.busy_seconds - interference
    bubble_seconds = bubble * max(0.0, left - one.applying_seconds)
    estimated = {"persist interference": interference, "bubble": bubble_seconds, "compute": left - bubble_seconds}
    found = {**one.lanes, **estimated}
    lanes = {lane: found[lane] for lane in LANES}
    return StepTime(one.number, one.end - one.start, lanes, one.compiles)


def _against(steps: Sequence[StepTime], alone: Attribution) -> list[StepTime]:
    """Takes out of compute by how much longer it is than alone."""
    counted = [step.lanes["compute"] for step in steps if not step.compiles]
    base = [step.lanes["compute"] for step in alone.counted]
    if not base:
        raise ArgumentError("alone has no step behind the first one, which compiles: expected some to compare with")
    longer = max(0.0, statistics.median(counted) - statistics.median(base)) if counted else 0.0
    found: list[StepTime] = []
    for step in steps:
        taken = min(longer, step.lanes["compute"])
        moved = {
            "exposed communication": step.lanes["exposed communication"] + taken,
            "compute": step.lanes["compute"] - taken,
        }
        found.append(StepTime(step.step, step.seconds, {**step.lanes, **moved}, step.compiles))
    return found
