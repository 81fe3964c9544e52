"""Checkpoints: ours against Orbax (behind the step, with and without OCDBT) and against saves that block.

A network and its Adam state of 528 MB train on CPU by a step that donates. Measured: by how much longer a checkpoint
makes the run (`stall`: the call, and what the steps beside it are slower; of that, what falls on the next update), how
long until it is durable and until it is restored, peak memory, overhead against frequency and the highest frequency at
3.5 %, whether `Adaptive` keeps its budget beside a process that disturbs, and how many updates are lost when the
process is killed. Everything is fsynced by all.
"""

import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from benchmarks.checkfreq import frequency
from benchmarks.checkfreq.budget import measure_budget
from benchmarks.checkfreq.costs import Cost, measure_costs, measure_durable, measure_restore
from benchmarks.checkfreq.frequency import EPOCH_UPDATES, OVERHEAD, affordable
from benchmarks.checkfreq.processes import kill_moments, measure_lost, measure_memory
from benchmarks.checkfreq.systems import (
    ASYNC_ORBAX,
    ORBAX,
    OURS,
    PLAIN_ORBAX,
    PLAIN_ZARR,
    RAW,
    SYNC,
    SYSTEMS,
    UNGUARDED,
    ZARR,
    System,
)
from benchmarks.checkfreq.training import FULL as FULL_SIZE
from benchmarks.checkfreq.training import QUICK as QUICK_SIZE
from benchmarks.checkfreq.training import Size, Trainer
from benchmarks.harness import Report, arguments, run, say


@dataclass(frozen=True)
class Scale:
    """How much is measured: full, or `--quick`.

    **Fields:** `size`, `name`: of what is trained. `systems`, `curve_systems`, `memory_systems`: which. `rounds`,
    `durable_rounds`: figures of a system. `proof_pairs`: of steps with and without a checkpoint. `distances`: between
    checkpoints, that are measured. `curve_checkpoints`: of one figure. `num_blocks`, `block_steps`: of the run with a
    budget. `num_kills`, `longest_seconds`: until a process is killed at the latest.
    """

    size: Size
    name: str
    systems: Sequence[str]
    curve_systems: Sequence[str]
    memory_systems: Sequence[str]
    rounds: int
    durable_rounds: int
    proof_pairs: int
    distances: Sequence[int]
    curve_checkpoints: int
    num_blocks: int
    block_steps: int
    num_kills: int
    longest_seconds: float


FULL = Scale(
    size=FULL_SIZE,
    name="full",
    systems=(OURS, UNGUARDED, ORBAX, ZARR, PLAIN_ORBAX, PLAIN_ZARR, RAW, SYNC),
    curve_systems=(OURS, ORBAX, PLAIN_ORBAX),
    memory_systems=(OURS, UNGUARDED, ORBAX, PLAIN_ORBAX),
    rounds=4,
    durable_rounds=5,
    proof_pairs=12,
    distances=(1, 2, 4, 8),
    curve_checkpoints=3,
    num_blocks=9,
    block_steps=48,
    num_kills=2,
    longest_seconds=16.0,
)
QUICK = Scale(
    size=QUICK_SIZE,
    name="quick",
    systems=(OURS, ORBAX, PLAIN_ZARR, RAW),
    curve_systems=(OURS, RAW),
    memory_systems=(OURS,),
    rounds=2,
    durable_rounds=2,
    proof_pairs=4,
    distances=(2,),
    curve_checkpoints=2,
    num_blocks=2,
    block_steps=384,
    num_kills=1,
    longest_seconds=2.0,
)
_CASES = ("curve", "memory", "budget", "failures")
_EPOCH = "at the end of an epoch"
_Result = TypeVar("_Result")


def main() -> int:
    parser = arguments("checkfreq", __doc__ or "", _CASES)
    parser.add_argument("--plot", metavar="FILE", help="draw overhead against distance to FILE (.png or .svg)")
    parser.add_argument(
        "--folder", metavar="FOLDER", help="where to save, on the disk to be measured (a temporary one)"
    )
    options = parser.parse_args()
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax's, of what is no trouble
    scale, report = QUICK if options.quick else FULL, Report(options)
    chosen = _CASES if options.only is None else options.only
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        _Run(scale, report, Path(scratch), options.plot).measure(chosen)
    return report.finish()


