"""`Adaptive` on loops whose clock is simulated."""

import random
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest

from braidax.checkpoint.interval.adaptive import Adaptive, choose
from braidax.checkpoint.interval.adaptive_cost import Estimate
from braidax.checkpoint.interval.spacing import Interval, Spacing
from braidax.errors import ArgumentError


class Loop:
    """A training loop and its checkpoints: what they cost is known, `spacing` has to find it out."""

    def __init__(
        self,
        interval: Interval,
        *,
        step: float = 0.1,
        stall: float = 0.1,
        slower: float = 0.1,
        persist: float = 1.0,
        noise: float = 0.2,
        stalls: Iterable[int] = (1,),
        synced: int = 1,
        seed: int = 0,
    ) -> None:
        self.step, self.stall, self.slower, self.persist, self.noise = step, stall, slower, persist, noise
        self.stalls, self.synced = list(stalls), synced
        self.now = self.alone = self.ahead = 0.0
        self.num_updates = 0
        self.checkpoints: list[int] = []
        self.durable_at: float | None = None
        self.random = random.Random(seed)
        self.spacing: Spacing = interval.start(0, clock=lambda: self.now)

    def run(self, num_updates: int) -> "Loop":
        for _ in range(num_updates):
            self.compute()
            self.update()
        return self

    def compute(self) -> None:
        seconds = self.step * max(0.1, 1 + self.noise * self.random.gauss(0, 1))
        self.alone += seconds
        if self.durable_at is not None:
            left = max(0.0, self.durable_at - self.now - self.ahead)
            seconds = min(seconds * (1 + self.slower), seconds + left * self.slower / (1 + self.slower))
        if self.num_updates == 0:
            seconds += 20 * self.step  # compiles
            self.alone += 20 * self.step
        self.num_updates += 1
        self.ahead += seconds
        self.now += seconds / 50  # to dispatch it
        self.ahead -= seconds / 50
        if self.num_updates % self.synced == 0:
            self.now, self.ahead = self.now + self.ahead, 0.0

    def update(self) -> None:
        if self.durable_at is not None and self.now >= self.durable_at:
            self.durable_at = None
            self.spacing.ended()
        if self.spacing.due(self.num_updates):
            assert self.durable_at is None, "a checkpoint began before the last one was durable"
            self.spacing.began()
            seconds = self.stall * self.stalls[len(self.checkpoints) % len(self.stalls)]
            self.checkpoints.append(self.num_updates)
            self.now += seconds
            self.durable_at = self.now + self.persist
            self.spacing.stalled(seconds)

    def since(self, mark: tuple[float, float, int, int]) -> tuple[float, float]:
        """Returns the overhead since then, and the distance between checkpoints that costs 3.5 %."""
        extra = (self.now + self.ahead - mark[0]) - (self.alone - mark[1])
        cost = extra / max(1, len(self.checkpoints) - mark[2])
        mean = (self.alone - mark[1]) / (self.num_updates - mark[3])
        return extra / (self.alone - mark[1]), cost / (0.035 * mean)

    def mark(self) -> tuple[float, float, int, int]:
        return self.now + self.ahead, self.alone, len(self.checkpoints), self.num_updates


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    "costs",
    [
        {"noise": 0.0},
        {},
        {"stall": 2.0, "slower": 0.0, "persist": 0.01},  # a copy that blocks
        {"stall": 0.0, "slower": 0.5, "persist": 3.0},  # writing that takes cores from the step
        {"stall": 0.02, "slower": 0.03, "persist": 3.0},  # as much as the budget allows all the time
        {"persist": 0.5, "stalls": (1, 1, 1, 4)},
        {"step": 0.001, "stall": 0.01, "persist": 0.05},
    ],
)
def test_the_budget_is_used_and_not_exceeded(costs: dict[str, Any], seed: int) -> None:
    loop = Loop(Adaptive(), seed=seed, **costs).run(6000)
    overhead, distance = loop.since((0.0, 0.0, 0, 0))
    assert overhead < 0.040
    assert loop.num_updates / len(loop.checkpoints) < 1.5 * max(distance, 30 if costs.get("persist") == 3.0 else 0)
    assert loop.spacing.verdict.cost_seconds == pytest.approx(distance * 0.035 * loop.step, rel=0.6)


