from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from braidax.data.as_arrow import as_arrow
from braidax.data.formats.tables.arrow import ArrowSource
from braidax.errors import ArgumentError, FormatError
from tests.data.formats.reading import read

ROWS = 50


def table(start: int = 0) -> pa.Table:
    rows = range(start, start + ROWS)
    return pa.table(
        {
            "x": np.arange(start, start + ROWS),
            "ids": [[row] * (row % 3) for row in rows],
            "text": pa.array([f"t{row % 4}" for row in rows]).dictionary_encode(),
            "view": pa.array([f"v{row}" for row in rows], pa.string_view()),
        }
    )


def assert_is_converted(path: Path, cache: Path) -> None:
    source = as_arrow(path, cache=cache)
    assert isinstance(source, ArrowSource)
    order = [2 * ROWS - 1, 0, ROWS, ROWS - 1]
    window = read(source, order)
    assert window["x"].tolist() == order
    assert [ids.tolist() for ids in window["ids"]] == [[row] * (row % 3) for row in order]
    assert window["text"].tolist() == [f"t{row % 4}" for row in order]
    assert window["view"].tolist() == [f"v{row}" for row in order]


def test_parquet(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    for number in range(2):
        pq.write_table(table(number * ROWS), tmp_path / "t" / f"{number}.parquet", row_group_size=7)
    assert_is_converted(tmp_path / "t", tmp_path / "cache")
    (copy,) = (tmp_path / "cache").rglob("*.arrow")
    stamp = copy.stat().st_mtime_ns
    assert_is_converted(tmp_path / "t", tmp_path / "cache")
    assert copy.stat().st_mtime_ns == stamp  # it was not made again
    pq.write_table(table(ROWS), tmp_path / "t" / "1.parquet", row_group_size=9)
    assert_is_converted(tmp_path / "t", tmp_path / "cache")
    (other,) = (tmp_path / "cache").rglob("*.arrow")
    assert other != copy
    assert sorted(other.parent.iterdir()) == [other, Path(f"{other}.made")]
    assert list(as_arrow(tmp_path / "t", columns=["x"], cache=tmp_path / "cache").sample_spec) == ["x"]


def test_compressed_arrow(tmp_path: Path) -> None:
    both = pa.concat_tables([table(), table(ROWS)]).combine_chunks()
    feather.write_feather(both, tmp_path / "a.feather", chunksize=2 * ROWS)
    assert_is_converted(tmp_path / "a.feather", tmp_path / "cache")


def test_what_needs_no_copy(tmp_path: Path) -> None:
    feather.write_feather(table().select(["x"]), tmp_path / "a.feather", compression="uncompressed")
    assert isinstance(as_arrow(tmp_path / "a.feather", cache=tmp_path / "cache"), ArrowSource)
    assert not (tmp_path / "cache").exists()


def test_what_cannot_be_converted(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros(3))
    with pytest.raises(ArgumentError, match=r"cache_bytes=.*: no option of this format"):
        as_arrow(tmp_path / "a.npy")
    path = tmp_path / "a.parquet"
    pq.write_table(table(), path)
    (tmp_path / "file").write_text("")
    with pytest.raises(FormatError, match=r"file.*: cannot be written .*cache="):
        as_arrow(path, cache=tmp_path / "file")
    assert not list(tmp_path.rglob("*.part"))
