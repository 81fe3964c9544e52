"""Searched schedules: as short as an exhaustive search's, within memory, the same every time."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from benchmarks.pipedream.exact import optimum
from benchmarks.pipedream.searches import INSTANCES, drawn
from braidax.errors import ArgumentError
from braidax.parallel.stages.schedules import (
    Costs,
    Kind,
    Operation,
    Schedule,
    folded,
    gpipe,
    looped,
    one_forward_one_backward,
    search_layouts,
    search_schedule,
    simulate,
    straight,
    validate,
    zero_bubble_h1,
)
from braidax.parallel.stages.schedules.search.beam import beam
from braidax.parallel.stages.schedules.search.dispatch import dispatched, policies
from braidax.parallel.stages.schedules.search.improve import fits, makespan
from braidax.parallel.stages.schedules.search.layouts import layouts
from braidax.parallel.stages.schedules.search.problem import Problem
from tests.support.parallel.stages.pipelines import FLUSHED, merged


@pytest.mark.parametrize(
    ("device_of_stage", "num_microbatches", "limit"),
    INSTANCES,
)
def test_no_schedule_is_shorter_by_two_percent(
    device_of_stage: tuple[int, ...], num_microbatches: int, limit: int | None
) -> None:
    for seed in range(2):
        costs = drawn(seed, len(device_of_stage))
        found = search_schedule(costs, num_microbatches, device_of_stage, limit_bytes=limit, num_trials=1000)
        validate(found.schedule, limit_bytes=limit)
        assert simulate(found.schedule, costs).makespan_seconds == pytest.approx(found.seconds)
        assert found.seconds >= found.bound_seconds * (1 - 1e-9)
        claim = found.seconds / 1.02
        if found.bound_seconds < claim:  # otherwise nothing is left to prove
            problem = Problem(costs, num_microbatches, device_of_stage, limit)
            assert optimum(problem, claim) == claim, (seed, found)


def test_the_oracle_finds_what_is_shorter_and_the_bound_is_below_it() -> None:
    costs = drawn(7, 3)
    gpipe_seconds = simulate(gpipe(3, 3), costs).makespan_seconds
    best = optimum(Problem(costs, 3, straight(3)), gpipe_seconds)
    found = search_schedule(costs, 3, straight(3))
    assert best is not None
    assert found.bound_seconds * (1 - 1e-9) <= best == pytest.approx(found.seconds)
    assert best < gpipe_seconds * 0.95
    even = Problem(Costs.even(2), 2, straight(2))  # F F I I W W, and behind F: F I F I W W
    assert optimum(even, 100.0) == 7.0
    assert optimum(Problem(Costs.even(2), 2, straight(2), 1), 100.0) == 10.0


@pytest.mark.parametrize("num_devices", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_with_a_heavy_head_every_named_schedule_takes_five_percent_longer(num_devices: int) -> None:
    seconds = (1.0,) * (2 * num_devices - 1) + (3.0,)
    costs = Costs(seconds, seconds, seconds, (0.1,) * (2 * num_devices - 1), (1,) * (2 * num_devices))
    found = search_layouts(costs, 8, num_devices, num_trials=400)
    validate(found.schedule)
    for schedule in (build(num_devices, 8) for build in FLUSHED.values()):
        own = costs if schedule.num_stages == costs.num_stages else merged(costs, 2)
        assert simulate(schedule, own).makespan_seconds >= 1.05 * found.seconds, schedule.name


def test_a_tight_memory_is_kept_and_a_wide_one_used() -> None:
    costs = Costs.even(4)
    seconds = [search_schedule(costs, 8, straight(4), limit_bytes=limit).seconds for limit in (1, 4, 7)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[1] <= simulate(zero_bubble_h1(4, 8), costs).makespan_seconds
    assert seconds[2] == 3 * 8 + 3  # no bubble, as ZB-H2 with the memory of 2p - 1


def test_known_schedules_are_begun_from_and_results_repeat() -> None:
    costs = drawn(3, 3)
    known = [one_forward_one_backward(3, 4), zero_bubble_h1(3, 4)]
    found = search_schedule(costs, 4, straight(3), known=known)
    assert found.seconds <= min(simulate(each, costs).makespan_seconds for each in known)
    assert found == search_schedule(costs, 4, straight(3), known=known)


def replaced(schedule: Schedule, change: Callable[[Operation], Sequence[Operation]]) -> Schedule:
    return schedule.with_lists(tuple(tuple(new for each in one for new in change(each)) for one in schedule.lists))


def halved(one: Operation) -> Sequence[Operation]:
    return [replace(one, kind=kind) for kind in (Kind.INPUT, Kind.WEIGHT)] if one.kind is Kind.BACKWARD else [one]


def test_halves_side_by_side_become_one_unless_a_step_is_longer_for_it() -> None:
    even = search_schedule(Costs.even(2), 2, straight(2))
    assert [" ".join(map(str, one)) for one in even.schedule.lists] == [
        "0F0 0F1 0B0 0B1 0U0", "1F0 1I0 1F1 1I1 1W0 1W1 1U0",
    ]  # fmt: skip
    assert even.seconds == simulate(even.schedule, Costs.even(2)).makespan_seconds == 7
    left = 0
    for seed in range(2):
        costs = replace(drawn(seed, 4), kept_bytes=(0, 1, 1, 0))
        found = search_schedule(costs, 5, straight(4), limit_bytes=4)
        validate(found.schedule)
        whole, apart = (simulate(one, costs) for one in (found.schedule, replaced(found.schedule, halved)))
        assert any(one.kind is Kind.BACKWARD for one in found.schedule.operations())
        assert whole.makespan_seconds == pytest.approx(apart.makespan_seconds) == pytest.approx(found.seconds)
        peaks = [whole.peak_bytes(at) for at in range(4)]
        assert peaks == [apart.peak_bytes(at) for at in range(4)]
        assert max(peaks) <= 4
        for one, other in (pair for operations in found.schedule.lists for pair in pairwise(operations)):
            if one.kind is Kind.INPUT and other == replace(one, kind=Kind.WEIGHT):
                backward = {one: [replace(one, kind=Kind.BACKWARD)], other: []}
                longer = replaced(found.schedule, lambda each, to=backward: to.get(each, [each]))
                assert simulate(longer, costs).makespan_seconds > found.seconds * (1 + 1e-9)
                left += 1
    assert left


def test_a_beam_finds_what_policies_do_not() -> None:
    for seed in range(4):
        problem = Problem(drawn(seed, 4), 3, looped(2, 2), 4)
        orders = beam(problem, width=60)
        assert orders is not None
        validate(problem.schedule(orders, "beam"), limit_bytes=4)
        found = makespan(problem, orders)
        others = [makespan(problem, dispatched(problem, policy)) for policy in policies(problem)]
        assert found is not None
        assert all(other is not None and other[0] >= 1.05 * found[0] for other in others)


def test_layouts_are_even_runs_and_shapes() -> None:
    heavy = (1.0, 1.0, 1.0, 3.0)
    costs = Costs(heavy, heavy, heavy, (0.0,) * 3, (1,) * 4)
    assert layouts(costs, 2) == [(0, 0, 0, 1), (1, 1, 1, 0), (0, 1, 1, 0), (0, 1, 0, 1)]
    assert layouts(costs, 4)[0] == (0, 1, 2, 3)


def test_what_cannot_be_searched_is_refused() -> None:
    costs = Costs.even(4, activation=10)
    message = r"^limit_bytes=19 is below the 20 bytes of activations that one microbatch needs on device 0$"
    with pytest.raises(ArgumentError, match=message):
        search_schedule(costs, 4, folded(2), limit_bytes=19)
    with pytest.raises(
        ArgumentError, match=r"^num_devices=5 is not between 1 and the 4 stages of costs; cut into more"
    ):
        search_layouts(costs, 4, 5)
    with pytest.raises(
        ArgumentError, match=r"^known schedule 'GPipe' has 3 microbatches and device_of_stage=\(0, 1\), "
    ):
        search_schedule(Costs.even(2), 4, straight(2), known=[gpipe(2, 3)])
    with pytest.raises(ArgumentError, match=r"^costs are of 4 stages, device_of_stage has 2$"):
        search_schedule(costs, 4, straight(2))


@pytest.mark.parametrize("device_of_stage", [straight(3), folded(2)])
def test_what_gradients_of_inputs_leave_is_kept_within_memory(device_of_stage: tuple[int, ...]) -> None:
    """Of a microbatch lives more between the two gradients than before: room that forwards alone would fill."""
    count, num_devices = len(device_of_stage), max(device_of_stage) + 1
    costs = replace(Costs.even(count, activation=10), kept_bytes=(13,) * count)
    least = 10 * count // num_devices + 3
    shortest: list[float] = []
    for limit in (least, 2 * least, 10 * 6 * count):
        found = search_schedule(costs, 6, device_of_stage, limit_bytes=limit, num_trials=200)
        simulation = simulate(found.schedule, costs)
        assert max(map(simulation.peak_bytes, range(num_devices))) <= limit
        validate(found.schedule, activation_bytes=(10,) * count, kept_bytes=(13,) * count, limit_bytes=limit)
        problem = Problem(costs, 6, device_of_stage, limit)
        orders = [dispatched(problem, policy) for policy in policies(problem)]
        assert all(fits(problem, order) for each in orders for order in each)
        shortest.append(found.seconds)
    assert shortest == sorted(shortest, reverse=True)
    assert shortest[0] > shortest[2]
    with pytest.raises(ArgumentError, match=rf"^limit_bytes={least - 1} is below the {least} bytes of activations"):
        search_schedule(costs, 6, device_of_stage, limit_bytes=least - 1)
    less = replace(costs, kept_bytes=(4,) * count)
    assert search_schedule(less, 6, device_of_stage, limit_bytes=least, num_trials=200).seconds <= shortest[0]