@pytest.mark.parametrize("overhead", [0.01, 0.1])
def test_the_budget_is_the_users(overhead: float) -> None:
    loop = Loop(Adaptive(overhead)).run(6000)
    assert 0.8 * overhead < loop.since((0.0, 0.0, 0, 0))[0] < overhead + 0.005


@pytest.mark.parametrize("persist", [0.04, 3.0])
def test_what_costs_nothing_is_done_as_often_as_the_disk_allows(persist: float) -> None:
    loop = Loop(Adaptive(), stall=0.0001, slower=0.0, persist=persist).run(3000)
    updates_persisting = max(1.0, persist / loop.step)
    assert loop.num_updates / len(loop.checkpoints) < 1.3 * updates_persisting + 2
    assert loop.since((0.0, 0.0, 0, 0))[0] < 0.01


def test_the_first_checkpoint_is_early_and_there_is_one_until_it_is_measured() -> None:
    loop = Loop(Adaptive(), noise=0.0)
    assert str(loop.spacing.verdict) == "a checkpoint every 12 updates (probe)"
    loop.run(22)
    assert loop.checkpoints == [12]
    assert loop.spacing.verdict.bound == "probe"
    loop.run(12)
    # 0.1 s of stall, and a tenth of 1 s of slower steps: 0.19 s are 3.5 % of 54 steps.
    assert loop.spacing.verdict.cost_seconds == pytest.approx(0.19, abs=0.002)
    assert loop.spacing.num_updates == 55
    assert loop.run(60).checkpoints == [12, 67]
    assert str(loop.spacing.verdict) == (
        "a checkpoint every 55 updates (overhead): 3.5 % of the time, at most 6.88 s of work lost"
    )


@pytest.mark.parametrize(("what", "factor"), [("persist", 4), ("stall", 4), ("step", 4), ("step", 10)])
def test_it_moves_both_ways(what: str, factor: float) -> None:
    loop = Loop(Adaptive()).run(2000)
    for change in (factor, 1 / factor):
        before = loop.spacing.num_updates
        setattr(loop, what, getattr(loop, what) * change)
        loop.run(1500)
        mark = loop.mark()
        loop.run(2500)
        overhead, distance = loop.since(mark)
        assert overhead < 0.042
        assert (loop.spacing.num_updates > 1.5 * before) == (change > 1 if what != "step" else change < 1)
        distance = max(distance, loop.persist / loop.step)
        assert distance * 0.7 < loop.spacing.num_updates < distance * 2.0 + 4


def test_a_new_cost_is_believed_after_a_few_checkpoints() -> None:
    loop = Loop(Adaptive(), noise=0.0).run(2500)
    assert len(loop.checkpoints) > 40
    for stall, num_updates in ((0.7, 226), (0.1, 55)):
        loop.stall, before = stall, len(loop.checkpoints)
        while len(loop.checkpoints) < before + 5:
            loop.run(1)
        loop.run(20)
        assert loop.spacing.num_updates == pytest.approx(num_updates, abs=2)


def test_a_stall_of_many_steps_is_no_interruption() -> None:
    loop = Loop(Adaptive(), noise=0.0).run(1000)
    loop.stall = 6.0
    loop.run(8000)
    assert loop.spacing.verdict.cost_seconds == pytest.approx(6.09, rel=0.01)


def test_a_loop_that_waits_for_its_devices_now_and_then_keeps_the_budget() -> None:
    loop = Loop(Adaptive(), synced=10).run(6000)
    assert 0.002 < loop.since((0.0, 0.0, 0, 0))[0] < 0.040


def test_an_evaluation_counts_nowhere() -> None:
    loop = Loop(Adaptive(), noise=0.0).run(1000)
    before = loop.spacing.verdict
    for _ in range(5):
        loop.run(230)
        loop.now += 10.0
        loop.alone += 10.0
    assert loop.spacing.num_updates == pytest.approx(before.num_updates, abs=2)
    assert loop.spacing.verdict.step_seconds == pytest.approx(0.1)


def test_paused_it_measures_but_stays_and_what_is_set_holds_until_it_goes_on() -> None:
    loop = Loop(Adaptive(), noise=0.0).run(1000)
    spacing = loop.spacing
    assert (spacing.paused, spacing.num_updates) == (False, 55)
    spacing.paused = True
    spacing.num_updates = 20
    loop.stall = 0.5
    loop.run(1000)
    assert {after - before for before, after in pairwise(loop.checkpoints[-20:])} == {20}
    assert str(spacing.verdict).startswith("a checkpoint every 20 updates (set): ")
    spacing.paused = False
    loop.run(1000)
    assert spacing.verdict.bound == "overhead"
    assert spacing.num_updates == pytest.approx(0.59 / 0.0035, rel=0.02)
    with pytest.raises(ArgumentError, match="num_updates=0: expected a whole number >= 1"):
        spacing.num_updates = 0


