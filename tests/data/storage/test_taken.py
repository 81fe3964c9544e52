"""Rows that are copied out of memory, in C and without it."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from braidax.data.storage import taken
from braidax.data.storage.files import compiled
from braidax.data.storage.taken import stack_rows, take_bytes, take_rows

WAYS = (compiled, lambda: None)


@given(
    shape=st.sampled_from([(), (1,), (2,), (3,), (21,), (64,), (300,), (5, 3)]),
    kind=st.sampled_from(["u1", "?", "<i2", ">i4", "<f8", "bfloat16"]),
    wanted=st.lists(st.integers(0, 99), max_size=40),
    unaligned=st.booleans(),
)
def test_rows_are_those_of_numpy(shape: tuple[int, ...], kind: str, wanted: list[int], *, unaligned: bool) -> None:
    dtype = np.dtype(ml_dtypes.bfloat16 if kind == "bfloat16" else kind)
    count = 100 * int(np.prod(shape)) * dtype.itemsize
    memory = np.random.default_rng(0).integers(0, 2, count + 1, dtype=np.uint8)
    table: Any = np.ndarray((100, *shape), dtype, memory, int(unaligned))
    table.flags.writeable = False  # as what is mapped is
    indices = np.array(wanted, np.int64)
    expected = np.array(table[indices])
    for way in WAYS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(taken, "compiled", way)
            out = np.full((len(wanted), *shape), 1, dtype)
            take_rows(table, indices, out)
        assert out.tobytes() == expected.tobytes()


@given(
    width=st.sampled_from([1, 4, 8, 63, 64, 700]),
    wanted=st.lists(st.integers(0, 300), max_size=40),
    on_grid=st.booleans(),
)
def test_bytes_are_those_at_their_places(width: int, wanted: list[int], *, on_grid: bool) -> None:
    data = np.random.default_rng(0).integers(0, 256, 1000, dtype=np.uint8)
    places = np.array(wanted, np.int64)
    if on_grid:
        places = places // width * width
    expected = b"".join(data[place : place + width].tobytes() for place in places.tolist())
    for way in WAYS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(taken, "compiled", way)
            out = np.zeros((len(wanted), width), np.uint8)
            take_bytes(data, places, out)
            every_other = np.zeros((len(wanted[::2]), width), np.uint8)
            take_bytes(data, places[::2], every_other)
        assert out.tobytes() == expected
        assert every_other.tobytes() == out[::2].tobytes()


@pytest.mark.parametrize("width", [64, 1024, 96, 1000])
@pytest.mark.parametrize("moved", [0, 32, 8])
@pytest.mark.parametrize("num_bytes", [4 << 20, (4 << 20) - 64])
def test_many_rows_at_once_fill_their_place_and_nothing_beside_it(width: int, moved: int, num_bytes: int) -> None:
    rng = np.random.default_rng(width)
    data, count = rng.integers(0, 256, 100_000, dtype=np.uint8), -(-num_bytes // width)
    places = rng.integers(0, len(data) - width + 1, count)
    memory = np.full(count * width + 192, 7, np.uint8)
    first = -memory.ctypes.data % 64 + 64 + moved
    rows = memory[first : first + count * width].reshape(count, width)
    take_bytes(data, places, rows)
    assert np.array_equal(rows, np.lib.stride_tricks.sliding_window_view(data, width)[places])
    assert np.all(memory[:first] == 7)
    assert np.all(memory[first + count * width :] == 7)


@pytest.mark.parametrize("way", WAYS)
def test_rows_without_bytes_and_no_rows(way: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taken, "compiled", way)
    take_rows(np.zeros((3, 0)), np.array([2, 1]), np.zeros((2, 0)))
    take_rows(np.zeros((0, 5)), np.zeros(0, np.int64), np.zeros((0, 5)))
    take_bytes(np.zeros(3, np.uint8), np.array([2, 1]), np.zeros((2, 0), np.uint8))


def test_objects_are_no_bytes() -> None:
    table, out = np.array([[object()], [object()]]), np.empty((3, 1), object)
    take_rows(table, np.array([1, 0, 1]), out)
    assert [row[0] for row in out] == [table[1, 0], table[0, 0], table[1, 0]]


def test_rows_that_are_not_there_are_refused() -> None:
    reads = compiled()
    assert reads is not None
    data, out = np.arange(10, dtype=np.uint8), np.zeros((2, 3), np.uint8)

    def take(ids: list[int], width: int = 3, unit: int = 2, rows: Any = out, more: bytes = b"") -> None:
        reads.take(data, np.array(ids, np.int64).tobytes() + more, rows, width, unit)

    take([3, 0])
    assert out.tolist() == [[6, 7, 8], [0, 1, 2]]
    for wrong in ([4, 0], [0, -1], [0, 1 << 62], [0], [0, 0, 0]):
        with pytest.raises(ValueError, match="expected ids of rows that are in the data, and a place for each"):
            take(wrong)
    for width, unit, more in ((0, 2, b""), (-3, 2, b""), (3, 0, b""), (3, -1, b""), (4, 2, b""), (3, 2, b"x")):
        with pytest.raises(ValueError, match="expected ids of rows"):
            take([0, 0], width, unit, more=more)
    with pytest.raises(ValueError, match="expected ids of rows"):
        reads.take(b"ab", np.zeros(1, np.int64), np.zeros(3, np.uint8), 3, 1)  # the data are shorter than a row
    with pytest.raises(TypeError):
        reads.take(data, np.zeros(1, np.int64), bytes(3), 3, 1)
    assert out.tolist() == [[6, 7, 8], [0, 1, 2]]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [bytes, memoryview])
def test_objects_of_one_length_become_rows(monkeypatch: pytest.MonkeyPatch, way: Any, kind: Any) -> None:
    monkeypatch.setattr(taken, "compiled", way)
    table = np.random.default_rng(0).integers(0, 99, (20, 3, 2), np.int16)
    objects = [kind(row.tobytes()) for row in table]
    out = np.zeros_like(table)
    assert stack_rows(objects, out) is None
    assert np.array_equal(out, table)
    assert stack_rows([*objects[:7], kind(b"x" * 13), *objects[8:19], kind(b"")], out) == 7
    assert stack_rows([], out[:0]) is None
    assert stack_rows([kind(b"")] * 2, np.zeros((2, 0))) is None
    assert stack_rows([kind(b""), kind(b"x")], np.zeros((2, 0))) == 1


def test_objects_that_do_not_fit_are_refused() -> None:
    reads = compiled()
    assert reads is not None
    out = np.zeros((2, 3), np.uint8)
    wrongs: list[tuple[list[Any], int]] = [
        ([b"abc"], 3), ([b"abc"] * 3, 3), ([b"abc", "abc"], 3), ([memoryview(b"abcdef")[::2]] * 2, 3),
        ([b"abc"] * 2, 0), ([b"abc"] * 2, -3), ([b"abcd"], 4),
    ]  # fmt: skip
    for objects, width in wrongs:
        with pytest.raises(ValueError, match="expected a list of bytes, and a row for each"):
            reads.stack(objects, out, width)
    with pytest.raises(TypeError):
        reads.stack((b"abc", b"abc"), out, 3)
    assert not out.any()
    assert reads.stack([b"abc", b"de"], out, 3) == 1
    assert not out.any()
