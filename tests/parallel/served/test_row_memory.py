"""Rows in host memory: what C and NumPy do alike, to the bit, and what C refuses."""

from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braidax.parallel.served import row_memory
from braidax.parallel.served.row_memory import (
    AdagradRows,
    aligned,
    is_aligned,
    move_by_adagrad,
    put_rows,
    sum_rows,
    sums_on_host,
    take_rows,
)

SHAPES = [(), (1,), (2,), (3,), (64,), (257,), (2, 5)]  # of a row
DTYPES = [np.float32, np.float64, jnp.bfloat16, np.int8, np.bool_]


@pytest.fixture(params=["C", "NumPy"])
def made_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "NumPy":
        monkeypatch.setattr(row_memory, "compiled", lambda: None)
    else:
        assert row_memory.compiled() is not None
    return request.param


@pytest.fixture
def threads() -> Iterator[Executor]:
    with ThreadPoolExecutor(3) as made:
        yield made


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.usefixtures("made_by")
def test_rows_are_taken_and_put_back(shape: tuple[int, ...], dtype: Any) -> None:
    random = np.random.default_rng(0)
    table = random.normal(size=(50, *shape)).astype(dtype)
    for ids in (np.array([], np.int64), np.array([49, 0, 7], np.int32), random.permutation(50)[:40]):
        out = np.ones((len(ids), *shape), dtype)
        take_rows(table, ids, out)
        np.testing.assert_array_equal(out, table[ids])
        changed = table.copy()
        put_rows(changed, ids, np.zeros_like(out))
        expected = table.copy()
        expected[ids] = 0
        np.testing.assert_array_equal(changed, expected)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("count", "num_slots"), [(0, 1), (5, 1), (300, 40), (40_000, 3), (40_000, 9_000)])
@pytest.mark.usefixtures("made_by")
def test_sums_are_those_of_jax(count: int, num_slots: int, dtype: Any, threads: Executor) -> None:
    """To the bit: rows of a slot are added in their order, however many threads there are."""
    random = np.random.default_rng(1)
    slots = (random.zipf(1.05, count) % num_slots).astype(np.int32)
    rows = random.normal(size=(count, 40)).astype(dtype)
    with jax.enable_x64(dtype is np.float64):
        expected = np.asarray(jax.ops.segment_sum(jnp.asarray(rows), jnp.asarray(slots), num_slots))
    for given in (None, threads):
        out = np.full((num_slots, 40), 9, dtype)
        sum_rows(rows, slots, out, given)
        np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("width", [1, 16, 31, 32, 33, 64, 100])
def test_threads_add_all_columns(width: int, threads: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_memory, "usable_cores", lambda: 3)
    slots = (np.arange(20_000) % 7).astype(np.int32)
    rows = np.random.default_rng(2).integers(0, 9, (20_000, width)).astype(np.float32)  # whose sums are exact
    out = np.empty((7, width), np.float32)
    sum_rows(rows, slots, out, threads)
    np.testing.assert_array_equal(out, np.stack([rows[slots == slot].sum(0) for slot in range(7)]))


def rows_to_move(num_rows: int, width: int) -> AdagradRows:
    """Returns rows that differ from one another."""
    random = np.random.default_rng(3)
    values = random.normal(size=(num_rows, width)).astype(np.float32)
    return AdagradRows(values, random.random(num_rows).astype(np.float32), np.full(num_rows, -1))


