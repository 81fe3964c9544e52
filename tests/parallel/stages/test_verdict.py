"""Whether a pipeline pays, by figures of one's own."""

from dataclasses import replace
from typing import Any

import pytest

import braidax.parallel as bx
from braidax.parallel.plan.planned.verdict import Alternative
from braidax.parallel.stages.schedules import Costs, one_forward_one_backward, simulate
from braidax.parallel.stages.verdict import Compared, Devices, WholeLoss

MB = 1_000_000


def costs(devices: Devices, forward: float, sent: float) -> Costs:
    seconds, back = (forward, forward), (1e-3, 1e-3)
    return Costs(seconds, back, back, (devices.between.seconds(sent),), (100_000, 100_000))


def compared(
    *, rate: float = 1e9, hidden: float = 1.0, memory: int | None = None, share: float | None = None, inner: int = 1
) -> Compared:
    """Two stages of 1 MB of parameters each, 8 microbatches of 6 ms; 10 kB go over, a microbatch leaves 200 kB."""
    link = bx.Link(rate, hidden=hidden)
    return Compared(
        one_forward_one_backward(2, 8), lambda devices: costs(devices, 1e-3, 10_000), (1, 1), (4 * MB, 4 * MB),
        WholeLoss(6e-3 * inner, share, 200_000 * inner, 2 * MB, 4, MB // 2, 4.0),
        Devices(2, inner, link, link, bx.Link(1e9), memory), 64, lambda count: one_forward_one_backward(count, 8),
    )  # fmt: skip


def test_what_each_way_takes() -> None:
    verdict = compared(memory=100 * MB).verdict()
    assert verdict.pipeline.seconds == pytest.approx(simulate(one_forward_one_backward(2, 8), Costs(
        (1e-3, 1e-3), (1e-3, 1e-3), (1e-3, 1e-3), (1e-5,), (1, 1))).makespan_seconds)  # fmt: skip
    assert verdict.pipeline.seconds == pytest.approx(27e-3, rel=1e-2)  # 8 microbatches of 3 ms, and 3 ms to fill
    assert verdict.pipeline.bytes == 4 * MB + 2 * 100_000
    replicated, sharded = verdict.others
    assert replicated == Alternative("data parallel", 24e-3, 8 * MB + 4 * 200_000, 1)  # the all-reduce is hidden
    assert sharded == Alternative("fully sharded", 24e-3, 4 * MB + MB + 4 * 200_000, 1)
    assert verdict.best_other == replicated
    assert not verdict.wins
    assert verdict.is_room_known


def test_what_is_sent_counts_where_nothing_hides_it() -> None:
    """Of 2 MB a device sends half, twice for an all-reduce, and thrice where weights are gathered."""
    replicated, sharded = compared(hidden=0.0, memory=100 * MB).verdict().others
    assert replicated.seconds == pytest.approx(24e-3 + 2e-3)
    assert sharded.seconds == pytest.approx(24e-3 + 3e-3)


def test_in_the_memory_of_the_pipeline_a_device_computes_piece_by_piece() -> None:
    verdict = compared().verdict()
    assert verdict.room_bytes == verdict.pipeline.bytes == 4 * MB + 200_000
    assert [one.fits for one in verdict.others] == [False, False]
    assert [one.microbatches for one in verdict.others] == [4, 4]
    assert verdict.others[1].bytes == 4 * MB + MB + 200_000
    assert (verdict.wins, verdict.best_other, verdict.turns_at_devices) == (True, None, None)
    assert str(verdict).startswith("pipeline: nothing else fits in the 4.2 MB that the pipeline takes of a device. pip")
    known = compared(memory=5_300_000, hidden=0.0).verdict()
    assert [(one.fits, one.microbatches) for one in known.others] == [(False, 4), (True, 4)]
    assert known.best_other is not None
    assert known.best_other.seconds == pytest.approx(24e-3 + 4 * 3e-3)  # each piece gathers anew
    assert known.wins


def test_the_whole_loss_that_was_measured_counts() -> None:
    fast, slow = (compared(memory=100 * MB, share=share).verdict() for share in (12e-3, 48e-3))
    assert fast.others[0].seconds == pytest.approx(12e-3)
    assert slow.others[0].seconds == pytest.approx(24e-3)  # piece by piece it takes less
    assert slow.others[0].microbatches == 4


@pytest.mark.parametrize(("rate", "wins"), [(1e9, False), (1e7, True)])
def test_it_turns_at_the_link_at_which_both_take_the_same(rate: float, wins: bool) -> None:
    figures = compared(rate=rate, memory=100 * MB)
    verdict = figures.verdict()
    assert verdict.wins == wins
    turn = verdict.turns_at_bytes_per_second
    assert turn is not None
    assert (turn > rate) == wins  # a slower link turns to the pipeline, a faster one from it
    sides = [compared(rate=turn * factor, memory=100 * MB).verdict() for factor in (0.999, 1.001)]
    assert [one.wins for one in sides] == [True, False]
    for one in sides:
        assert one.best_other is not None
        assert one.pipeline.seconds == pytest.approx(one.best_other.seconds, rel=1e-2)
        assert one.turns_at_bytes_per_second == pytest.approx(turn, rel=1e-3)
    assert ("the pipeline" if not wins else "data parallel") in str(verdict).partition("It would turn to ")[2]


def test_it_turns_on_other_numbers_of_devices() -> None:
    """With an all-reduce that is hidden a pipeline never wins but where there are more devices than samples."""
    figures = compared(memory=100 * MB)
    others = ["data parallel", "fully sharded"]
    assert [figures.wins_on(count, others) for count in (2, 4, 64)] == [False, False, False]
    few = replace(figures, num_samples=16)
    assert few.verdict().turns_at_devices == 24
    assert [few.wins_on(count, others) for count in (16, 24)] == [False, True]
    assert "on 24 devices in place of 2 along the axis" in str(few.verdict())
    assert replace(figures, on=lambda count: None).verdict().turns_at_devices is None


def test_devices_of_stages_count_for_both() -> None:
    """Two devices a stage: figures of a device are the same, and what is sent among these comes on top."""
    one, two = compared(memory=100 * MB).verdict(), compared(memory=100 * MB, inner=2).verdict()
    assert two.pipeline == one.pipeline  # costs are of one device already
    assert two.others[0].seconds == pytest.approx(one.others[0].seconds)
    assert two.others[0].bytes == one.others[0].bytes
    assert two.others[1].bytes == one.others[1].bytes - 2 * MB  # divided among four


def test_no_link_turns_what_never_pays() -> None:
    figures: Any = compared(memory=100 * MB)
    slow = replace(figures, costs=lambda devices: costs(devices, 1.0, 1e12))
    verdict = slow.verdict()
    assert verdict.turns_at_bytes_per_second is None
    assert str(verdict).endswith(
        "It would turn with no other link, and on no other number of devices that was looked at."
    )
