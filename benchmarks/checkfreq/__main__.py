"""Checkpoints: ours against Orbax (behind the step, with and without OCDBT) and against saves that block.

A network and its Adam state of 528 MB train on CPU by a step that donates. Measured: by how much longer a checkpoint
makes the run (`stall`: the call, and what the steps beside it are slower; of that, what falls on the next update), how
long until it is durable and until it is restored, peak memory, overhead against frequency and the highest frequency at
3.5 %, whether `Adaptive` keeps its budget beside a process that disturbs, and how many updates are lost when the
process is killed. Everything is fsynced by all, and what is durable is compared with the faster of a buffered and a
direct write of the same bytes.
"""

import logging
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from benchmarks.checkfreq import frequency
from benchmarks.checkfreq.budget import measure_budget
from benchmarks.checkfreq.costs import (
    DURABLE,
    NAMED,
    RESTORE,
    STALL,
    Cost,
    measure_costs,
    measure_durable,
    measure_restore,
)
from benchmarks.checkfreq.floor import FLOORS
from benchmarks.checkfreq.frequency import DISTANCE, EPOCH_UPDATES, OVERHEAD, affordable
from benchmarks.checkfreq.processes import EXTRA, LOST, kill_moments, measure_lost, measure_memory
from benchmarks.checkfreq.systems import (
    NEEDS,
    ORBAX,
    OURS,
    PEERS,
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
from benchmarks.harness import Report, absent, arguments, installed, run, say


@dataclass(frozen=True)
class Scale:
    """How much is measured: full, or `--quick`.

    **Fields:** `size`, `name`: of what is trained. `systems`, `curve_systems`, `memory_systems`: which. `rounds`,
    `durable_rounds`: figures of a system. `proof_pairs`: of steps with and without a checkpoint. `distances`: between
    checkpoints, that are measured. `curve_checkpoints`: of one figure, of which
    there are `curve_rounds`. `num_blocks`, `block_steps`: of the run with a
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
    curve_rounds: int
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
    curve_rounds=3,
    num_blocks=9,
    block_steps=48,
    num_kills=6,
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
    curve_rounds=1,
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
    scale, report = QUICK if options.quick else FULL, Report(options, "orbax-checkpoint", "tensorstore")
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
        makes = {name: SYSTEMS[name] for name in self._scale.systems}
        makes = installed(self._report, self._case, makes, NEEDS)
        systems = {name: make(self._folder / f"run-{number}") for number, (name, make) in enumerate(makes.items())}
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
        """Claims all that a checkpoint costs against whichever peer is the best in it."""
        report, trainer, scale, case = self._report, self._trainer, self._scale, self._case
        costs = measure_costs(report, trainer, systems, case, rounds=scale.rounds)
        measure_durable(report, trainer, systems, self._folder, case, rounds=scale.durable_rounds)
        measure_restore(report, trainer, systems, case, rounds=scale.durable_rounds)
        self._claim("stall", STALL, 5)
        self._claim("named", NAMED)
        self._claim("durable_peers", DURABLE)
        report.against("durable", case, DURABLE, ours=OURS, peers=FLOORS, at_least=1 / 1.3)
        self._claim("restore", RESTORE)
        proven = frequency.prove(
            report, trainer, systems[OURS], OURS, case, affordable(costs[OURS]), num_pairs=scale.proof_pairs
        )
        distances: dict[str, int] = {}
        for name, found in costs.items():
            each = [max(affordable([cost]), proven if name == OURS else 1) for cost in found]
            distances[name] = math.ceil(report.add(case, name, DISTANCE, "updates", each))
        report.add(case, _EPOCH, DISTANCE, "updates", [EPOCH_UPDATES])
        self._claim("frequency", DISTANCE, 4)
        return costs, distances

    def _claim(self, claim: str, metric: str, at_least: float = 1) -> None:
        """Claims a metric against the best peer of those that this scale has, and those that are not installed."""
        peers = [name for name in PEERS if name in self._scale.systems]
        self._report.against(claim, self._case, metric, ours=OURS, peers=peers, at_least=at_least)

    def _curve(self, systems: Mapping[str, System], costs: Mapping[str, Sequence[Cost]]) -> None:
        report, scale = self._report, self._scale
        drawn = {name: systems[name] for name in scale.curve_systems if name in systems}
        curve = frequency.measure_curve(
            report,
            self._trainer,
            drawn,
            self._case,
            scale.distances,
            num_checkpoints=scale.curve_checkpoints,
            rounds=scale.curve_rounds,
        )
        measured_until = max(scale.distances)
        whole = frequency.extended(curve, costs, until=256)
        for name, shares in whole.items():
            for distance, share in shares.items():
                if distance > measured_until:
                    at = f"every {distance}, by the cost of one"
                    report.add(frequency.curve_case(self._case), name, frequency.SHARE, "%", [100 * share], at=at)
        if self._plot:
            frequency.draw(whole, measured_until, Path(self._plot))

    def _memory(self) -> None:
        report, scale = self._report, self._scale
        names = [name for name in scale.memory_systems if name not in NEEDS or not absent(NEEDS[name])]
        shares = measure_memory(
            report, names, self._folder, self._case, self._trainer.num_bytes, scale.name, num_checkpoints=3
        )
        peers = [name for name in PEERS if name in scale.memory_systems]
        if peers:
            report.against("rss_peers", self._case, EXTRA, ours=OURS, peers=peers)
        report.at_most("rss", shares[OURS], 1.2)

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
        """Kills ours and the peer that can afford the most checkpoints, both at the same moments."""
        scale, report = self._scale, self._report
        moments = kill_moments(scale.num_kills, scale.longest_seconds)
        rivals = sorted((name for name in PEERS if name in distances), key=lambda name: distances[name])[:1]
        chosen = {name: distances[name] for name in (OURS, *rivals)}
        measure_lost(report, self._trainer, chosen, self._folder, self._case, scale.name, moments)
        for name, distance in distances.items():
            waiting = statistics.median(cost.num_steps for cost in costs[name])
            report.add(self._case, name, "lost on average, expected", "updates", [distance / 2 + waiting])
        report.add(self._case, _EPOCH, "lost on average, expected", "updates", [EPOCH_UPDATES / 2])
        if rivals:
            report.against("lost", self._case, LOST, ours=OURS, peers=rivals)


def _timed(what: str, act: Callable[[], _Result]) -> _Result:
    start = time.perf_counter()
    result = act()
    say(f"{what}: {time.perf_counter() - start:.0f} s")
    return result


if __name__ == "__main__":
    run(main)
