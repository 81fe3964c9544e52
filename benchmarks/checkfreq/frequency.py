"""How often one can afford a checkpoint: overhead against the distance between two, and the highest frequency."""

import io
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.checkfreq.costs import NUM_CALM, Cost, finish_behind, save_behind
from benchmarks.checkfreq.systems import System
from benchmarks.checkfreq.training import Trainer
from benchmarks.harness import Report, take_turns
from benchmarks.harness.files import write_whole

OVERHEAD = 0.035
EPOCH_UPDATES = 1000  # of what saves at the end of an epoch only
DISTANCE, SHARE = f"smallest distance at {100 * OVERHEAD:g} %", "overhead"
_MAX_ATTEMPTS = 4
_LARGEST_PROVEN = 32  # updates
_LEAST_SHOWN = 0.2  # percent

Curve = dict[str, dict[int, float]]
"""By system and distance the overhead."""


def affordable(costs: Sequence[Cost]) -> int:
    """Returns the smallest distance between checkpoints at which they cost 3.5 % of the run, or less.

    Nor does one begin before the last is there.
    """
    step = statistics.median(cost.step for cost in costs)
    stall = statistics.median(cost.stall for cost in costs)
    num_steps = math.ceil(statistics.median(cost.num_steps for cost in costs))
    return max(num_steps, math.ceil(stall / (OVERHEAD * step)), 1)


def curve_case(case: str) -> str:
    """Returns the case of overheads by distance."""
    return f"{case}, overhead against distance"


def measure_curve(
    report: Report,
    trainer: Trainer,
    systems: Mapping[str, System],
    case: str,
    distances: Sequence[int],
    *,
    num_checkpoints: int,
    rounds: int,
) -> Curve:
    """Measures what checkpoints cost that come so soon that they may meet."""
    curve: Curve = {name: {} for name in systems}
    for distance in distances:

        def turn(system: System, distance: int = distance) -> Callable[[], float]:
            return lambda: overhead(trainer, system, distance, num_checkpoints)

        figures = take_turns({name: turn(system) for name, system in systems.items()}, rounds=rounds)
        for name, shares in figures.items():
            percents = [100 * share for share in shares]
            median = report.add(curve_case(case), name, SHARE, "%", percents, at=f"every {distance}")
            curve[name][distance] = median / 100
    return curve


def prove(report: Report, trainer: Trainer, system: System, name: str, case: str, distance: int, num_pairs: int) -> int:
    """Measures whether a distance is affordable, and goes on to a larger one where it is not. **Returns:** that.

    Where it is so large that so many steps take minutes, it is believed.
    """
    for _ in range(_MAX_ATTEMPTS):
        if distance > _LARGEST_PROVEN:
            break
        every, median = _in_pairs(trainer, system, distance, num_pairs)
        report.add(case, name, f"overhead, every {distance}, of pairs", "%", [100 * share for share in every])
        report.add(case, name, f"overhead, every {distance}, by median steps", "%", [100 * median])
        if median <= OVERHEAD:
            break
        distance = max(distance + 1, math.ceil(distance * median / OVERHEAD))
    return distance


def _in_pairs(trainer: Trainer, system: System, distance: int, num_pairs: int) -> tuple[list[float], float]:
    """Takes a checkpoint and `distance` steps, then as many steps without one, in turn.

    **Returns:** the overhead of each pair; and that by the median step at each place behind a checkpoint, to which
    whatever else disturbs the machine now and then does not count.
    """
    saved: list[list[float]] = []
    calm: list[list[float]] = []
    for number in range(num_pairs + 1):  # the first checkpoint takes memory
        saved.append([save_behind(trainer, system)[0]])
        saved[number] += [trainer.advance(system.before_apply) for _ in range(distance - 1)]
        calm.append([trainer.advance(system.before_apply) for _ in range(distance)])
    del saved[0], calm[0]
    typical = sum(map(statistics.median, zip(*saved, strict=True)))
    step = statistics.median(second for seconds in calm for second in seconds)
    every = [sum(one) / sum(other) - 1 for one, other in zip(saved, calm, strict=True)]
    return every, typical / (distance * step) - 1


def overhead(trainer: Trainer, system: System, distance: int, num_checkpoints: int) -> float:
    """Returns the share by which checkpoints at a distance make a run longer.

    What the last one costs is counted to its end, even where that is after the next would have begun.
    """
    calm = [trainer.advance(system.before_apply) for _ in range(3 * NUM_CALM)]
    seconds: list[float] = []
    for _ in range(num_checkpoints):
        seconds.append(save_behind(trainer, system)[0])
        seconds += [trainer.advance(system.before_apply) for _ in range(distance - 1)]
    seconds += finish_behind(trainer, system)
    calm += [trainer.advance(system.before_apply) for _ in range(3 * NUM_CALM)]
    step = statistics.mean(calm)
    return (sum(seconds) - len(seconds) * step) / (num_checkpoints * distance * step)


def extended(curve: Curve, costs: Mapping[str, Sequence[Cost]], until: int) -> Curve:
    """Returns the curve with larger distances, at which no two checkpoints meet: there it is the cost of one alone."""
    whole: Curve = {}
    for name, shares in curve.items():
        step = statistics.median(cost.step for cost in costs[name])
        stall = statistics.median(cost.stall for cost in costs[name])
        whole[name] = dict(shares)
        distance = 2 * max(shares)
        while distance <= until:
            whole[name][distance] = stall / (distance * step)
            distance *= 2
    return whole


def draw(curve: Curve, measured_until: int, path: Path) -> None:
    """Draws overhead against distance, dashed where it follows from the cost of one."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 4.2), constrained_layout=True)
    for name, shares in curve.items():
        measured = {distance: share for distance, share in shares.items() if distance <= measured_until}
        line = axis.plot(list(measured), [_shown(share) for share in measured.values()], "-o", label=name)[0]
        rest = {distance: share for distance, share in shares.items() if distance >= measured_until}
        axis.plot(list(rest), [_shown(share) for share in rest.values()], "--", color=line.get_color())
    axis.axhline(100 * OVERHEAD, color="gray", linewidth=0.8)
    axis.set(
        xlabel="updates between checkpoints",
        ylabel="overhead, %",
        xscale="log",
        yscale="log",
        ylim=(_LEAST_SHOWN, None),
    )
    ticks = sorted({distance for shares in curve.values() for distance in shares})
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.minorticks_off()
    axis.legend(fontsize=8)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=100, format=path.suffix.removeprefix("."))
    write_whole(path, drawn.getvalue())


def _shown(share: float) -> float:
    return max(_LEAST_SHOWN, 100 * share)
