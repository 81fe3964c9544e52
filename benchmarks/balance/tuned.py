"""`tuned`: the mix that a few trials find, beside each overlap alone, all on, and the defaults, in cases of a study;
`tuned_grid`: that of digits beside the best of a grid.

All of them take a checkpoint, so that work lost is bounded: every 20 updates at most. The grid has 256 mixes, each run
once for few steps; the best of them are run again, beside the mix that was found, in turns of random order.

Mixes whose steps are equally fast differ by chance. So rounds go on until it is known of each other mix, with 95 %
confidence, how much time it takes to within 2 % of ours, or that it takes 10 % more: `tuned_bound` is the upper end of
that interval, and `tuned_width` its half, each in the case and of the mix where it is worst.
"""

import math
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
from braidax.tune.study.statistics import Estimate, estimate

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
_LEAST_ROUNDS, _MOST_ROUNDS = 8, 128
_GRID_ROUNDS = 16  # of the best of the grid
_WIDTH = 0.02  # of an interval on either side, from which on it is narrow enough
_SLOWER = 0.1  # that a mix takes more at least, where no more rounds are needed
Measure = Callable[[Setting, Length], Run]


def measure_tuned(report: Report, *, quick: bool) -> None:
    """Makes the claims `tuned`, `tuned_bound`, `tuned_width`, of all cases of a study, and `tuned_grid`, of digits."""
    compared: list[tuple[str, str, list[str]]] = []
    found: list[Estimate] = []
    for name in CASES[:1] if quick else CASES:
        case = find_case(name, None, quick=True)
        with (
            tempfile.TemporaryDirectory(prefix="braidax-balance-") as folder,
            open_bench(case, Path(folder)) as measure,
        ):
            mix = _found(report, case.name, measure, quick=quick)
            best = _best_of_grid(measure, _space(quick=quick), num_steps=2 if quick else 20) if name == _GRID else {}
            others = {} if quick else {told: peer for told, peer in _ALONE.items() if peer != mix}
            found += _compare(report, case.name, measure, mix, others, best, quick=quick)
        where = f"tuned, {case.name}"
        if others:
            compared.append((where, _OURS, list(others)))
        if best:
            _claim_grid(report, where, list(best))
    if compared:
        report.against_everywhere("tuned", compared, "time", at=[""], at_least=1)
        report.at_least("tuned_bound", math.exp(min(one.high for one in found)), 1)
        report.at_most("tuned_width", max((_half(one) for one in found if not _is_slower(one)), default=0.0), _WIDTH)


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
    report.at_most("tuned_grid", [one / other for one, other in zip(ours, fastest, strict=False)], 1.03)


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


def _compare(
    report: Report,
    case: str,
    measure: Measure,
    mix: Setting,
    others: Mapping[str, Setting],
    best: Mapping[str, Setting],
    *,
    quick: bool,
) -> list[Estimate]:
    """Runs mixes in turns. **Returns:** by how much the logarithm of the others' seconds is above those of ours."""
    mixes = {_OURS: mix, **others, **best}
    taken: dict[str, list[float]] = {name: [] for name in mixes}
    cannot: dict[str, str] = {}
    found: dict[str, Estimate] = {}
    order, going = random.Random(1), list(mixes)
    for number in range(1, 2 if quick else _MOST_ROUNDS + 1):
        for name in order.sample(going, len(going)):
            try:
                taken[name].append(measure(mixes[name], Design(num_steps=40).length(mixes[name])).step_seconds)
            except BraidaxError as error:
                cannot[name] = str(error)
        found = {name: _above(taken[_OURS], taken[name]) for name in others if name not in cannot}
        slower = [name for name in found if number >= _LEAST_ROUNDS and _is_slower(found[name])]
        over = [*cannot, *slower, *(best if number >= _GRID_ROUNDS else ())]
        going = [name for name in going if name not in over]
        least = _GRID_ROUNDS if best else _LEAST_ROUNDS
        if number >= least and all(_half(found[name]) <= _WIDTH for name in going if name in found):
            break
    for name, seconds in taken.items():
        if name in cannot:
            report.missing(f"tuned, {case}", name, cannot[name])
        else:
            report.add(f"tuned, {case}", name, "time", "ms", [1e3 * one for one in seconds])
    for name, one in found.items():
        low, value, high = (math.exp(number) for number in (one.low, one.value, one.high))
        of = f"{low:.3f} to {high:.3f} with {100 * one.coverage:.0f} % of {one.num_blocks} rounds"
        report.note(f"tuned, {case}: {name} takes {value:.3f} of its time, {of}")
    return list(found.values())


def _above(ours: Sequence[float], theirs: Sequence[float]) -> Estimate:
    """Returns by how much the logarithm of others' seconds is above that of ours, of the same rounds."""
    return estimate([math.log(other / mine) for mine, other in zip(ours, theirs, strict=False)])


def _is_slower(found: Estimate) -> bool:
    return found.low > math.log1p(_SLOWER)


def _half(found: Estimate) -> float:
    return (found.high - found.low) / 2
