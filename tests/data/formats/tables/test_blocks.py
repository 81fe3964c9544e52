"""Blocks in memory: never more than the cache may hold, each decoded once for all who ask for it."""

import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import braidax.data as sources
from braidax.data.formats.tables.block_cache import BlockCache, Whole, Windows
from braidax.data.formats.tables.blocks import Block, BlockSource
from braidax.data.formats.tables.columns import Column
from braidax.data.source import widened
from braidax.errors import RecordError
from tests.support.data.formats.reading import read

NUM_BLOCKS, ROWS, WIDTH = 12, 100, 50


class Held:
    """Counts the bytes of decoded blocks that anybody still refers to, or is decoding."""

    def __init__(self, table: Any) -> None:
        self._table = table
        self._lock = threading.Lock()
        self._now = 0
        self.most = 0
        self.num_decoded = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._table, name)

    def decode(self, index: int) -> Any:
        block: Block = self._table.blocks[index]
        with self._lock:
            self._now += block.num_bytes
            self.most = max(self.most, self._now)
            self.num_decoded += 1
        group = Group(self._table.decode(index))
        group.forget = lambda: self._forget(block.num_bytes)
        return group

    def _forget(self, num_bytes: int) -> None:
        with self._lock:
            self._now -= num_bytes


class Group(dict[str, Any]):
    forget: Any = None

    def __del__(self) -> None:
        self.forget()


@pytest.fixture
def source(tmp_path: Any) -> BlockSource:
    values = np.arange(NUM_BLOCKS * ROWS * WIDTH, dtype=np.int32).reshape(-1, WIDTH)
    rows = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), WIDTH)
    pq.write_table(pa.table({"x": rows}), tmp_path / "a.parquet", row_group_size=ROWS)
    opened = sources.open(tmp_path / "a.parquet")
    assert isinstance(opened, BlockSource)
    return opened


def read_by_threads(source: BlockSource, windows: Sequence[np.ndarray], threads: int) -> None:
    def read(indices: np.ndarray) -> None:
        out = {"x": np.empty((len(indices), WIDTH), np.int32)}
        source.read(indices, out)
        np.testing.assert_array_equal(out["x"][:, 0], indices * WIDTH)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, windows))


