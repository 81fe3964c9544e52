"""The permutation: every index once, in O(1) memory, and never another order in another version."""

import itertools
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from braidax.data.sampling import permutation
from braidax.data.sampling.permutation import Permutation, compiled
from braidax.errors import ArgumentError

_SEEDS = st.integers(-(2**70), 2**70)
_CHUNK = 1 << 13


def order(num_samples: int, seed: int | None, epoch: int, positions: list[int] | None = None) -> list[int]:
    at = np.arange(num_samples) if positions is None else np.array(positions, np.int64)
    return Permutation(num_samples, seed=seed, epoch=epoch)(at).tolist()


@pytest.fixture(params=["C", "NumPy"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to compute an order."""
    if request.param == "NumPy":
        monkeypatch.setattr(permutation, "compiled", lambda: None)


@given(num_samples=st.integers(0, 3000), seed=_SEEDS, epoch=st.integers(0, 10**6))
@example(num_samples=1, seed=0, epoch=0)
@example(num_samples=2, seed=0, epoch=0)
@example(num_samples=1600, seed=0, epoch=0)
@example(num_samples=1601, seed=0, epoch=0)
def test_every_sample_comes_once(num_samples: int, seed: int, epoch: int) -> None:
    assert sorted(order(num_samples, seed, epoch)) == list(range(num_samples))


@pytest.mark.parametrize("num_samples", [4, 5, 6, 7, 8, 9, 10, 12, 16, 25, 26])
def test_every_sample_comes_once_for_many_seeds(num_samples: int) -> None:
    assert all(sorted(order(num_samples, seed, 0)) == list(range(num_samples)) for seed in range(200))


@given(num_samples=st.integers(10**6, 2**62), seed=_SEEDS, start=st.floats(0, 1))
@example(num_samples=2**62, seed=0, start=1.0)
@example(num_samples=2**62 - 1, seed=0, start=0.0)
def test_big_orders_stay_in_range_and_do_not_repeat(num_samples: int, seed: int, start: float) -> None:
    first = min(int(start * num_samples), num_samples - 2000)
    got = Permutation(num_samples, seed=seed, epoch=0)(first + np.arange(2000))
    assert got.dtype == np.int64
    assert got.min() >= 0
    assert got.max() < num_samples
    assert len(np.unique(got)) == 2000


@pytest.mark.parametrize(
    ("num_samples", "seed", "epoch", "expected"),
    [
        (2, 0, 0, [0, 1]),
        (3, 0, 0, [0, 2, 1]),
        (10, 0, 0, [0, 8, 9, 4, 6, 1, 7, 2, 5, 3]),
        (10, 0, 1, [7, 3, 8, 2, 6, 1, 4, 0, 9, 5]),
        (10, 1, 0, [0, 2, 6, 9, 3, 8, 1, 5, 7, 4]),
        (17, -5, 3, [12, 8, 7, 10, 15, 11, 16, 13, 9, 3, 1, 14, 6, 4, 2, 0, 5]),
        (16, 2**70, 2, [1, 4, 3, 0, 8, 6, 2, 13, 14, 7, 12, 5, 9, 15, 10, 11]),
    ],
)
@pytest.mark.usefixtures("way")
def test_orders_never_change(num_samples: int, seed: int, epoch: int, expected: list[int]) -> None:
    assert order(num_samples, seed, epoch) == expected


@pytest.mark.parametrize(
    ("num_samples", "seed", "epoch", "expected"),
    [
        (50_000, 0, 0, [10643, 35410, 47003, 44269, 10594]),
        (1_281_167, 42, 7, [1103698, 1071268, 634031, 658649, 1033484]),
        (10**9, 0, 1, [725565981, 191477967, 546875639, 391811283, 788976894]),
        (
            2**62,
            1,
            0,
            [
                914532872129841091,
                980442260805580862,
                1701028835148594035,
                2432091689887366037,
                3077061962313306588,
            ],
        ),
    ],
)
@pytest.mark.usefixtures("way")
def test_big_orders_never_change(num_samples: int, seed: int, epoch: int, expected: list[int]) -> None:
    assert order(num_samples, seed, epoch, [0, 1, 2, num_samples // 2, num_samples - 1]) == expected


@given(num_samples=st.one_of(st.integers(2, 100), st.integers(2, 2**62)), seed=_SEEDS, data=st.data())
@example(num_samples=2**62, seed=0, data=None)
def test_all_ways_compute_the_same(num_samples: int, seed: int, data: st.DataObject | None) -> None:
    quick = compiled()
    assert quick is not None
    drawn = range(0, num_samples, num_samples // 40 + 1)
    positions = np.array([*drawn] if data is None else data.draw(st.lists(st.integers(0, num_samples - 1))), np.int64)
    made = Permutation(num_samples, seed=seed, epoch=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(permutation, "compiled", lambda: None)
        expected = made(positions)
    for instructions in ("of any processor", "of this one"):
        found = positions.copy()
        quick.permute(found, made._keys, made._a, made._b, num_samples, instructions == "of any processor")
        np.testing.assert_array_equal(found, expected)


def test_what_does_not_fit_is_refused_by_c() -> None:
    quick, keys = compiled(), np.zeros(10, np.uint64)
    assert quick is not None
    for positions, some_keys, a, b, num_samples in [
        (np.array([10]), keys, 4, 3, 10),
        (np.array([-1]), keys, 4, 3, 10),
        (np.array([0]), keys[:9], 4, 3, 10),
        (np.array([0]), keys, 4, 0, 10),
        (np.array([0]), keys, 3, 3, 10),
        (np.array([0]), keys, 2**32, 3, 10),
        (np.zeros(9, np.uint8)[:9], keys, 4, 3, 10),
    ]:
        before = positions.copy()
        with pytest.raises(ValueError, match="expected positions below num_samples, ten keys, and num_samples <="):
            quick.permute(positions, some_keys, a, b, num_samples, False)
        np.testing.assert_array_equal(positions, before)


def test_seed_and_epoch_are_not_added() -> None:
    assert order(1000, 3, 5) != order(1000, 5, 3)
    assert order(1000, 0, 1) != order(1000, 1, 0)
    assert order(1000, 1, 11) != order(1000, 11, 1)
    assert len({tuple(order(50, seed, epoch)) for seed in range(10) for epoch in range(10)}) == 100


@given(num_samples=st.integers(1, 3000), epoch=st.integers(0, 5))
def test_no_seed_is_the_order_of_the_source(num_samples: int, epoch: int) -> None:
    assert order(num_samples, None, epoch) == list(range(num_samples))


@given(num_samples=st.integers(_CHUNK - 2, 3 * _CHUNK + 2), borders=st.lists(st.floats(0, 1), max_size=5), seed=_SEEDS)
@example(num_samples=_CHUNK, borders=[0.5], seed=0)
@example(num_samples=_CHUNK + 1, borders=[], seed=0)
def test_an_order_is_the_same_in_any_pieces(num_samples: int, borders: list[float], seed: int) -> None:
    permutation = Permutation(num_samples, seed=seed, epoch=0)
    edges = [0, *sorted(int(border * num_samples) for border in borders), num_samples]
    pieces = [permutation(np.arange(start, stop)) for start, stop in itertools.pairwise(edges)]
    whole = permutation(np.arange(num_samples))
    np.testing.assert_array_equal(np.concatenate(pieces), whole)
    np.testing.assert_array_equal(np.sort(whole), np.arange(num_samples))
    backwards = permutation(np.arange(num_samples)[::-1])
    np.testing.assert_array_equal(backwards[::-1], whole)


@pytest.mark.parametrize("vary", ["seed", "epoch"])
def test_all_orders_of_few_samples_are_equally_likely(vary: str) -> None:
    runs = 2400
    counts = Counter(tuple(order(4, number, 0) if vary == "seed" else order(4, 0, number)) for number in range(runs))
    expected = runs / 24
    chi_square = sum((counts[each] - expected) ** 2 / expected for each in itertools.permutations(range(4)))
    assert chi_square < 58  # 23 degrees of freedom: a fair shuffle exceeds this once in 10,000 times


def test_where_a_sample_lands_is_equally_likely_everywhere() -> None:
    landed = np.array([order(1000, seed, 0, [0, 1, 500, 999]) for seed in range(1000)])
    for column in landed.T:
        tenths = np.bincount(column // 100, minlength=10)
        assert ((tenths - 100) ** 2 / 100).sum() < 34  # 9 degrees of freedom: once in 10,000 times
    follows = np.mean(landed[:, 1] == landed[:, 0] + 1)
    assert follows < 0.01  # neighbors do not stay neighbors


def test_memory_does_not_grow_with_the_number_of_samples() -> None:
    positions = np.arange(200_000)
    peaks: list[int] = []
    for num_samples in (200_000, 10**7, 2**62):
        tracemalloc.start()
        Permutation(num_samples, seed=0, epoch=0)(positions)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert max(peaks) < 2 * positions.nbytes + 12 * 8 * _CHUNK
    assert max(peaks) < 1.5 * min(peaks)


def test_positions_are_left_alone() -> None:
    positions = np.arange(20)
    for seed in (0, None):
        result = Permutation(20, seed=seed, epoch=0)(positions)
        result[:] = -1
        np.testing.assert_array_equal(positions, np.arange(20))


def test_no_position_is_no_sample() -> None:
    assert order(0, 0, 0) == []
    assert order(10, 0, 0, []) == []


@pytest.mark.parametrize("num_samples", [-1, 2**62 + 1])
def test_a_number_of_samples_out_of_range_is_refused(num_samples: int) -> None:
    with pytest.raises(ArgumentError, match=rf"num_samples={num_samples} is not between 0 and 2\*\*62"):
        Permutation(num_samples, seed=0, epoch=0)


@pytest.mark.parametrize("seed", [0, None])
@pytest.mark.parametrize("positions", [[-1], [10], [3, 12, 4], [0, -7]])
def test_a_position_out_of_range_is_refused(positions: list[int], seed: int | None) -> None:
    with pytest.raises(
        ArgumentError, match=rf"positions must lie in range\(10\), got {min(positions)}\.\.{max(positions)}"
    ):
        order(10, seed, 0, positions)
