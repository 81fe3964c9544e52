"""Depth: more in flight when the consumer waits and the cores have time, if it helps; less when nothing waits."""

import pytest

from braidax.data import DataLoader
from braidax.data.fetching.depth import Bounds, Depth
from braidax.errors import ArgumentError
from tests.support.data.numbered import Numbers

BOUNDS = Bounds(min_threads=2, max_threads=20, min_prefetch=1, max_prefetch=6)


def numbers(depth: Depth) -> tuple[int, int]:
    return depth.threads, depth.prefetch


def test_it_begins_at_the_lower_bounds() -> None:
    assert numbers(Depth(BOUNDS)) == (2, 1)


def test_more_small_batches_are_in_flight_at_first() -> None:
    sizes = (1, 24, 32, 63, 64, 1000)
    assert [Depth(BOUNDS, batch_size=size).prefetch for size in sizes] == [6, 5, 4, 2, 2, 1]
    assert [Depth(batch_size=size).prefetch for size in sizes] == [8, 5, 4, 2, 2, 2]
    assert DataLoader(Numbers(64), batch_size=32).depth.prefetch == 4


def test_it_grows_while_that_helps_up_to_the_upper_bounds() -> None:
    depth, seen = Depth(BOUNDS), list[tuple[int, int]]()
    for period in range(8):
        depth.decide(rate=2.0**period, stall=0.5, busy=0.1)
        seen.append(numbers(depth))
    assert seen == [(3, 3), (4, 5), (6, 6), (9, 6), (13, 6), (19, 6), (20, 6), (20, 6)]


def test_what_does_not_help_is_taken_back_and_not_tried_again_soon() -> None:
    depth = Depth(BOUNDS)
    depth.decide(rate=10.0, stall=0.5, busy=0.1)
    assert numbers(depth) == (3, 3)
    depth.decide(rate=10.2, stall=0.5, busy=0.1)
    assert numbers(depth) == (2, 1)
    for _ in range(15):
        depth.decide(rate=10.0, stall=0.5, busy=0.1)
        assert numbers(depth) == (2, 1)
    depth.decide(rate=10.0, stall=0.5, busy=0.1)
    assert numbers(depth) == (3, 3)


def test_cores_that_are_busy_get_no_more_threads() -> None:
    depth = Depth(BOUNDS)
    depth.decide(rate=10.0, stall=0.9, busy=0.95)
    assert numbers(depth) == (2, 1)


def test_a_small_stall_changes_nothing() -> None:
    depth = Depth(BOUNDS)
    for _ in range(100):
        depth.decide(rate=10.0, stall=0.01, busy=0.1)
    assert numbers(depth) == (2, 1)


def test_it_shrinks_slowly_when_nothing_waits() -> None:
    depth = Depth(BOUNDS)
    depth.threads, depth.prefetch = 5, 4
    seen = list[tuple[int, int]]()
    for _ in range(6 * 16):
        depth.decide(rate=10.0, stall=0.0, busy=0.3)
        seen.append(numbers(depth))
    assert seen[14:17] == [(5, 4), (4, 3), (4, 3)]
    assert seen[-1] == (2, 1)


def test_paused_it_leaves_everything_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    depth = Depth(BOUNDS)
    monkeypatch.setattr("braidax.data.fetching.depth._PERIOD_SECONDS", 0.0)
    monkeypatch.setattr("braidax.data.fetching.depth._BUSY", 2.0)
    depth.paused = True
    for _ in range(40):
        depth.saw(wait_seconds=10.0)
    assert numbers(depth) == (2, 1)
    depth.paused = False
    depth.saw(wait_seconds=10.0)
    assert numbers(depth) == (3, 3)


@pytest.mark.parametrize(
    ("bounds", "fact"),
    [
        ({"min_threads": 0}, "min_threads=0, max_threads=32"),
        ({"min_threads": 4, "max_threads": 3}, "min_threads=4, max_threads=3"),
        ({"min_prefetch": 0}, "min_prefetch=0, max_prefetch=8"),
        ({"min_prefetch": 9}, "min_prefetch=9, max_prefetch=8"),
    ],
)
def test_bounds_that_cannot_work(bounds: dict[str, int], fact: str) -> None:
    with pytest.raises(ArgumentError, match=f"{fact}: expected 1 <= min <= max"):
        Bounds(**bounds)


def test_numbers_that_are_set_are_checked() -> None:
    depth = Depth()
    for name in ("threads", "prefetch"):
        with pytest.raises(ArgumentError, match=f"{name}=0 is not a positive integer"):
            setattr(depth, name, 0)
    depth.threads, depth.prefetch = 99, 33  # beyond its bounds, which are its own
    assert (depth.threads, depth.prefetch) == (99, 33)
