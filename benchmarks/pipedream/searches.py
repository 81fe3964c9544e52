"""Schedules that are searched for: beside the shortest there is, and beside every named one under a heavy head."""

import random
from collections.abc import Callable, Iterator, Sequence

from benchmarks.harness import Report, say
from benchmarks.pipedream.exact import optimum
from braidax.parallel.stages.schedules import (
    Costs,
    Schedule,
    dual_pipe_v,
    eager_one_forward_one_backward,
    folded,
    gpipe,
    interleaved,
    looped,
    one_forward_one_backward,
    search_layouts,
    search_schedule,
    simulate,
    straight,
    v_half,
    v_min,
    zero_bubble_h1,
    zero_bubble_v,
)
from braidax.parallel.stages.schedules.search.problem import Problem

NAMED: dict[str, Callable[[int, int], Schedule]] = {
    "GPipe": gpipe,
    "1F1B": one_forward_one_backward,
    "Eager1F1B": eager_one_forward_one_backward,
    "Interleaved1F1B": lambda devices, count: interleaved(devices, -(-count // devices) * devices),
    "ZB-H1": zero_bubble_h1,
    "ZB-V": zero_bubble_v,
    "V-Half": v_half,
    "V-Min": v_min,
    "DualPipeV": lambda devices, count: dual_pipe_v(devices, max(count, 2 * devices)),
}
"""All that flush."""

Instance = tuple[tuple[int, ...], int, int | None]  # device_of_stage, microbatches, how many activations fit
INSTANCES: Sequence[Instance] = (
    (straight(2), 8, None),
    (straight(2), 8, 2),
    (straight(3), 4, 3),
    (straight(3), 8, None),
    (straight(4), 3, 4),
    (straight(4), 8, None),
    (folded(2), 2, None),
    (looped(2, 2), 2, None),
)
_MOST = 100_000  # beginnings that the exhaustive search looks at
_CLAIMED, _HEAVY = 1.02, 1.05
SEARCHED, SHORTEST, STEP = "searched", "the shortest there is", "step"


def beside_the_shortest(report: Report, instances: Sequence[Instance], num_draws: int) -> None:
    """Claims how much longer a searched schedule takes than the shortest one, with costs that are drawn."""
    ratios: list[float] = []
    for device_of_stage, count, limit in instances:
        at = f"stages on {list(device_of_stage)}, {count} microbatches{f', {limit} fit' if limit else ''}"
        own: list[float] = []
        for seed in range(num_draws):
            costs = drawn(seed, len(device_of_stage))
            found = search_schedule(costs, count, device_of_stage, limit_bytes=limit)
            seconds = simulate(found.schedule, costs).makespan_seconds
            own.append(seconds / _shortest(Problem(costs, count, device_of_stage, limit), seconds, found.bound_seconds))
        report.add("searched schedules", f"{SEARCHED} / {SHORTEST}", STEP, "", own, at=at)
        say(f"  {at}: {max(own):.3f}")
        ratios += own
    report.at_most("search", max(ratios), _CLAIMED)


def with_a_heavy_head(report: Report, devices: Sequence[int], count: int) -> None:
    """Claims how much longer every named schedule takes than a searched one where the last stage has three times the
    work.
    """
    ratios: list[float] = []
    for num_devices in devices:
        seconds = (1.0,) * (2 * num_devices - 1) + (3.0,)
        costs = Costs(seconds, seconds, seconds, (0.1,) * (2 * num_devices - 1), (1,) * (2 * num_devices))
        at = f"{num_devices} devices, {count} microbatches"
        best = search_layouts(costs, count, num_devices).seconds
        report.add("a heavy head", SEARCHED, STEP, "units", [best], at=at)
        for name, taken in _named(costs, num_devices, count):
            ratios.append(report.add("a heavy head", name, STEP, "units", [taken], at=at) / best)
        say(f"  {at}: {best:.1f}")
    report.at_least("search_heavy_head", min(ratios), _HEAVY)


def _named(costs: Costs, num_devices: int, count: int) -> Iterator[tuple[str, float]]:
    """Yields how long each takes; one with one stage a device has two of these in each."""
    for name, make in NAMED.items():
        schedule = make(num_devices, count)
        own = costs if schedule.num_stages == costs.num_stages else joined(costs, 2)
        yield name, simulate(schedule, own).makespan_seconds * count / schedule.num_microbatches


def joined(costs: Costs, size: int) -> Costs:
    """Returns the costs of stages that are so many of these each."""

    def sums(values: Sequence[float]) -> tuple[float, ...]:
        return tuple(sum(values[start : start + size]) for start in range(0, costs.num_stages, size))

    forward, inputs, weight = map(sums, (costs.forward_seconds, costs.input_seconds, costs.weight_seconds))
    num_bytes = tuple(round(one) for one in sums(costs.activation_bytes))
    return Costs(forward, inputs, weight, costs.transfer_seconds[size - 1 :: size], num_bytes)


def _shortest(problem: Problem, known: float, bound: float) -> float:
    """Returns the shortest time, or where there is too much to look at what is proven to be below it."""
    if known <= bound * (1 + 1e-9):
        return known
    return optimum(problem, known, max_looked_at=_MOST) or max(
        bound, optimum(problem, known / _CLAIMED, max_looked_at=_MOST) or 0.0
    )


def drawn(seed: int, num_stages: int) -> Costs:
    """Returns costs at random."""
    draw = random.Random(seed)
    forward, inputs, weight = (tuple(draw.uniform(0.5, 2.0) for _ in range(num_stages)) for _ in range(3))
    transfers = tuple(draw.uniform(0.0, 0.5) for _ in range(num_stages - 1))
    return Costs(forward, inputs, weight, transfers, (1,) * num_stages)
