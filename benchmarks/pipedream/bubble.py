"""How long devices wait within a step: predicted by the plan, simulated from what operations took, and measured."""

from collections.abc import Sequence
from itertools import chain, pairwise
from statistics import fmean, median

from benchmarks.harness import Report, say
from benchmarks.harness.gpt2 import Shape
from benchmarks.pipedream import peers
from benchmarks.pipedream.running import running, warmed
from benchmarks.pipedream.searches import NAMED
from braidax.parallel.stages.schedules import Costs, Kind, Schedule, Timed, simulate
from braidax.parallel.stages.schedules.dependencies import Dependencies

METRIC = "devices that wait"
FORMULA, PREDICTED, SIMULATED, MEASURED = "all stages alike", "predicted", "simulated", "measured"
_SCHEDULES = ("1F1B", "GPipe", "ZB-H1")
_NUM_DEVICES = 2


def bubbles(report: Report, shape: Shape, *, microbatches: int, rounds: int, warmup: int) -> None:
    """Claims that devices wait as long as a simulation says, of what operations took in the same step."""
    case, apart = f"bubble, {microbatches} microbatches", list[float]()
    with running(report, case, peers.pipelines(shape, _SCHEDULES, microbatches)) as found:
        warmed(found, warmup)
        cuts = {name: one.ask("cut")[0] for name, one in found.items()}
        if len({*cuts.values()}) > 1:
            raise ValueError(f"schedules are cut at {cuts}: not the same stages")
        planned: list[Costs] = [one.ask("planned")[0] for one in found.values()]
        for name, one in found.items():
            schedule = NAMED[name.removeprefix("ours, ")](_NUM_DEVICES, microbatches)
            steps = [[*chain(*one.ask("operations"))] for _ in range(rounds)]
            measured, simulated = [*map(waiting, steps)], [_waiting(schedule, costs(schedule, own)) for own in steps]
            for metric, values in (
                (FORMULA, [_waiting(schedule, Costs.even(_NUM_DEVICES))]),
                (PREDICTED, [_waiting(schedule, planned[0])]),
                (SIMULATED, simulated),
                (MEASURED, measured),
            ):
                report.add(case, f"{name}, {metric}", METRIC, "%", [100 * value for value in values])
            ratios = [mine / its for mine, its in zip(measured, simulated, strict=True)]
            apart.append(abs(median(ratios) - 1))
            say(f"  {name}: {100 * median(simulated):.1f} % simulated, {100 * median(measured):.1f} % measured")
    if apart:
        report.at_most("bubble", max(apart), 0.1)
    else:
        report.not_measured("bubble", "<= 0.1", "no pipeline of ours did run")


def waiting(operations: Sequence[Timed]) -> float:
    """Returns which part of a step devices did not compute, from the first operation to the end of the last one."""
    whole = max(one.end for one in operations) - min(one.start for one in operations)
    busy = sum(one.end - one.start for one in operations)
    return 1 - busy / (whole * len({one.device for one in operations}))


def costs(schedule: Schedule, operations: Sequence[Timed]) -> Costs:
    """Returns what the operations of a step took, on the mean of each kind and stage.

    A transfer counts where a device stood still until it was there, and had when it was made, from the end of the
    operation that made it: the others were hidden, and a device that computes sees late that something has come.
    """
    num_stages = schedule.num_stages
    seconds: dict[tuple[Kind, int], list[float]] = {}
    transfers: list[list[float]] = [[] for _ in range(num_stages - 1)]
    ends = {one.operation: one.end for one in operations}
    dependencies = Dependencies(schedule.computing())
    for one in operations:
        seconds.setdefault((one.operation.kind, one.operation.stage), []).append(one.end - one.start)
    for device in range(schedule.num_devices):
        own = sorted((one for one in operations if one.device == device), key=lambda one: one.start)
        for before, one in pairwise(own):
            for need in dependencies.of(one.operation):
                if need.stage != one.operation.stage and one.start > before.end and ends[need] >= before.end:
                    transfers[min(need.stage, one.operation.stage)].append(one.start - ends[need])

    def mean(*kinds: Kind) -> tuple[float, ...]:
        return tuple(
            sum(fmean(seconds[kind, at]) for kind in kinds if (kind, at) in seconds) for at in range(num_stages)
        )

    moved = tuple(max(0.0, fmean(one)) if one else 0.0 for one in transfers)
    inputs, weights = mean(Kind.BACKWARD, Kind.INPUT), mean(Kind.WEIGHT)
    return Costs(mean(Kind.FORWARD), inputs, weights, moved, (1,) * num_stages)


def _waiting(schedule: Schedule, of: Costs) -> float:
    found = simulate(schedule, of)
    return sum(map(found.bubble, range(schedule.num_devices))) / schedule.num_devices
