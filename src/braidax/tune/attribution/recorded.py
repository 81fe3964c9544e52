"""What the trace of one process says of its loop and its devices, as sets of instants."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from braidax.spans import Span

from .intervals import Interval, Intervals, union

LOOP, DEVICES = "loop", "devices"
_STEP = "step "
_PIPELINE, _STAGE = "stages", "stage "


class Ended(NamedTuple):
    """A step of a process. **Fields:** `number`; `end`: when its last program was done on the devices."""

    number: int
    end: float


class Pipelined(NamedTuple):
    """A measured update of stages. **Fields:** `start`, `end`; `operations`: of each device, what it computed."""

    start: float
    end: float
    operations: tuple[Intervals, ...]


@dataclass(frozen=True)
class Recorded:
    """The spans of one process, by what they mean.

    **Fields:** `steps`: in order. `loop`: what the loop's thread did, by name. `busy`: when devices computed, or had
    programs to compute. `applying`: of that, the optimizer's. `saving`: a checkpoint was copied or written. `begins`:
    when sessions began. `evaluations`. `pipelined`: measured updates of stages.
    """

    steps: tuple[Ended, ...]
    loop: dict[str, Intervals]
    busy: Intervals
    applying: Intervals
    saving: Intervals
    begins: tuple[float, ...]
    evaluations: Intervals
    pipelined: tuple[Pipelined, ...]


def recorded(spans: Iterable[Span]) -> dict[str, Recorded]:
    """Returns what each process that has steps has recorded, by its name."""
    of: defaultdict[str, list[Span]] = defaultdict(list)
    for span in spans:
        of[span.process].append(span)
    found = {process: _recorded(each) for process, each in of.items()}
    return {process: each for process, each in found.items() if each.steps}


def _recorded(spans: list[Span]) -> Recorded:
    loop: defaultdict[str, list[Interval]] = defaultdict(list)
    threads = {span.thread for span in spans if span.lane == LOOP}
    steps: list[Ended] = []
    busy, applying, saving, begins = list[Interval](), list[Interval](), list[Interval](), list[float]()
    for span in spans:
        interval = span.start, span.end
        if span.lane == "step" and span.name.removeprefix(_STEP).isdecimal():
            steps.append(Ended(int(span.name.removeprefix(_STEP)), span.end))
        elif span.lane == LOOP and span.name == "begin":
            begins.append(span.start)
        elif span.lane == LOOP and span.name == "operations":
            busy.append(interval)
        elif span.lane == LOOP:
            loop[span.name].append(interval)
        elif span.lane == DEVICES:
            busy.append(interval)
            if span.name == "apply":
                applying.append(interval)
        elif span.lane == "checkpoint":
            saving.append(interval)
        elif span.lane == "comm" and span.thread in threads:
            loop["exposed communication"].append(interval)
    return Recorded(
        tuple(sorted(steps, key=lambda one: one.end)),
        {name: union(intervals) for name, intervals in loop.items()},
        union(busy),
        union(applying),
        union(saving),
        tuple(sorted(begins)),
        union(loop.pop("evaluation", [])),
        _pipelined(spans),
    )


def _pipelined(spans: list[Span]) -> tuple[Pipelined, ...]:
    updates = sorted(union((one.start, one.end) for one in spans if one.lane == _PIPELINE))
    found: list[Pipelined] = []
    for start, end in updates:
        devices: defaultdict[str, list[Interval]] = defaultdict(list)
        for span in spans:
            if span.lane.startswith(_STAGE) and start <= span.start <= end:
                devices[span.thread].append((span.start, span.end))
        if devices:
            found.append(Pipelined(start, end, tuple(union(each) for each in devices.values())))
    return tuple(found)
