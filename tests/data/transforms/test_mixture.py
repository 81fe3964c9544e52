"""Mixtures: proportions that hold at every sample, every sample as often as the next, and the same after a restart."""

import itertools
import math
import re
from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import braidax.data as sources
from braidax.data.loader import DataLoader
from braidax.data.source import Source, source_at
from braidax.data.transforms.mixture import _assignment, _shares, mix
from braidax.errors import ArgumentError, RecordError
from tests.support.data.varying import Varying, window


def numbers(start: int, count: int) -> Source:
    """Returns a source whose samples are `start`, `start + 1`, …"""
    return sources.open({"x": np.arange(start, start + count, dtype=np.int32)})


def drawn(source: Source, epoch: int = 0, seed: int | None = 0) -> list[int]:
    return window(source_at(source, seed, epoch), *range(len(source)))["x"].tolist()


# The schedule


@given(shares=st.lists(st.integers(1, 40), min_size=1, max_size=12))
@example(shares=[1, 1])
@example(shares=[1, 1000])
@example(shares=[1000, 1, 1, 1, 500])
@example(shares=[9, 9, 9, 9, 1])
@example(shares=[1] * 50)
def test_no_prefix_is_further_off_than_a_sample(shares: list[int]) -> None:
    chosen, period, spread = _assignment(shares), sum(shares), 2 * len(shares) - 2
    assert len(chosen) == period
    for number, share in enumerate(shares):
        # In whole numbers: |count - prefix * share / period| <= 1 - 1 / spread.
        off = np.abs(np.cumsum(chosen == number) * period - np.arange(1, period + 1) * share)
        assert off.max() * spread <= period * (spread - 1) or spread == 0
        assert off[-1] == 0


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ([1], [1]),
        ([2, 2.0], [1, 1]),
        ([0.7, 0.2, 0.1], [7, 2, 1]),
        ([1e300, 3e300], [1, 3]),
        ([1e-300, 3e-300], [1, 3]),
        ([1, 1_000_000], [1, 1_000_000]),
        ([np.float32(0.1), np.float64(0.4)], [1, 4]),
        ([1 / 3, 2 / 3], [1, 2]),
        ([1.0, math.pi], [15824, 49712]),
    ],
)
def test_weights_count_in_proportion(weights: list[float], shares: list[int]) -> None:
    assert _shares(weights, ["a", "b", "c"][: len(weights)]) == shares


@given(weights=st.lists(st.floats(0.1, 1e3), min_size=2, max_size=9))
def test_odd_weights_are_nearly_met(weights: list[float]) -> None:
    shares = _shares(weights, [str(number) for number in range(len(weights))])
    for weight, share in zip(weights, shares, strict=True):
        wanted = weight / math.fsum(weights)
        assert abs(share / sum(shares) - wanted) <= wanted / 16


# What is drawn


@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    weights=st.lists(st.integers(1, 5), min_size=4, max_size=4),
    length=st.integers(1, 40),
    seed=st.integers(0, 9),
)
def test_every_sample_is_seen_equally_often(sizes: list[int], weights: list[int], length: int, seed: int) -> None:
    parts = [numbers(100 * number, size) for number, size in enumerate(sizes)]
    mixture = mix(list(zip(parts, weights, strict=False)), length=length, seed=seed)
    seen: list[int] = []
    for epoch in range(8):
        seen += drawn(mixture, epoch)
        counts = Counter(seen)
        for number, (size, weight) in enumerate(zip(sizes, weights, strict=False)):
            own = [counts[100 * number + sample] for sample in range(size)]
            assert max(own) - min(own) <= 1
            assert abs(sum(own) - len(seen) * weight / sum(weights[: len(sizes)])) < 1


def test_a_pass_over_a_source_is_in_an_order_of_its_own() -> None:
    mixture = mix({numbers(0, 50): 1, numbers(100, 50): 1}, length=200)
    one = [number for number in drawn(mixture) if number < 100]
    two = [number - 100 for number in drawn(mixture) if number >= 100]
    passes = [one[:50], one[50:], two[:50], two[50:]]
    assert all(sorted(order) == list(range(50)) for order in passes)
    assert len({tuple(order) for order in [*passes, list(range(50))]}) == 5
    assert drawn(mixture) == drawn(mix({numbers(0, 50): 1, numbers(100, 50): 1}, length=200))
    assert drawn(mixture) != drawn(mix({numbers(0, 50): 1, numbers(100, 50): 1}, length=200, seed=1))


def test_an_epoch_goes_on_where_the_last_one_ended() -> None:
    short, long = (mix({numbers(0, 50): 1, numbers(100, 5): 2}, length=length) for length in (7, 70))
    assert [number for epoch in range(10) for number in drawn(short, epoch)] == drawn(long)
    assert drawn(short, 3, seed=None) == drawn(short, 3, seed=99)  # the loader's seed is the loader's


