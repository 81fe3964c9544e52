import pytest

from braidax.checkpoint.interval.adaptive import Adaptive
from braidax.checkpoint.interval.spacing import Every, Interval, Spacing, Verdict
from braidax.errors import ArgumentError


def test_every_is_due_at_its_multiples() -> None:
    assert [n for n in range(1, 10) if Every(3).due(n)] == [3, 6, 9]
    assert all(Every(1).due(n) for n in range(1, 5))


@pytest.mark.parametrize("num_updates", [0, -1])
def test_every_refuses_what_is_never_due(num_updates: int) -> None:
    with pytest.raises(ArgumentError, match=rf"num_updates={num_updates}: expected a whole number >= 1"):
        Every(num_updates)


def test_a_run_is_spaced_at_multiples_wherever_it_begins_and_whatever_happens() -> None:
    spacing = Every(3).start(4)
    due: list[int] = []
    for n in range(5, 14):
        spacing.ended()
        if spacing.due(n):
            due.append(n)
            spacing.began()
            spacing.stalled(10.0)
    assert due == [6, 9, 12]
    assert str(spacing.verdict) == "a checkpoint every 3 updates (set)"


def test_the_distance_can_be_set() -> None:
    spacing = Every(3).start(0)
    spacing.num_updates = 4
    spacing.paused = True
    assert [n for n in range(1, 10) if spacing.due(n)] == [4, 8]
    assert (spacing.num_updates, spacing.paused, spacing.verdict.num_updates) == (4, True, 4)
    with pytest.raises(ArgumentError, match="num_updates=0: expected a whole number >= 1"):
        spacing.num_updates = 0


@pytest.mark.parametrize("interval", [Every(2), Adaptive()])
def test_both_kinds_fit_the_contract(interval: Interval) -> None:
    assert isinstance(interval, Interval)
    assert isinstance(interval.start(0), Spacing)


def test_a_verdict_tells_what_its_distance_means() -> None:
    verdict = Verdict(40, "overhead", step_seconds=0.1, cost_seconds=0.2, persist_seconds=1.0)
    assert verdict.overhead == pytest.approx(0.05)
    assert verdict.lost_seconds == pytest.approx(5.2)
    assert str(verdict) == "a checkpoint every 40 updates (overhead): 5.0 % of the time, at most 5.2 s of work lost"
    assert Verdict(12, "probe").overhead == 0.0
    assert verdict.set_to(80).overhead == pytest.approx(0.025)
