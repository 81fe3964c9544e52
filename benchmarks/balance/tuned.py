"""`tuned`: the mix that a few trials find, beside each overlap alone, all on, and the defaults, in cases of a study;
`tuned_grid`: that of digits beside the best of a grid.

All of them take a checkpoint, so that work lost is bounded: every 20 updates at most. The grid has 256 mixes, each run
once for few steps; the best of them are run again, beside the mix that was found, in turns of random order.
"""

import random
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.harness import Report, say
from braidax.cli.cases import CASES, find_case
from braidax.errors import BraidaxError
from braidax.tune.study import SPACE, Design, Length, Run, Setting, find_best_mix, open_bench

_LEAST = Setting(checkpoint_every=20)
_ALONE = {
    "nothing else": _LEAST,
    "prefetch alone, the defaults": replace(_LEAST, prefetch=2),
    "sync alone": replace(_LEAST, sync="overlapped"),
    "pipeline alone": replace(_LEAST, microbatches=4),
    "all on": Setting(prefetch=2, checkpoint_every=20, sync="overlapped", microbatches=4),
}
_OURS, _GRID = "tuned", "digits"
_NUM_BEST = 5
_MAX_TRIALS = 12
Measure = Callable[[Setting, Length], Run]


def measure_tuned(report: Report, *, quick: bool) -> None:
    """Makes the claims `tuned`, of all cases of the study, and `tuned_grid`, of digits."""
    compared: list[tuple[str, str, list[str]]] = []
    for name in CASES[:1] if quick else CASES:
        case = find_case(name, None, quick=True)
        with (
            tempfile.TemporaryDirectory(prefix="braidax-balance-") as folder,
            open_bench(case, Path(folder)) as measure,
        ):
            mix = _found(report, case.name, measure, quick=quick)
            best = _best_of_grid(measure, _space(quick=quick), num_steps=2 if quick else 20) if name == _GRID else {}
            others = {} if quick else {told: peer for told, peer in _ALONE.items() if peer != mix}
            _compare(report, case.name, measure, {_OURS: mix, **others, **best}, rounds=1 if quick else 8)
        where = f"tuned, {case.name}"
        if others:
            compared.append((where, _OURS, list(others)))
        if best:
            _claim_grid(report, where, list(best))
    if compared:
        report.against_everywhere("tuned", compared, "time", at=[""], at_least=1)


def _space(*, quick: bool) -> Mapping[str, Any]:
    return {name: values[:2] for name, values in SPACE.items()} if quick else SPACE


def _found(report: Report, case: str, measure: Measure, *, quick: bool) -> Setting:
    """Returns the mix that trials find."""
    start = Setting(checkpoint_every=5) if quick else _ALONE["prefetch alone, the defaults"]
    steps = 8 if quick else 40
    found = find_best_mix(measure, _space(quick=quick), start=start, num_steps=steps, max_trials=_MAX_TRIALS)
    for trial in found.trials:
        say(str(trial))
    mix = Setting(**found.best)
    same = "".join(f", which is {name}" for name, peer in _ALONE.items() if peer == mix)
    report.note(f"tuned, {case}: {len(found.trials)} trials, best {mix.name}{same}")
    return mix


def _claim_grid(report: Report, where: str, names: Sequence[str]) -> None:
    grid = [row.values for row in report.rows if row.case == where and row.system in names]
    ours = next(row.values for row in report.rows if row.case == where and row.system == _OURS)
    fastest = min(grid, key=statistics.median)
    report.at_most("tuned_grid", [one / other for one, other in zip(ours, fastest, strict=True)], 1.03)


def _best_of_grid(measure: Measure, space: Mapping[str, Any], *, num_steps: int) -> dict[str, Setting]:
    """Runs every mix once, and returns the fastest few by name."""
    mixes = [Setting(**dict(zip(space, values, strict=True))) for values in product(*space.values())]
    random.Random(0).shuffle(mixes)
    taken: dict[Setting, float] = {}
    for number, mix in enumerate(mixes):
        taken[mix] = measure(mix, Design(num_steps=num_steps).length(mix)).step_seconds
        if number % 64 == 0:
            say(f"{number} of {len(mixes)} mixes")
    fastest = sorted(taken, key=lambda mix: taken[mix])[:_NUM_BEST]
    return {f"grid {rank}: {mix.name}": mix for rank, mix in enumerate(fastest, 1)}


def _compare(report: Report, case: str, measure: Measure, mixes: Mapping[str, Setting], *, rounds: int) -> None:
    taken: dict[str, list[float]] = {name: [] for name in mixes}
    cannot: dict[str, str] = {}
    order = random.Random(1)
    for _ in range(rounds):
        for name in order.sample(list(mixes), len(mixes)):
            if name in cannot:
                continue
            mix = mixes[name]
            try:
                taken[name].append(measure(mix, Design(num_steps=40).length(mix)).step_seconds)
            except BraidaxError as error:
                cannot[name] = str(error)
    for name, seconds in taken.items():
        if name in cannot:
            report.missing(f"tuned, {case}", name, cannot[name])
        else:
            report.add(f"tuned, {case}", name, "time", "ms", [1e3 * one for one in seconds])