class _Run:
    """One run of the benchmark.

    **Arguments:** `folder`: where to save. `plot`: the file of the curve.
    """

    def __init__(self, scale: Scale, report: Report, folder: Path, plot: str | None) -> None:
        self._scale, self._report, self._folder, self._plot = scale, report, folder, plot
        self._trainer = _timed("start", lambda: Trainer(scale.size))
        self._case = f"state of {self._trainer.num_bytes / 1e6:.0f} MB"

    def measure(self, chosen: Sequence[str]) -> None:
        """Measures the costs, and the cases that were chosen."""
        systems = {
            name: SYSTEMS[name](self._folder / f"run-{number}") for number, name in enumerate(self._scale.systems)
        }
        try:
            costs, distances = _timed("costs", lambda: self._costs(systems))
            if "curve" in chosen:
                _timed("curve", lambda: self._curve(systems, costs))
        finally:
            for system in systems.values():
                system.close()
        if "memory" in chosen:
            _timed("memory", self._memory)
        if "budget" in chosen:
            step = statistics.median(cost.step for cost in costs[OURS])
            _timed("budget", lambda: self._budget(step))
        if "failures" in chosen:
            _timed("failures", lambda: self._failures(costs, distances))

    def _costs(self, systems: Mapping[str, System]) -> tuple[dict[str, list[Cost]], dict[str, int]]:
        """Claims `stall`, `durable` and `frequency`, against whichever of Orbax's ways is the best in it."""
        report, trainer, scale, case = self._report, self._trainer, self._scale, self._case
        costs = measure_costs(report, trainer, systems, case, rounds=scale.rounds)
        durable = measure_durable(report, trainer, systems, self._folder, case, rounds=scale.durable_rounds)
        measure_restore(report, trainer, systems, case, rounds=scale.durable_rounds)
        stalls = {name: statistics.median(cost.stall for cost in found) for name, found in costs.items()}
        report.at_most("stall", stalls[OURS] / min(stalls[name] for name in ASYNC_ORBAX if name in stalls), 0.2)
        distances = {name: affordable(found) for name, found in costs.items()}
        distances[OURS] = frequency.prove(
            report, trainer, systems[OURS], OURS, case, distances[OURS], num_pairs=scale.proof_pairs
        )
        for name, distance in distances.items():
            report.add(case, name, f"smallest distance at {100 * OVERHEAD:g} %", "updates", [distance])
        report.add(case, _EPOCH, "distance", "updates", [EPOCH_UPDATES])
        best = min(distances[name] for name in ASYNC_ORBAX if name in distances)
        report.at_least("frequency", best / distances[OURS], 4)
        report.at_most("durable", durable[OURS], 1.3)
        return costs, distances

    def _curve(self, systems: Mapping[str, System], costs: Mapping[str, Sequence[Cost]]) -> None:
        report, scale = self._report, self._scale
        drawn = {name: systems[name] for name in scale.curve_systems}
        curve = frequency.measure_curve(
            report,
            self._trainer,
            drawn,
            self._case,
            scale.distances,
            num_checkpoints=scale.curve_checkpoints,
        )
        measured_until = max(scale.distances)
        whole = frequency.extended(curve, costs, until=256)
        for name, shares in whole.items():
            for distance, share in shares.items():
                if distance > measured_until:
                    report.add(self._case, name, f"overhead, every {distance}, by the cost of one", "%", [100 * share])
        if self._plot:
            frequency.draw(whole, measured_until, Path(self._plot))

    def _memory(self) -> None:
        scale = self._scale
        shares = measure_memory(
            self._report,
            scale.memory_systems,
            self._folder,
            self._case,
            self._trainer.num_bytes,
            scale.name,
            num_checkpoints=3,
        )
        self._report.at_most("rss", shares[OURS], 1.2)

    def _budget(self, step_seconds: float) -> None:
        overhead = measure_budget(
            self._report,
            self._trainer,
            self._folder,
            self._case,
            budget=OVERHEAD,
            step_seconds=step_seconds,
            num_blocks=self._scale.num_blocks,
            block_steps=self._scale.block_steps,
        )
        self._report.at_most("budget", overhead, 100 * OVERHEAD + 0.5)

    def _failures(self, costs: Mapping[str, Sequence[Cost]], distances: Mapping[str, int]) -> None:
        scale = self._scale
        peer = min((name for name in ASYNC_ORBAX if name in distances), key=lambda name: distances[name])
        moments = kill_moments(scale.num_kills, scale.longest_seconds)
        chosen = {OURS: distances[OURS], peer: distances[peer]}
        measure_lost(self._report, self._trainer, chosen, self._folder, self._case, scale.name, moments)
        for name, distance in distances.items():
            waiting = statistics.median(cost.num_steps for cost in costs[name])
            self._report.add(self._case, name, "lost on average, expected", "updates", [distance / 2 + waiting])
        self._report.add(self._case, _EPOCH, "lost on average, expected", "updates", [EPOCH_UPDATES / 2])


def _timed(what: str, act: Callable[[], _Result]) -> _Result:
    start = time.perf_counter()
    result = act()
    say(f"{what}: {time.perf_counter() - start:.0f} s")
    return result


if __name__ == "__main__":
    run(main)
