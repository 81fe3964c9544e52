"""How long a run waits for checkpoints in the background, by hand."""

import pytest

from braidax.spans import Span, Trace
from braidax.tune.study.design import Length
from braidax.tune.study.runner import saving_seconds


def record(trace: Trace, process: str, written: tuple[float, float]) -> None:
    """Records three steps, which end at 1, 3 and 5: devices are at work until 2, then from 3 on."""
    spans = [
        *(("step", f"step {number}", 2.0 * number - 2, 2.0 * number - 1) for number in (1, 2, 3)),
        ("devices", "gradients", 0.0, 2.0),
        ("devices", "gradients", 3.0, 5.0),
        ("loop", "snapshot stall", 1.5, 2.75),
        ("checkpoint", "persist", *written),
    ]
    for lane, name, start, end in spans:
        trace.record(Span(lane, name, "thread", start, end - start, 0, process))


@pytest.mark.parametrize(
    ("written", "saved", "waited"),
    [
        ((0.0, 2.5), 0.75, 0.25),  # in two steps from 1 to 5: until 2.5, and waited for from 2 on
        ((2.25, 9.0), 1.375, 0.25),  # waited for until 2.75
        ((0.0, 2.0), 0.5, 0.0),  # devices were at work
        ((3.0, 9.0), 1.0, 0.0),  # nobody waited
    ],
)
def test_waits_are_those_for_what_is_written_while_devices_have_nothing(
    written: tuple[float, float], saved: float, waited: float
) -> None:
    trace = Trace()
    record(trace, "", written)
    assert saving_seconds(trace, Length(1, 2)) == pytest.approx((saved, waited))
    assert saving_seconds(trace, Length(2, 1))[1] == 0.0  # before the steps that count


def test_all_processes_wait_for_the_slowest() -> None:
    trace = Trace()
    record(trace, "", (0.0, 2.25))
    record(trace, "rank 1", (0.0, 2.75))
    assert saving_seconds(trace, Length(1, 2)) == pytest.approx((0.875, 0.375))
