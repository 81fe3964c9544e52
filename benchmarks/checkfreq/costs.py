"""What one checkpoint costs: to the step behind it, to the run, until it is durable, and when it is read again."""

import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from benchmarks.checkfreq.floor import DIRECT, Floor
from benchmarks.checkfreq.systems import System
from benchmarks.checkfreq.training import Trainer
from benchmarks.harness import Report, take_turns

NUM_CALM = 4  # steps before a checkpoint and behind it, which tell what a step takes in peace
_NUM_SETTLING = 2
_MAX_STEPS = 400
STALL, NAMED = "stall: added to the run, a checkpoint", "until it has its name, behind training"
DURABLE, RESTORE = "until durable, nothing else running", "restore, page cache warm"


class Cost(NamedTuple):
    """Of one checkpoint, in seconds, and in steps.

    **Fields:** `step`: one in peace. `calls`: in `save` and in `before_apply`; of the latter much passes while the
    gradients are computed. `later`: by how much later the next update was done. `stall`: by how much longer training
    took: the call, and all steps until the checkpoint was there and two more, as far as they were slower.
    `until_named`: from `save` until it had its name, behind training. `num_steps`: after which it was seen.
    """

    step: float
    calls: float
    later: float
    stall: float
    until_named: float
    num_steps: int


def measure_costs(
    report: Report, trainer: Trainer, systems: Mapping[str, System], case: str, *, rounds: int
) -> dict[str, list[Cost]]:
    """Takes checkpoints behind training, systems in turn; the first one of each, which takes memory, does not count."""
    found: dict[str, list[Cost]] = {name: [] for name in systems}

    def turn(name: str, system: System) -> Callable[[], float]:
        def run() -> float:
            found[name].append(_cost(trainer, system))
            return found[name][-1].stall

        return run

    take_turns({name: turn(name, system) for name, system in systems.items()}, rounds=rounds + 1)
    for name, costs in found.items():
        del costs[0]
        report.add(case, name, STALL, "ms", [1e3 * cost.stall for cost in costs])
        report.add(case, name, "of it in the next update", "ms", [1e3 * cost.later for cost in costs])
        report.add(case, name, "in calls, a checkpoint", "ms", [1e3 * cost.calls for cost in costs])
        report.add(case, name, NAMED, "s", [cost.until_named for cost in costs])
    report.add(case, "no checkpoints", "step", "ms", [1e3 * cost.step for costs in found.values() for cost in costs])
    return found


def measure_durable(
    report: Report, trainer: Trainer, systems: Mapping[str, System], folder: Path, case: str, *, rounds: int
) -> None:
    """Saves with each system while nothing else runs, and writes the same bytes without any, buffered and direct."""
    with Floor(jax.tree.leaves(trainer.tree), folder / "floor") as floor:
        why = floor.why_not_direct()
        floors = {name: _written(floor, write) for name, write in floor.writes().items() if name != DIRECT or not why}
        if why:
            report.missing(case, DIRECT, why)
        saves = {name: _saved(system, trainer) for name, system in systems.items()}
        figures = take_turns({**floors, **saves}, rounds=rounds)
    for name, seconds in figures.items():
        report.add(case, name, DURABLE, "s", seconds)


def _written(floor: Floor, write: Callable[[], None]) -> Callable[[], float]:
    def run() -> float:
        floor.forget()
        return _seconds(write)

    return run


def _saved(system: System, trainer: Trainer) -> Callable[[], float]:
    return lambda: _seconds(lambda: system.save_now(trainer.tree))


def measure_restore(report: Report, trainer: Trainer, systems: Mapping[str, System], case: str, *, rounds: int) -> None:
    """Restores what each system saved last, from the page cache, and compares it bit for bit."""
    for name, system in systems.items():
        system.save_now(trainer.tree)
        restored = system.restore(trainer.tree)
        if not all(map(_is_same, jax.tree.leaves(restored), jax.tree.leaves(trainer.tree))):
            raise RuntimeError(f"{name}: restored other numbers than it saved")

    def turn(system: System) -> Callable[[], float]:
        return lambda: _seconds(lambda: jax.block_until_ready(system.restore(trainer.tree)))

    figures = take_turns({name: turn(system) for name, system in systems.items()}, rounds=rounds)
    for name, seconds in figures.items():
        report.add(case, name, RESTORE, "s", seconds)


def save_behind(trainer: Trainer, system: System) -> tuple[float, float]:
    """Begins a checkpoint and takes a step. **Returns:** the seconds of both, and those in calls of the system."""
    calls = -time.perf_counter()
    system.save(trainer.tree)
    calls += time.perf_counter()
    saving = calls

    def before_apply() -> None:
        nonlocal calls
        calls -= time.perf_counter()
        system.before_apply()
        calls += time.perf_counter()

    return saving + trainer.advance(before_apply), calls


def finish_behind(trainer: Trainer, system: System) -> list[float]:
    """Takes steps until the checkpoint is there, and two more. **Returns:** their seconds."""
    steps: list[float] = []
    while not system.newest.exists():
        steps.append(trainer.advance(system.before_apply))
        if len(steps) > _MAX_STEPS:
            raise RuntimeError(f"{system.newest}: not there after {_MAX_STEPS} steps")
    return steps + [trainer.advance(system.before_apply) for _ in range(_NUM_SETTLING)]


def _cost(trainer: Trainer, system: System) -> Cost:
    calm = [trainer.advance(system.before_apply) for _ in range(NUM_CALM)]
    begun = time.time()
    first, calls = save_behind(trainer, system)
    rest = finish_behind(trainer, system)
    named = system.newest.stat().st_ctime  # of its rename
    calm += [trainer.advance(system.before_apply) for _ in range(NUM_CALM)]
    step = statistics.mean(calm)
    stall = first + sum(rest) - (1 + len(rest)) * step
    return Cost(step, calls, first - step, stall, named - begun, 1 + len(rest) - _NUM_SETTLING)


def _is_same(one: Any, other: Any) -> bool:
    return one.dtype == other.dtype and bool(jax.numpy.array_equal(one, other))


def _seconds(act: Callable[[], object]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start
