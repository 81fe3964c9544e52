"""The order of batches: dropped and padded ends, cursors, and batches that never change."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from braidax.data.loader import DataLoader
from braidax.data.sampling.order import Cursor, Order, Remainder
from braidax.data.sampling.permutation import Permutation
from braidax.errors import ArgumentError

GOLDEN_PAD = [[0, 8, 9, 4], [6, 1, 7, 2], [5, 3], [7, 3, 8, 2], [6, 1, 4, 0]]
GOLDEN_RESUMED = [[5, 2, 3, 8], [7, 6, 4, 0], [3, 9, 1, 7], [6, 0, 8, 2]]


def epoch_of(order: Order, seed: int | None, epoch: int) -> tuple[list[list[int]], Cursor]:
    """Walks one epoch and returns its batches and the cursor behind it."""
    cursor, batches = order.settle(Cursor(seed, epoch)), list[list[int]]()
    while cursor.epoch == epoch:
        batches.append(order.indices(cursor).tolist())
        cursor = order.after(cursor)
    return batches, cursor


@given(
    num_samples=st.integers(1, 300),
    batch_size=st.integers(1, 40),
    remainder=st.sampled_from(["drop", "pad"]),
    epoch=st.integers(0, 9),
)
def test_an_epoch_is_the_permutation_cut_into_batches(
    num_samples: int, batch_size: int, remainder: Remainder, epoch: int
) -> None:
    batch_size = min(batch_size, num_samples) if remainder == "drop" else batch_size
    order = Order(num_samples, batch_size, remainder)
    batches, after = epoch_of(order, 7, epoch)
    assert after == Cursor(7, epoch + 1, 0)
    assert len(batches) == order.batches_per_epoch == order.batches_left(Cursor(7, epoch, 0))
    seen = list(itertools.chain(*batches))
    assert len(set(seen)) == len(seen)
    if remainder == "pad":
        assert sorted(seen) == list(range(num_samples))
        assert [len(batch) for batch in batches[:-1]] == [batch_size] * (len(batches) - 1)
        assert len(batches[-1]) == (num_samples % batch_size or batch_size)
    else:
        assert all(len(batch) == batch_size for batch in batches)
        assert len(seen) == num_samples // batch_size * batch_size


@pytest.mark.parametrize(
    ("num_samples", "batch_size", "remainder", "expected"),
    [(12, 4, "drop", 3), (13, 4, "drop", 3), (12, 4, "pad", 3), (13, 4, "pad", 4), (3, 4, "pad", 1), (4, 4, "drop", 1)],
)
def test_batches_in_an_epoch(num_samples: int, batch_size: int, remainder: Remainder, expected: int) -> None:
    assert Order(num_samples, batch_size, remainder).batches_per_epoch == expected


@pytest.mark.parametrize(
    ("position", "dropped", "padded"), [(0, 2, 3), (1, 2, 3), (2, 2, 2), (6, 1, 1), (7, 0, 1), (9, 0, 1), (10, 0, 0)]
)
def test_batches_left(position: int, dropped: int, padded: int) -> None:
    assert Order(10, 4, "drop").batches_left(Cursor(0, 5, position)) == dropped
    assert Order(10, 4, "pad").batches_left(Cursor(0, 5, position)) == padded


def test_a_cursor_behind_the_last_batch_settles_in_the_next_epoch() -> None:
    dropping, padding = Order(10, 4, "drop"), Order(10, 4, "pad")
    assert dropping.settle(Cursor(3, 2, 6)) == Cursor(3, 2, 6)
    assert dropping.settle(Cursor(3, 2, 7)) == Cursor(3, 3, 0)
    assert padding.settle(Cursor(3, 2, 9)) == Cursor(3, 2, 9)
    assert padding.settle(Cursor(3, 2, 10)) == Cursor(3, 3, 0)


def test_after_moves_by_what_the_batch_held() -> None:
    order = Order(10, 4, "pad")
    assert order.after(Cursor(3, 0, 0)) == Cursor(3, 0, 4)
    assert order.after(Cursor(3, 0, 4)) == Cursor(3, 0, 8)
    assert order.after(Cursor(3, 0, 8)) == Cursor(3, 1, 0)
    assert order.after(Cursor(3, 0, 5)) == Cursor(3, 0, 9)
    assert Order(10, 4, "drop").after(Cursor(3, 0, 4)) == Cursor(3, 1, 0)


def test_another_seed_or_epoch_is_another_order_also_when_asked_in_turns() -> None:
    order = Order(100, 100, "drop")
    first = [order.indices(Cursor(seed, epoch)).tolist() for seed in range(3) for epoch in range(3)]
    again = [order.indices(Cursor(seed, epoch)).tolist() for seed in range(3) for epoch in range(3)]
    assert first == again
    assert len({tuple(indices) for indices in first}) == 9


@pytest.mark.parametrize("cursor", [Cursor(0, -1, 0), Cursor(0, 0, -1), Cursor(0, 0, 11), Cursor(None, 1, 10**9)])
def test_a_cursor_that_points_nowhere_is_refused(cursor: Cursor) -> None:
    with pytest.raises(ArgumentError) as caught:
        Order(10, 4, "pad").settle(cursor)
    assert repr(cursor) in str(caught.value)
    assert "epoch must be at least 0 and position in 0..10" in str(caught.value)


@pytest.mark.parametrize("batch_size", [0, -3])
def test_a_batch_must_hold_samples(batch_size: int) -> None:
    with pytest.raises(ArgumentError, match=rf"batch_size={batch_size} is not a positive"):
        Order(10, batch_size, "drop")


def test_a_source_must_hold_samples() -> None:
    with pytest.raises(ArgumentError, match="source has no samples"):
        Order(0, 1, "pad")


def test_a_batch_larger_than_the_source_needs_padding() -> None:
    with pytest.raises(ArgumentError, match=r"batch_size=11 is more than the 10 samples.*remainder='pad'"):
        Order(10, 11, "drop")
    assert len(Order(10, 11, "pad").indices(Cursor(0, 0, 0))) == 10


def test_an_unknown_remainder_is_refused(unchecked: None) -> None:
    with pytest.raises(ArgumentError, match="remainder='keep' is not 'drop' or 'pad'"):
        Order(10, 4, "keep")  # pyright: ignore[reportArgumentType] (that is the test)


def test_the_batches_of_a_loader_never_change() -> None:
    mesh = jax.make_mesh((2,), ("data",))
    loader = DataLoader({"x": np.arange(10)}, mesh, P("data"), batch_size=4, seed=0, remainder="pad")
    assert [batch.tolist() for batch in loader.peek(5)] == GOLDEN_PAD
    assert all(batch.dtype == np.int64 for batch in loader.peek(5))
    loader = DataLoader({"x": np.arange(10)}, mesh, P("data"), batch_size=4, seed=1)
    loader.cursor = Cursor(1, 3, 1)
    assert [batch.tolist() for batch in loader.peek(4)] == GOLDEN_RESUMED
    loader = DataLoader({"x": np.arange(10)}, mesh, P("data"), batch_size=4, seed=None)
    assert [batch.tolist() for batch in loader.peek(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]


@pytest.mark.parametrize("batch_size", [7, 100, 16384, 20000])
def test_batches_across_windows_are_the_permutation(batch_size: int) -> None:
    order = Order(50_000, batch_size, "pad")
    cursor, got = Cursor(3, 1, 0), list[np.ndarray]()
    while cursor.epoch == 1:
        if order.begins_window(cursor):
            order.look_ahead(cursor)
        got.append(order.indices(cursor))
        cursor = order.after(cursor)
    whole = Permutation(50_000, seed=3, epoch=1)(np.arange(50_000))
    np.testing.assert_array_equal(np.concatenate(got), whole)


def test_a_window_is_computed_once_however_many_threads_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[int]()

    class Counted(Permutation):
        def __call__(self, positions: np.ndarray) -> np.ndarray:
            made.append(int(positions[0]))
            return super().__call__(positions)

    monkeypatch.setattr("braidax.data.sampling.order.Permutation", Counted)
    order, together = Order(40_000, 100, "drop"), threading.Barrier(8)

    def ask(number: int) -> list[int]:
        together.wait(60)
        return order.indices(Cursor(0, 0, 100 * number)).tolist()

    with ThreadPoolExecutor(8) as pool:
        asked = list(pool.map(ask, range(8)))
    assert made == [0]
    order.look_ahead(Cursor(0, 0, 0))
    assert made == [0, 1024]
    order.look_ahead(Cursor(0, 0, 1000))  # whose batch ends behind the first window
    order.look_ahead(Cursor(0, 0, 20_000))
    assert made == [0, 1024, 2048, 32768]
    assert asked == [order.indices(Cursor(0, 0, 100 * number)).tolist() for number in range(8)]