GOLDEN = [0, 10, 3, 1, 11, 2, 1, 12, 2]


def test_the_order_stays_the_same_in_later_versions() -> None:
    assert drawn(mix([(numbers(0, 4), 2), (numbers(10, 3), 1)], length=9)) == GOLDEN


def test_any_window_reads_the_same() -> None:
    mixture = mix([(numbers(0, 30), 0.6), (numbers(100, 7), 0.3), (numbers(200, 1), 0.1)])
    assert len(mixture) == 38
    serial = drawn(mixture, 2)
    moved = source_at(mixture, 0, 2)
    picks = np.random.default_rng(0).integers(0, 38, 100).tolist()
    assert window(moved, *picks)["x"].tolist() == [serial[pick] for pick in picks]
    assert [window(moved, pick)["x"].item() for pick in range(38)] == serial
    only = np.flatnonzero(np.array(serial) >= 200).tolist()[::-1]  # all of one source, in several of its passes
    assert window(moved, *only)["x"].tolist() == [200] * len(only)
    fast = mix([(numbers(0, 3), 1)], length=30)
    assert window(fast, *range(29, -1, -1))["x"].tolist() == drawn(fast)[::-1]
    assert window(moved)["x"].tolist() == []
    with pytest.raises(RecordError, match="mixture of source 0, source 1, source 2: there is no record 38"):
        window(moved, 38)


def test_far_epochs_are_as_near() -> None:
    mixture = mix([(numbers(0, 1000), 0.9999), (numbers(5000, 10), 0.0001)], length=10**12)
    moved = source_at(mixture, 0, 1000)
    got = window(moved, *range(10**11, 10**11 + 2000))["x"]
    assert ((got < 1000) | (got >= 5000)).all()
    assert (got < 1000).sum() >= 1998


def test_leaves_of_varying_size_and_trees() -> None:
    one = Varying({"text": ["a", "b"]})
    two = Varying({"text": ["c", "d", "e"]})
    got = window(mix([(one, 2), (two, 3)]), *range(5))
    assert Counter(got["text"]) == Counter("abcde")
    assert all(type(text) is str for text in got["text"])


