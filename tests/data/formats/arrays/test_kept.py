"""Chunks that are all kept: each is decoded once for all threads, and a bad one is an error of its records alone."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cloudpickle
import h5py
import numpy as np
import pytest

import braidax.data as sources
from braidax.data.formats.arrays.chunked import ChunkedTable
from braidax.data.formats.tables.block_cache import InPlace
from braidax.errors import FormatError, RecordError
from tests.support.data.formats.reading import assert_equal, read

NUM_ROWS = 103


def is_kept(source: Any) -> bool:
    return isinstance(source._whole, InPlace)


def written(path: Path, values: np.ndarray, *, chunks: tuple[int, ...]) -> Path:
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=values, compression="gzip", chunks=chunks)
        file.create_dataset("y", data=np.arange(len(values), dtype=np.int32), chunks=chunks[:1])
    return path


@pytest.mark.parametrize("chunks", [(4, 3), (4, 2), (NUM_ROWS, 3)])
def test_all_of_it_is_what_was_written(tmp_path: Path, chunks: tuple[int, int]) -> None:
    values = np.arange(NUM_ROWS * 3, dtype=np.float32).reshape(NUM_ROWS, 3)
    source = sources.open(written(tmp_path / "a.h5", values, chunks=chunks))
    assert is_kept(source)
    order = np.random.default_rng(0).permutation(NUM_ROWS)
    for part in np.array_split(order, 9):
        window = read(source, part.tolist())
        np.testing.assert_array_equal(window["x"], values[part])
        assert window["y"].tolist() == part.tolist()
    again = cloudpickle.loads(cloudpickle.dumps(source))
    assert is_kept(again)
    assert_equal(read(again), read(source))


def test_what_does_not_fit_or_varies_is_not_kept(tmp_path: Path) -> None:
    path = written(tmp_path / "a.h5", np.arange(NUM_ROWS, dtype=np.float32), chunks=(4,))
    assert not is_kept(sources.open(path, cache_bytes=8 * NUM_ROWS - 1))
    with h5py.File(path, "a") as file:
        file["text"] = [f"{row}" for row in range(NUM_ROWS)]
    assert not is_kept(sources.open(path))


def test_each_block_is_decoded_once_for_all_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values, decoded, lock = np.arange(4096), Counter[int](), threading.Lock()
    source = sources.open(written(tmp_path / "a.h5", values, chunks=(16,)))
    decode_into = ChunkedTable.decode_into

    def counted(self: ChunkedTable, indices: list[int], leaves: Any) -> None:
        with lock:
            decoded.update(indices)
        decode_into(self, indices, leaves)

    monkeypatch.setattr(ChunkedTable, "decode_into", counted)
    orders = [np.random.default_rng(seed).integers(0, 4096, 300).tolist() for seed in range(24)]
    with ThreadPoolExecutor(8) as pool:
        for order, window in zip(orders, pool.map(lambda order: read(source, order), orders), strict=True):
            assert window["x"].tolist() == window["y"].tolist() == order
    assert set(decoded.values()) == {1}
    assert read(source)["x"].tolist() == values.tolist()
    assert decoded == Counter(range(256))


def test_a_bad_chunk_is_an_error_of_its_records(tmp_path: Path) -> None:
    path = written(tmp_path / "a.h5", np.arange(400), chunks=(10,))
    with h5py.File(path) as file:
        chunk = file["x"].id.get_chunk_info(7)
    stored = bytearray(path.read_bytes())
    stored[chunk.byte_offset : chunk.byte_offset + chunk.size] = b"\xff" * chunk.size
    path.write_bytes(stored)
    source = sources.open(path)
    for _ in range(2):
        with pytest.raises(FormatError, match=r"a\.h5, data set 'x', records 70 to 79: .*corrupt"):
            read(source)
    good = [row for row in range(400) if row // 10 != 7]
    assert read(source, good)["x"].tolist() == good


def test_the_file_and_its_record_are_named(tmp_path: Path) -> None:
    values = np.arange(40)
    written(tmp_path / "a.h5", values, chunks=(8,))
    values[5] = 2**40
    written(tmp_path / "b.h5", values, chunks=(8,))
    source = sources.open(str(tmp_path / "*.h5"))
    assert is_kept(source)
    assert read(source, [0, 79, 44])["x"].tolist() == [0, 39, 4]
    with pytest.raises(RecordError, match=r"b\.h5, record 5: leaf 'x' holds 1099511627776"):
        read(source, [44, 45])
    wide = sources.mapped(source, lambda window: {"x": window["x"] % 1000})
    assert read(wide, [45])["x"].tolist() == [2**40 % 1000]