@pytest.mark.parametrize("width", [1, 3, 16, 50, 64])
def test_rows_move_by_adagrad(width: int, threads: Executor) -> None:
    """As NumPy has it in double precision, and to the same bits whatever the threads."""
    num_rows, count = 9000, 5000
    rows, alone = rows_to_move(num_rows, width), rows_to_move(num_rows, width)
    random = np.random.default_rng(4)
    ids = np.sort(random.choice(num_rows, count, replace=False))
    gradients = random.normal(size=(count, width)).astype(np.float32)
    kept = rows.kept.astype(float)
    kept[ids] += np.square(gradients.astype(float)).mean(1)
    values = rows.values.astype(float)
    values[ids] -= 0.1 * gradients / np.sqrt(kept[ids] + 1e-3)[:, None]
    move_by_adagrad(rows, ids, gradients, rates=(0.1, 1e-3), step=7, threads=threads)
    np.testing.assert_allclose(rows.kept, kept, rtol=1e-6)
    np.testing.assert_allclose(rows.values, values, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(rows.touched, np.where(np.isin(np.arange(num_rows), ids), 7, -1))
    move_by_adagrad(alone, ids, gradients, rates=(0.1, 1e-3), step=7)
    for one, two in zip(rows, alone, strict=True):
        np.testing.assert_array_equal(one, two)


def test_adagrad_moves_nothing_where_something_does_not_fit() -> None:
    binding: Any = row_memory.compiled()
    rows, before = rows_to_move(4, 3), rows_to_move(4, 3)
    ids, gradients = np.array([1, 2]), np.ones((2, 3), np.float32)
    for at in (-1, 4, 1 << 40):
        with pytest.raises(ValueError, match="ids of rows of the table"):
            move_by_adagrad(rows, np.array([1, at]), gradients, rates=(0.1, 0.1), step=0)
    numbers = 3, 0.1, 0.1, 0
    for wrong in (
        (rows.values[:3], rows.kept, rows.touched, ids, gradients, *numbers, 0, 2),
        (rows.values, rows.kept[:3], rows.touched, ids, gradients, *numbers, 0, 2),
        (rows.values, rows.kept, rows.touched[:3], ids, gradients, *numbers, 0, 2),
        (rows.values, rows.kept, rows.touched, ids, gradients[:1], *numbers, 0, 2),
        (*rows, ids, gradients, 0, 0.1, 0.1, 0, 0, 2),
        (*rows, ids, gradients, *numbers, 0, 3),
        (*rows, ids, gradients, *numbers, 2, 1),
        (*rows, ids, gradients, *numbers, -1, 1),
    ):
        with pytest.raises(ValueError, match="a gradient for each id"):
            binding.adagrad(*wrong)
    for one, two in zip(rows, before, strict=True):
        np.testing.assert_array_equal(one, two)


def test_c_refuses_what_would_leave_its_buffers() -> None:
    binding: Any = row_memory.compiled()
    assert binding is not None
    table, row, ids = np.zeros((4, 3), np.float32), np.ones((1, 3), np.float32), np.array([1])
    for at in (-1, 4, 1 << 40):
        for call in (take_rows, put_rows):
            with pytest.raises(ValueError, match="ids of rows of the table"):
                call(table, np.array([at]), row)
    for call in (binding.take, binding.put):
        with pytest.raises(ValueError, match="a row for each id"):
            call(table, ids, np.zeros(5, np.float32), 12, 12)
    for call in (take_rows, put_rows):  # rows of another table, which would fit twice as many
        with pytest.raises(ValueError, match="a row for each id"):
            call(np.zeros((4, 4), np.float32), ids, np.ones((1, 2), np.float32))
    sums = np.zeros((2, 3), np.float32)
    for slot in (-1, 2):
        with pytest.raises(ValueError, match="slots of sums"):
            sum_rows(row, np.array([slot], np.int32), sums)
    slots = np.zeros(1, np.int32)
    for wrong in ((row, slots, sums, 3, 2, 0, 2), (row, slots, sums, 0, 4, 0, 2), (row, slots, sums, 3, 4, 0, 4)):
        with pytest.raises(ValueError, match="slots of sums"):
            binding.sum(*wrong)
    for wrong in ((row, slots, sums, 3, 4, 2, 1), (row[:0], slots, sums, 3, 4, 0, 2), (row, slots, sums, 4, 4, 0, 1)):
        with pytest.raises(ValueError, match="slots of sums"):
            binding.sum(*wrong)
    memory, frame, none = np.zeros((2, 4096), np.uint8), np.zeros(1, np.int64), np.full(1, -1)
    far = np.full(1, 1 << 60)
    for wrong in (
        (4096, frame + 2, none, frame, 0, 1),
        (4096, frame - 1, none, frame, 0, 1),
        (4096, frame, far, none, 0, 1),
        (4096, frame, none, far, 0, 1),
        (4096, frame, none, none, 0, 2),
        (4096, frame, none, np.zeros(2, np.int64), 0, 1),
        (0, frame, none, frame, 0, 1),
    ):
        with pytest.raises(ValueError, match="frames of the memory, and blocks of the file"):
            binding.exchange(0, -1, memory.reshape(-1), *wrong)
    for queue in (0, binding.open_queue()):
        with pytest.raises(OSError, match="Bad file descriptor"):
            binding.exchange(queue, -1, memory.reshape(-1), 4096, frame, none, frame, 0, 1)
        binding.close_queue(queue)
    assert not table.any()
    assert not sums.any()
    assert not memory.any()


def test_memory_lies_where_xla_reads_it_in_place() -> None:
    made = aligned((5, 3), np.float32)
    assert (made.shape, made.dtype, made.any(), is_aligned(made)) == ((5, 3), np.float32, False, True)
    assert not is_aligned(made[1:])
    assert not is_aligned(made[:, :2])


def test_only_cpu_devices_leave_sums_to_the_host() -> None:
    """And those of numbers that C adds."""
    assert sums_on_host("cpu", np.float32)
    assert sums_on_host("cpu", np.float64)
    assert not sums_on_host("cpu", jnp.bfloat16)
    assert not sums_on_host("gpu", np.float32)