@pytest.fixture
def _restless() -> Iterator[None]:
    """Python changes threads so often that a block which is referred to a moment too long is seen."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_restless")
@pytest.mark.parametrize("room", [1, 2, 5])
@pytest.mark.parametrize("announced", [False, True])
def test_many_threads_hold_no_more_than_the_cache_may(source: BlockSource, room: int, announced: bool) -> None:
    """It was one block a thread more."""
    largest = max(block.num_bytes for block in source.table.blocks)
    held = Held(source.table)
    small = BlockSource(held, cache_bytes=room * largest, what="row groups", facts={})  # pyright: ignore
    rng = np.random.default_rng(0)
    windows = [rng.integers(NUM_BLOCKS * ROWS, size=20) for _ in range(40)]
    if announced:
        for window in windows[:8]:
            small.prepare(window)
    read_by_threads(small, windows, threads=8)
    assert held.most <= room * largest


def test_a_block_is_decoded_once_for_all_threads(source: BlockSource) -> None:
    held = Held(source.table)
    roomy = BlockSource(held, cache_bytes=1 << 30, what="row groups", facts={})  # pyright: ignore
    read_by_threads(roomy, [np.arange(NUM_BLOCKS * ROWS)] * 8, threads=8)
    assert held.num_decoded == NUM_BLOCKS


def test_a_block_that_does_not_decode_frees_its_room(source: BlockSource) -> None:
    class Failing(Held):
        def decode(self, index: int) -> Any:
            if index == 3:
                raise ValueError("torn")
            return super().decode(index)

    largest = max(block.num_bytes for block in source.table.blocks)
    failing = BlockSource(Failing(source.table), cache_bytes=largest, what="row groups", facts={})  # pyright: ignore
    for _ in range(3):
        with pytest.raises(ValueError, match="torn"):
            read_by_threads(failing, [np.arange(300, 310)] * 4, threads=4)
    read_by_threads(failing, [np.arange(300), np.arange(400, 1200)], threads=2)


@pytest.mark.usefixtures("_restless")
def test_a_table_that_fits_becomes_arrays_of_all_its_records(source: BlockSource) -> None:
    """Beside these there are no more decoded blocks than the rest of the cache holds, and in the end none."""
    largest = max(block.num_bytes for block in source.table.blocks)
    held = Held(source.table)
    whole = BlockSource(held, cache_bytes=(NUM_BLOCKS + 2) * largest, what="row groups", facts={})  # pyright: ignore
    rng = np.random.default_rng(0)
    read_by_threads(whole, [rng.integers(NUM_BLOCKS * ROWS, size=20) for _ in range(40)], threads=8)
    assert held.num_decoded == NUM_BLOCKS
    assert held.most <= 2 * largest
    assert held._now == 0
    assert whole._whole is not None
    assert whole._whole.is_complete
    for window in ([], [1199, 0, 0, 100, 99]):
        read_by_threads(whole, [np.array(window, np.int64)], threads=1)


def test_a_block_that_came_meanwhile_is_not_decoded_again() -> None:
    """Another thread decodes it, copies it and drops it, after this one has seen that it is missing."""
    decoded: list[int] = []

    class Late(BlockCache):
        def use_decoded(self, index: int, *given: Any, **options: Any) -> bool:
            if not decoded:
                decoded.append(-1)
                whole.bring([index], decode)
            return super().use_decoded(index, *given, **options)

    def decode(index: int) -> Any:
        decoded.append(index)
        return {"x": Column(np.full(3, index), None, None)}

    whole = Whole(np.array([0, 3, 6]), [24, 24], Late(24, Windows(0)))
    whole.bring([1, 0], decode)
    assert decoded == [-1, 1, 0]
    assert whole.columns["x"].values.tolist() == [0, 0, 0, 1, 1, 1]


def test_a_table_that_just_fits_stays_in_blocks(source: BlockSource) -> None:
    """There is no room to decode one of them beside the whole."""
    held = Held(source.table)
    num_bytes = sum(block.num_bytes for block in source.table.blocks)
    tight = BlockSource(held, cache_bytes=num_bytes, what="row groups", facts={})  # pyright: ignore
    read_by_threads(tight, [np.arange(NUM_BLOCKS * ROWS)] * 4, threads=4)
    assert tight._whole is None
    assert held.num_decoded == NUM_BLOCKS
    assert held.most <= num_bytes


def test_nulls_and_errors_of_a_whole_table(tmp_path: Any) -> None:
    for number in range(2):
        ids = [1 << 40 if number and row == 7 else row for row in range(10)]
        lists = [[row] * ({6: 1, 8: 3}.get(row, 2) if number else 2) for row in range(10)]
        gaps = [None if number and row == 1 else row for row in range(10)]
        columns = {"id": ids, "lists": lists, "gap": pa.array(gaps, pa.int32())}
        pq.write_table(pa.table(columns), tmp_path / f"{number}.parquet", row_group_size=3)
    opened = sources.open(tmp_path)
    assert isinstance(opened, BlockSource)
    assert opened._whole is not None
    window = read(opened, [11, 0, 19, 15])
    assert window["gap.is_valid"].tolist() == [False, True, True, True]
    assert window["gap"].tolist() == [0, 0, 9, 5]
    assert window["lists"].tolist() == [[1, 1], [0, 0], [9, 9], [5, 5]]
    with pytest.raises(RecordError, match=r"1\.parquet, record 7: leaf 'id' holds 1099511627776"):
        read(opened, [3, 17, 12])
    with pytest.raises(RecordError, match=r"1\.parquet, record 8: column 'lists' has a list of length 3"):
        read(opened, [3, 18, 12])
    assert read(widened(opened), [17])["id"].tolist() == [1 << 40]
