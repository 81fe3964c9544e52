"""`tuned`: the mix that a few trials find, beside each overlap alone, all on, the defaults, and the best of a grid.

All of them take a checkpoint, so that work lost is bounded: every 20 updates at most. The grid has 256 mixes, each run
once for few steps; the best of them are run again, beside the mix that was found, in turns of random order.
"""

import random
import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.harness import Report, say
from braidax.cli.cases import find_case
from braidax.tune.study import SPACE, Design, Length, Run, Setting, find_best_mix, open_bench

_LEAST = Setting(checkpoint_every=20)
_ALONE = {
    "nothing else": _LEAST,
    "prefetch alone": replace(_LEAST, prefetch=2),
    "sync alone": replace(_LEAST, sync="overlapped"),
    "pipeline alone": replace(_LEAST, microbatches=4),
    "all on": Setting(prefetch=2, checkpoint_every=20, sync="overlapped", microbatches=4),
    "defaults": Setting(prefetch=2, checkpoint_every=20),
}
_OURS = "tuned"
_NUM_BEST = 5
_MAX_TRIALS = 12
Measure = Callable[[Setting, Length], Run]


def measure_tuned(report: Report, *, quick: bool) -> None:
    """Makes the claims `tuned` and `tuned_grid` of digits."""
    space = {name: values[:2] for name, values in SPACE.items()} if quick else SPACE
    start = _ALONE["defaults"] if not quick else Setting(checkpoint_every=5)
    case = find_case("digits", None, quick=True)
    with (
        tempfile.TemporaryDirectory(prefix="braidax-balance-") as folder,
        open_bench(case, Path(folder)) as measure,
    ):
        found = find_best_mix(measure, space, start=start, num_steps=8 if quick else 40, max_trials=_MAX_TRIALS)
        report.note(f"tuned, {case.name}: {len(found.trials)} trials, best {Setting(**found.best).name}")
        for trial in found.trials:
            say(str(trial))
        best = _best_of_grid(measure, space, num_steps=2 if quick else 20)
        mixes = {_OURS: Setting(**found.best), **({} if quick else _ALONE), **best}
        _compare(report, case.name, measure, mixes, rounds=1 if quick else 8)
    peers = [name for name in mixes if name in _ALONE]
    where = f"tuned, {case.name}"
    if peers:
        report.against("tuned", where, "time", ours=_OURS, peers=peers)
    grid = [row.values for row in report.rows if row.case == where and row.system in best]
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
    order = random.Random(1)
    for _ in range(rounds):
        for name in order.sample(list(mixes), len(mixes)):
            mix = mixes[name]
            taken[name].append(measure(mix, Design(num_steps=40).length(mix)).step_seconds)
    for name, seconds in taken.items():
        report.add(f"tuned, {case}", name, "time", "ms", [1e3 * one for one in seconds])