def test_paused_from_the_start_it_takes_what_is_set() -> None:
    loop = Loop(Adaptive())
    loop.spacing.paused = True
    loop.spacing.num_updates = 30
    assert loop.run(100).checkpoints == [30, 60, 90]


def test_lost_work_goes_before_the_budget() -> None:
    loop = Loop(Adaptive(max_lost_seconds=4.0), noise=0.0).run(1000)
    verdict = loop.spacing.verdict
    assert (verdict.num_updates, verdict.bound) == (26, "lost work")
    assert verdict.conflict == "max_lost_seconds=4 asks for one every 26 updates, and overhead=0.035 for one every 55"
    assert str(verdict).endswith(f"at most {verdict.lost_seconds:.3g} s of work lost; {verdict.conflict}")
    lost = [0.1 * (after - before) + 0.19 + 1.1 for before, after in pairwise(loop.checkpoints[1:])]
    assert max(lost) <= 4.0 + 0.1


def test_lost_work_that_the_budget_allows_changes_nothing() -> None:
    loop = Loop(Adaptive(max_lost_seconds=60.0), noise=0.0).run(1000)
    assert loop.spacing.verdict == Loop(Adaptive(), noise=0.0).run(1000).spacing.verdict


def test_lost_work_hastens_the_first_checkpoint() -> None:
    assert Loop(Adaptive(max_lost_seconds=5.0), noise=0.0).run(12).checkpoints == [6]


def found(cost: float = 0.2, error: float = 0.0, persist: int = 10, *, has_calm: bool = True) -> Estimate:
    return Estimate(
        step_seconds=0.1,
        cost_seconds=cost,
        error_seconds=error,
        persist_seconds=persist * 0.1,
        persist_updates=persist,
        has_calm=has_calm,
    )


@pytest.mark.parametrize(
    ("options", "measured", "num_updates", "bound", "conflict"),
    [
        (Adaptive(0.05), found(), 40, "overhead", ""),
        (Adaptive(0.05), found(error=0.1), 60, "overhead", ""),
        (Adaptive(0.05), found(persist=50), 50, "persist", ""),
        (Adaptive(0.05), found(cost=-0.1), 10, "persist", ""),
        (Adaptive(0.05), found(cost=-0.1, has_calm=False), 18, "persist", ""),
        (Adaptive(0.05, mtbf_seconds=1000.0), found(), 200, "failures", ""),
        (Adaptive(0.05, mtbf_seconds=10.0), found(), 40, "overhead", ""),
        (Adaptive(0.05, max_lost_seconds=6.0), found(), 40, "overhead", ""),
        (Adaptive(0.05, max_lost_seconds=6.05, mtbf_seconds=1000.0), found(), 48, "lost work", ""),
        (
            Adaptive(0.05, max_lost_seconds=3.2),
            found(),
            20,
            "lost work",
            "asks for one every 20 updates, and overhead=",
        ),
        (
            Adaptive(0.05, max_lost_seconds=1.5),
            found(),
            10,
            "persist",
            "cannot be kept, because a checkpoint takes 1 s",
        ),
        (Adaptive(0.05, max_lost_seconds=0.1), found(persist=50), 50, "persist", "cannot be kept"),
    ],
)
def test_which_bound_binds(options: Adaptive, measured: Estimate, num_updates: int, bound: str, conflict: str) -> None:
    verdict = choose(options, measured)
    assert (verdict.num_updates, verdict.bound) == (num_updates, bound)
    assert (conflict in verdict.conflict) if conflict else not verdict.conflict


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"overhead": 0.0}, r"overhead=0\.0: expected a share > 0"),
        ({"overhead": float("nan")}, "overhead=nan: expected"),
        ({"max_lost_seconds": 0.0}, r"max_lost_seconds=0\.0: expected a finite number of seconds > 0, or None"),
        ({"mtbf_seconds": float("inf")}, "mtbf_seconds=inf: expected a finite"),
    ],
)
def test_options_that_cannot_work(options: dict[str, float], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Adaptive(**options)