def test_nested() -> None:
    inner = mix({numbers(0, 10): 1, numbers(100, 10): 3})
    outer = mix([(inner, 1), (numbers(200, 20), 1)], length=80)
    counts = Counter(number // 100 for epoch in range(4) for number in drawn(outer, epoch))
    assert counts == {0: 40, 1: 120, 2: 160}
    samples = Counter(number for epoch in range(4) for number in drawn(outer, epoch))
    assert {samples[number] for number in range(10)} == {4}


def test_what_describes_a_mixture() -> None:
    mixture = mix({numbers(0, 5): 1, numbers(0, 5): 4})
    assert mixture.describe() == {
        "format": "mixture of 2",
        "samples": "10",
        "source 0": "20 % of the samples; 5 of its own, seen 0.4 times in an epoch; arrays in memory",
        "source 1": "80 % of the samples; 5 of its own, seen 1.6 times in an epoch; arrays in memory",
    }


@pytest.mark.usefixtures("unchecked")
def test_only_sources_are_mixed() -> None:
    with pytest.raises(
        ArgumentError, match=re.escape("source 1 is 'a.npz'; expected a source: give braidax.open(...)")
    ):
        mix([(numbers(0, 3), 1), ("a.npz", 1)])  # pyright: ignore[reportArgumentType]


# Parts that are redrawn, and fetched ahead


class Augmented(Varying):
    """A source whose samples carry the seed and the epoch that they were drawn in."""

    place: tuple[int | None, int] = (-1, -1)

    @property
    def sample_spec(self) -> Any:
        return {"x": jax.ShapeDtypeStruct((3,), np.int32)}

    def read(self, indices: np.ndarray, out: Any) -> None:
        out["x"][:, 0] = indices
        out["x"][:, 1:] = self.place

    def at(self, seed: int | None, epoch: int) -> Source:
        moved = Augmented(self.values)
        moved.place = (seed, epoch)
        return moved


def test_a_sample_that_comes_again_is_drawn_anew() -> None:
    mixture = mix([(Augmented({"x": range(4)}), 1)], length=10)
    got = [window(source_at(mixture, 7, epoch), *range(10))["x"].tolist() for epoch in range(2)]
    rows = got[0] + got[1]
    assert [row[1:] for row in rows] == [[7, number // 4] for number in range(20)]
    assert all(sorted(row[0] for row in rows[turn : turn + 4]) == [0, 1, 2, 3] for turn in range(0, 20, 4))


def test_parts_are_told_what_comes() -> None:
    one, two = Varying({"x": [0] * 9}), Varying({"x": [0] * 9})
    mixture = mix([(one, 1), (two, 2)])
    moved: Any = source_at(mixture, 0, 1)
    moved.prepare(np.arange(18))
    expected = window(moved, *range(18))["id"].tolist()
    assert Counter(one.prepared) + Counter(two.prepared) == Counter(expected)
    assert len(one.prepared) == 6


# Under a loader


def ids(batch: Any) -> list[int]:
    return np.asarray(batch["x"]).tolist()


def test_every_cursor_resumes() -> None:
    mesh = jax.make_mesh((8,), ("data",))

    def loader() -> DataLoader:
        mixture = mix([(numbers(0, 37), 0.7), (numbers(100, 5), 0.3)], length=48)
        return DataLoader(mixture, mesh, P("data"), batch_size=8, seed=3, epochs=3)

    first = loader()
    cursors, batches = [first.cursor], list[Any]()
    for batch in first:
        batches.append(ids(batch))
        cursors.append(first.cursor)
    assert len(batches) == 18
    for number, expected in enumerate(batches):
        again = loader()
        again.cursor = cursors[number]
        batch = next(iter(again))
        assert ids(batch) == expected
        assert batch["x"].sharding.is_equivalent_to(jax.NamedSharding(mesh, P("data")), 1)
    counts = Counter(itertools.chain(*batches))
    assert sum(counts[number] for number in range(100)) in (100, 101)  # 0.7 of 144
    assert len({tuple(sorted(itertools.chain(*batches[start : start + 6]))) for start in (0, 6, 12)}) == 3


@pytest.mark.parametrize("seed", [None, 4])
def test_the_batch_size_changes_nothing(seed: int | None) -> None:
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    mixture = mix([(numbers(0, 37), 0.7), (numbers(100, 5), 0.3)], length=48)
    orders = [
        [number for batch in DataLoader(mixture, mesh, P("data"), batch_size=size, seed=seed) for number in ids(batch)]
        for size in (2, 6, 16, 48)
    ]
    assert orders[0] == orders[1] == orders[2] == orders[3]
    if seed is None:
        assert orders[0] == drawn(mixture)


def test_proportions_in_batches() -> None:
    """Without a shuffle they are exact; with one as good as chance, that of drawing without putting back, allows."""
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    mixture = mix([(numbers(0, 6000), 0.75), (numbers(10_000, 700), 0.25)], length=4000)
    share = [
        [
            sum(number >= 10_000 for number in ids(batch))
            for batch in DataLoader(mixture, mesh, P(), batch_size=80, seed=s)
        ]
        for s in (None, 5)
    ]
    assert set(share[0]) == {20}
    assert abs(np.mean(share[1]) - 20) < 0.01  # an epoch holds exactly a quarter
    assert 0.6 < np.std(share[1]) / math.sqrt(80 * 0.25 * 0.75) < 1.4


# What cannot be


@pytest.mark.parametrize(
    ("given_sources", "fact"),
    [
        ([], "sources= is empty; give at least one source and its weight"),
        ([(numbers(0, 3), 0)], "the weight of source 0 is 0; expected a positive number"),
        ([(numbers(0, 3), 1), (numbers(0, 3), -0.5)], "the weight of source 1 is -0.5; expected a positive number"),
        ([(numbers(0, 3), float("nan"))], "the weight of source 0 is nan"),
        ([(numbers(0, 3), float("inf"))], "the weight of source 0 is inf"),
        (
            [(numbers(0, 3), 1.0), (numbers(0, 3), 1e-7)],
            "source 1 gets only 1e-07 of the samples; expected at least 1.5e-05",
        ),
        ([(Varying({"x": []}), 1)], "source 0 has no samples; leave it out"),
        (
            [(numbers(0, 3), 1), (sources.open({"x": np.zeros((3, 2), np.float32)}), 1)],
            "leaf 'x' is int32[] in source 0, but float32[2] in source 1; make the samples alike",
        ),
        (
            [(numbers(0, 3), 1), (sources.open({"x": np.arange(3), "y": np.arange(3)}), 1)],
            "leaf 'y' is missing in source 0, but int32[] in source 1",
        ),
        (
            [(sources.open([(1, 2)]), 1), (sources.open([[np.int32(1), np.int32(2)], [3, 4]]), 1)],
            "in source 0, but",
        ),
    ],
)
def test_arguments_that_cannot_be(given_sources: Any, fact: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        mix(given_sources)
    assert fact in str(caught.value)


def test_a_length_that_cannot_be() -> None:
    with pytest.raises(ArgumentError, match="length=0: expected at least 1 sample in an epoch; None takes 3"):
        mix({numbers(0, 3): 1}, length=0)
