"""`interaction`: which pairs of overlaps are in each other's way, predicted from the runs of each alone.

Studies of a few cases at the sizes of `braidax study --quick`, four pairs of overlaps each. The digits are studied
again with samples that come late, as from a store, and, in all six pairs, with these and a disk that the kernel holds
to a rate: a machine whose cores are all that is ever waited for has few pairs that interact. Two dozen intervals are
looked at, of which one of 95 % would miss by accident, so those pairs count whose interaction has the same sign in
each of 8 blocks (99 %). The claim is for which share of these that sign was predicted. Beside it stands who says the
commoner sign of all pairs.
"""

import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Report, say
from braidax.cli.cases import find_case
from braidax.data import Source
from braidax.errors import ArgumentError
from braidax.tune.study import PAIRS, Design, Limits, Run, StudyFolder, Workload, run_study
from braidax.tune.study.findings import Crossed, find

_PAIRS = tuple(name for name, factors in PAIRS.items() if len(factors) == 2)
_BLOCKS, _STEPS = 8, 20
_CLAIM, _TARGET = "interaction", 0.9
_LATE_SECONDS = 0.015
_SLOW_DISK = Limits(disk_bytes_per_second=256 << 10)


class LateSource(Source):
    """Samples that come later, and take no core meanwhile. **Arguments:** `seconds`: of each read."""

    def __init__(self, source: Source, seconds: float) -> None:
        self._source, self._seconds = source, seconds

    @property
    def sample_spec(self) -> Any:
        """As of the source."""
        return self._source.sample_spec

    def __len__(self) -> int:
        return len(self._source)

    def read(self, indices: np.ndarray, out: Any) -> None:
        """Waits, and reads."""
        time.sleep(self._seconds)
        self._source.read(indices, out)

    def describe(self) -> Mapping[str, str]:
        """As of the source."""
        return self._source.describe()


def _late(make: Callable[[], Workload], seconds: float) -> Workload:
    work = make()
    return replace(work, source=LateSource(work.source, seconds))


@dataclass(frozen=True)
class Studied:
    """What is studied. **Fields:** `case`: its name. `late_seconds`: of each read. `limits`: of all processes. `pairs`:
    experiments."""

    case: str
    late_seconds: float = 0.0
    limits: Limits = field(default_factory=Limits)
    pairs: tuple[str, ...] = _PAIRS


STUDIES = {
    "digits": Studied("digits"),
    "digits, late samples": Studied("digits", _LATE_SECONDS),
    "digits, late samples and a slow disk": Studied("digits", _LATE_SECONDS, _SLOW_DISK, ("full",)),
    "cifar-resnet18": Studied("cifar-resnet18"),
    "imdb-bert": Studied("imdb-bert"),
}


def measure_interaction(report: Report, *, quick: bool) -> None:
    """Studies the cases, and claims for which share of what interacts the sign was predicted."""
    blocks, steps = (1, 5) if quick else (_BLOCKS, _STEPS)
    sure: list[Crossed] = []
    for name, studied in [("digits", STUDIES["digits"])] if quick else STUDIES.items():
        say(f"study of {name}")
        design = Design(studied.pairs, num_blocks=blocks, num_steps=steps)
        try:
            runs = _runs(studied, design)
        except ArgumentError as error:
            if studied.limits == Limits():
                raise
            report.missing(f"interaction, {name}", "measured", str(error))
            continue
        for one in find(design, runs).crossed:
            seconds = _add(report, f"interaction, {name}", one, runs)
            if one.held != "undecided" and (min(seconds) > 0 or max(seconds) < 0):
                sure.append(one)
    _claim(report, sure)


def _runs(studied: Studied, design: Design) -> tuple[Run, ...]:
    case = find_case(studied.case, None, quick=True)
    if studied.late_seconds:
        case = replace(case, make=partial(_late, case.make, studied.late_seconds))
    with tempfile.TemporaryDirectory(prefix="braidax-balance-") as path:
        folder = StudyFolder(Path(path) / "study", {"case": {"name": studied.case}})
        run_study(case, design, folder, limits=studied.limits)
        return folder.runs


def _add(report: Report, case: str, one: Crossed, runs: tuple[Run, ...]) -> list[float]:
    """Adds what was measured of a pair, and what was predicted. **Returns:** the former, of each block."""
    seconds = {(run.setting.name, run.block): run.step_seconds for run in runs}
    both, first, second, neither = one.names
    measured = [
        seconds[both, block] - seconds[first, block] - seconds[second, block] + taken
        for (name, block), taken in seconds.items()
        if name == neither
    ]
    at = f"{' x '.join(one.factors)}: {one.held}"
    report.add(case, "measured", "interaction", "ms", [1e3 * each for each in measured], at=at)
    report.add(case, "predicted", "interaction", "ms", [1e3 * one.predicted.seconds], at=at)
    return measured


def _claim(report: Report, sure: list[Crossed]) -> None:
    if not sure:
        report.not_measured(_CLAIM, f">= {_TARGET:g}", "no pair has the same sign in each block")
        return
    more = sum(one.alone.sign == "more" for one in sure)
    where = f"interaction, {len(sure)} pairs with one sign in each block"
    right = {"predicted": sum(one.held == "held" for one in sure), "the commoner sign": max(more, len(sure) - more)}
    for system, count in right.items():
        report.add(where, system, "signs right", "%", [100 * count / len(sure)])
    report.at_least(_CLAIM, right["predicted"] / len(sure), _TARGET)
