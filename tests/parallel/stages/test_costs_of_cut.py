"""What operations cost of a loss that is cut, and what sending takes."""

from dataclasses import replace

import jax
import pytest

import braidax.parallel as bx
from braidax.errors import ArgumentError
from braidax.parallel.stages.balance import Priced, Pricing, Span, StageCost
from braidax.parallel.stages.costs_of_cut import border_bytes, bytes_between_halves, costs_of_cut
from braidax.parallel.stages.cut import CutLoss, cut
from braidax.parallel.stages.link import measured_link
from braidax.parallel.stages.schedules import Costs, simulate
from braidax.parallel.stages.searching import named, searched
from braidax.parallel.stages.segments import Seconds, Segment, counted
from braidax.program import Chain
from tests.support.parallel.stages.running.cases import looped
from tests.support.program.cutting.models import layers


def by_hand(*, recompute: bool = False) -> CutLoss:
    """Two stages with figures of one's own."""
    chain = Chain(layers(4).traced())
    border = chain.borders()[1]
    seconds = (Seconds(1.0, 0.0, 2.0), Seconds(3.0, 4.0, 5.0))
    return CutLoss(
        chain.stages([border]),
        (border,),
        (1, 1),
        (recompute, False),
        seconds,
        (StageCost(3.0, 7),) * 2,
        (101, 50),
        (0, 0),
    )


def test_costs_are_those_of_the_cut() -> None:
    found = by_hand()
    sent = border_bytes(found.stages[0])
    assert sent == sum(one.size * one.dtype.itemsize for one in found.stages[0].outgoing) > 0
    costs = costs_of_cut(found, bx.Link(sent / 2, latency_seconds=1.0))
    assert costs.forward_seconds == (1.0, 3.0)
    assert costs.input_seconds == (0.0, 4.0)
    assert costs.weight_seconds == (2.0, 5.0)
    assert costs.transfer_seconds == (3.0,)
    assert costs.activation_bytes == (101, 50)
    assert costs.kept_bytes is None


def test_devices_of_a_stage_divide_seconds_and_bytes_and_what_runs_again_takes_longer() -> None:
    found = by_hand(recompute=True)
    costs = costs_of_cut(found, bx.Link(border_bytes(found.stages[0])), inner_devices=2, kept_bytes=(40, 21))
    assert costs.forward_seconds == (0.5, 1.5)
    assert costs.weight_seconds == (1.0, 2.5)
    assert costs.input_seconds == (0.5, 2.0)  # the first runs its forward pass again
    assert costs.transfer_seconds == (0.5,)
    assert (costs.activation_bytes, costs.kept_bytes) == ((51, 25), (20, 11))


def test_devices_of_replicas_divide_them_too_and_of_what_is_sent_the_fewer_have_more() -> None:
    found = replace(by_hand(), replicas=(1, 2))
    costs = costs_of_cut(found, bx.Link(border_bytes(found.stages[0])), inner_devices=2)
    assert (costs.forward_seconds, costs.input_seconds) == ((0.5, 0.75), (0.0, 1.0))
    assert (costs.weight_seconds, costs.transfer_seconds) == ((1.0, 1.25), (0.5,))
    assert costs.activation_bytes == (51, 13)
    assert costs_of_cut(replace(found, replicas=(3, 2)), bx.Link(border_bytes(found.stages[0]))).transfer_seconds == (
        0.5,
    )


def test_a_cut_says_what_a_forward_pass_leaves() -> None:
    program = layers(4).traced()
    found = cut(program, cuts=("layer_2",), pricing=Pricing(2), clock=counted())
    again = cut(program, cuts=("layer_2",), pricing=Pricing(2, recompute=True), clock=counted())
    assert again.activation_bytes == (0, border_bytes(again.stages[0]))
    assert again.rerun_bytes == found.activation_bytes
    assert found.rerun_bytes == (0, 0)
    assert all(one > other for one, other in zip(found.activation_bytes, again.activation_bytes, strict=True))


def test_devices_of_every_stage_are_counted_by_what_prices_stages() -> None:
    """Two devices a stage have half of the seconds and activations each, and sum their gradients once a batch."""
    segments = [Segment(Seconds(1.0, 1.0, 2.0), 100, 8, 8, {"w": 10})]
    within = bx.Link(10.0, hidden=0.0)
    alone = Priced(segments, Pricing(4)).cost(Span(0, 1), 2)
    two = Priced(segments, Pricing(4, within=within, inner_devices=2)).cost(Span(0, 1), 2)
    assert alone == StageCost(4.0, 4 * 10 + 200)
    assert two == StageCost(2.0 + 10 / 10 / 4, 4 * 10 + 100)
    assert two == Priced(segments, Pricing(4, within=within)).cost(Span(0, 1, 2), 2)
    with pytest.raises(ArgumentError, match=r"^inner_devices=0: expected a positive number"):
        Pricing(4, inner_devices=0)


def test_a_link_is_measured_between_two_devices() -> None:
    link = measured_link(jax.devices()[:2], num_runs=40)  # the shortest of so many is not one that had to wait
    assert 1e6 < link.bytes_per_second < 1e13
    assert 0 <= link.latency_seconds < 0.1
    assert measured_link(jax.devices()[:1]) == bx.Link(1e30)


def test_a_schedule_is_searched_for_in_the_memory_that_is_left() -> None:
    costs = Costs((1.0, 1.0), (1.0, 1.0), (1.0, 1.0), (0.5,), (101, 50))
    free = searched(costs, 6, 2, held_bytes=(1000, 2000), memory_bytes=None)
    best = min(simulate(one, costs).makespan_seconds for one in named(2, 6) if one.num_stages == 2)
    assert free.seconds <= best
    tight = searched(costs, 6, 2, held_bytes=(1000, 2000), memory_bytes=2101)
    assert free.seconds < tight.seconds
    assert max(simulate(tight.schedule, costs).peak_bytes(at) for at in range(2)) <= 101
    with pytest.raises(ArgumentError, match="limit_bytes=100 is below the 101 bytes"):
        searched(costs, 6, 2, held_bytes=(1000, 2000), memory_bytes=2100)
    with pytest.raises(ArgumentError, match=r"^memory_bytes=1999: .* of a device take 2000 bytes, and no activation"):
        searched(costs, 6, 2, held_bytes=(1000, 2000), memory_bytes=1999)


def test_where_several_stages_of_a_device_lie_is_searched_for_too() -> None:
    """The last of four stages takes as long as the others: a device of its own is the best place for it."""
    costs = Costs((1.0, 1.0, 1.0, 3.0), (1.0, 1.0, 1.0, 3.0), (1.0, 1.0, 1.0, 3.0), (0.0,) * 3, (1,) * 4)
    found = searched(costs, 6, 2, held_bytes=(1,) * 4, memory_bytes=None)
    assert found.schedule.device_of_stage == (0, 0, 0, 1)
    assert found.seconds < min(simulate(one, costs).makespan_seconds for one in named(2, 6) if one.num_stages == 4)


def test_what_lies_between_halves_is_operands_and_cotangents_of_products() -> None:
    program = looped(4, width=8, samples=2).traced(1)
    found = cut(program, 2, pricing=Pricing(2), clock=counted())
    again = replace(found, recompute=(True, True))
    size = 2 * 8 * 4  # of a value of the layers
    operands = 3 * size + 2 * 4  # of a layer and of the head, whose results are summed: numbers of samples came back
    assert border_bytes(found.stages[0]) == size
    assert bytes_between_halves(found) == (found.activation_bytes[0] + size, operands)
    assert bytes_between_halves(again) == (size, operands)  # the first one keeps what came back alone
