"""Named schedules: valid everywhere, as long as their papers say, with no more activations than their formulas."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braidax.errors import ArgumentError
from braidax.parallel.stages.pipeline import Pipeline
from braidax.parallel.stages.schedules import (
    Costs,
    Kind,
    double_buffered,
    dual_pipe_v,
    gpipe,
    interleaved,
    peak_formula,
    pipedream,
    simulate,
    validate,
    with_transfers,
    zero_bubble_h1,
    zero_bubble_v,
)
from braidax.parallel.stages.schedules.named.v_shape import _blocks  # pyright: ignore[reportPrivateUsage]
from braidax.parallel.stages.schedules.versions import given_up
from braidax.parallel.stages.searching import named
from tests.support.parallel.stages.pipelines import FLUSHED, NAMED


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(NAMED)), st.integers(1, 8), st.integers(1, 32))
def test_every_schedule_is_valid_and_keeps_to_its_formula(name: str, num_devices: int, num_microbatches: int) -> None:
    schedule = NAMED[name](num_devices, min(num_microbatches, 8) if name == "2BW" else num_microbatches)
    validate(schedule)
    assert schedule.name == name
    simulation = simulate(schedule, Costs.even(schedule.num_stages))
    for device in range(num_devices):
        assert simulation.peak_live(device) <= peak_formula(schedule, device)


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(sorted(NAMED)), st.integers(2, 8), st.integers(1, 12), st.integers(0, 2**32))
def test_transfers_meet_whatever_the_times_are(name: str, num_devices: int, num_microbatches: int, seed: int) -> None:
    schedule = with_transfers(NAMED[name](num_devices, min(num_microbatches, 2) if name == "2BW" else num_microbatches))
    validate(schedule)
    values = tuple((seed >> shift) % 7 / 2 for shift in range(schedule.num_stages))  # zero among them
    costs = Costs(values, values[::-1], values, values[1:], (1,) * schedule.num_stages)
    blocked, beside = simulate(schedule, costs, blocking=True), simulate(schedule, costs)
    assert blocked.makespan_seconds >= beside.makespan_seconds - 1e-9


@pytest.mark.parametrize(
    ("name", "num_devices", "num_microbatches", "bubble"),
    [
        ("GPipe", 4, 8, 3 * 3),  # (p - 1)(F + B + W)
        ("1F1B", 4, 8, 3 * 3),
        ("1F1B", 8, 32, 7 * 3),
        ("Eager1F1B", 4, 8, 3 * 2),  # (p - 1)(F + B): the last gradients of weights wait
        ("Eager1F1B", 8, 32, 7 * 2),
        ("Interleaved1F1B", 4, 8, 3 * 3),  # the same in stages half as long
        ("Interleaved1F1B", 8, 32, 7 * 3),
        ("ZB-H1", 4, 8, 3),  # (p - 1)(F + B - W)
        ("ZB-H1", 8, 32, 7),
        ("ZB-V", 4, 8, 3),  # none, but the last device begins late
        ("ZB-V", 8, 32, 7),
        ("V-Half", 4, 8, 5),  # as long as those of the authors' code
        ("V-Half", 8, 32, 17),
        ("V-Min", 4, 8, 12),
        ("V-Min", 8, 32, 23),
        ("DualPipeV", 4, 8, 3),
        ("DualPipeV", 8, 32, 7),
    ],
)
def test_the_step_is_as_long_as_the_paper_says(name: str, num_devices: int, num_microbatches: int, bubble: int) -> None:
    schedule = FLUSHED[name](num_devices, num_microbatches)
    chunks = schedule.num_stages // num_devices
    simulation = simulate(schedule, Costs.even(schedule.num_stages))
    assert simulation.makespan_seconds - 3 * chunks * num_microbatches == bubble


@pytest.mark.parametrize("num_devices", [2, 3, 4, 8])
def test_no_device_of_zb_v_stands_still_once_it_has_begun(num_devices: int) -> None:
    simulation = simulate(zero_bubble_v(num_devices, 2 * num_devices), Costs.even(2 * num_devices))
    assert simulation.period_seconds <= 12 * num_devices + (num_devices > 4)


@pytest.mark.parametrize(("name", "bubble"), [("V-Half", 3.0), ("V-Min", 4.0)])
def test_bubbles_of_v_shapes_are_at_most_those_of_the_paper(name: str, bubble: float) -> None:
    for num_devices in range(2, 9):  # p/2 and 2p/3 microbatches of six units
        simulation = simulate(FLUSHED[name](num_devices, 2 * num_devices), Costs.even(2 * num_devices))
        assert simulation.period_seconds - 12 * num_devices <= bubble * num_devices


def test_every_number_of_devices_has_a_building_block() -> None:
    for num_devices in range(1, 65):
        for steps in ((4, 2), (2, 1), (1, 1)):
            assert next(_blocks(num_devices, steps))


def test_lists_are_those_of_the_papers() -> None:
    assert [" ".join(map(str, each)) for each in NAMED["1F1B"](2, 3).lists] == [
        "0F0 0F1 0B0 0F2 0B1 0B2 0U0",
        "1F0 1B0 1F1 1B1 1F2 1B2 1U0",
    ]
    assert [" ".join(map(str, each)) for each in NAMED["Eager1F1B"](2, 4).lists] == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3 0U0",
        "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1I3 1W3 1U0",
    ]
    assert " ".join(map(str, NAMED["ZB-H1"](2, 3).lists[1])) == "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2 1U0"
    assert " ".join(map(str, dual_pipe_v(1, 2).lists[0])) == "0F0 1F0 0F1 1B0 1F1 0B0 1B1 0I1 0W1 0U0 1U0"
    assert " ".join(map(str, pipedream(2, 2).lists[0])) == "0F0 0F1 0B0 0U0 0B1 0U1"
    assert interleaved(2, 4, 1).lists == NAMED["1F1B"](2, 4).lists


@pytest.mark.parametrize("name", sorted(FLUSHED))
def test_a_pipeline_takes_each_by_its_name(name: str) -> None:
    assert Pipeline(name).scheduled(2, 8).lists == FLUSHED[name](2, 8).lists
    if FLUSHED[name](2, 8).num_stages == 2:
        assert Pipeline(name, stages=(1, 2)).places(3) == (2,)  # one that several devices have


def test_a_search_begins_with_all_that_flush() -> None:
    assert {one.name for one in named(2, 8)} == FLUSHED.keys()


def test_asynchronous_ones_state_their_staleness() -> None:
    stashed, vertical, double = (
        validate(NAMED[name](4, 8)) for name in ("PipeDream", "PipeDream, vertical sync", "2BW")
    )
    assert (stashed.staleness, stashed.num_kept) == ((3, 2, 1, 0), (4, 3, 2, 1))
    assert stashed.used[1] == (0, 0, 0, 1, 2, 3, 4, 5)
    assert (vertical.staleness, vertical.num_kept) == ((3, 3, 3, 3), (4, 4, 4, 4))
    assert vertical.used == ((0, 0, 0, 0, 1, 2, 3, 4),) * 4
    assert (double.staleness, double.num_kept) == ((1, 1, 1, 1), (2, 2, 2, 2))
    assert double.used[0][:12] == (0,) * 8 + (1,) * 4
    gone = given_up(NAMED["PipeDream"](2, 3), ((0, 0, 1), (0, 1, 2)))
    assert {str(one): found for one, found in gone.items()} == {
        "0B1": (0,), "0B2": (1,), "0U2": (2,), "1U0": (0,), "1U1": (1,), "1U2": (2,),
    }  # fmt: skip
    assert str(double) == (
        "gradients are applied late, by up to so many updates: 1 on stage 0, 1 on stage 1, 1 on stage 2, 1 on stage 3"
    )
    assert str(validate(gpipe(2, 2))) == "every gradient is applied to the weights it was computed with"


def test_counts_that_cannot_work_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"^num_devices=0 must be at least 1$"):
        gpipe(0, 4)
    with pytest.raises(ArgumentError, match=r"^num_microbatches=7 is no multiple of num_devices=5, which interleaved"):
        interleaved(5, 7)
    with pytest.raises(ArgumentError, match=r"^num_microbatches=7 is too few for DualPipeV on num_devices=4: it needs"):
        dual_pipe_v(4, 7)
    with pytest.raises(ArgumentError, match=r"^microbatches_per_update=2 is below num_devices=4: two versions"):
        double_buffered(4, 8, 2)
    with pytest.raises(ArgumentError, match=r"^microbatches_per_update=4 does not divide num_microbatches=6$"):
        double_buffered(4, 6)
    searched = gpipe(2, 2).with_lists(gpipe(2, 2).lists)
    assert peak_formula(searched, 1) == 2
    assert {x.kind for x in searched.operations()} == {Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE}


@pytest.mark.parametrize("kept", [3, 10, 14])
def test_zero_bubble_h1_holds_what_its_paper_says_of_activations_and_of_what_weights_need(kept: int) -> None:
    """On device i of p, from 1: (p - i + 1) M_B + (i - 1) M_W before an `I`, and behind it one M_W for an M_B."""
    costs = replace(Costs.even(4, activation=10), kept_bytes=(kept,) * 4)
    simulation = simulate(zero_bubble_h1(4, 8), costs)
    for device in range(4):
        before = (4 - device) * 10 + device * kept
        assert simulation.peak_bytes(device) == before + max(kept - 10, 0)
        assert max(live.microbatches for live in simulation.curve(device)) == 4
