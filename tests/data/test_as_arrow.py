import errno
import gzip
import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

import braidax as bx
from braidax.data.as_arrow import as_arrow
from braidax.data.formats.tables.arrow import ArrowSource
from braidax.errors import ArgumentError, FormatError
from tests.support.data.formats.reading import read

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
    (tmp_path / "a.csv").write_text("a,b\n1,2\n")
    for name, known in (("a.npy", "npy"), ("a.csv", "CSV")):
        told = rf"{name}' was recognized as '{known}.*, of which as_arrow makes no copy; the formats .*Parquet, Arrow"
        with pytest.raises(ArgumentError, match=told):
            as_arrow(tmp_path / name)
    path = tmp_path / "a.parquet"
    pq.write_table(table(), path)
    (tmp_path / "file").write_text("")
    with pytest.raises(FormatError, match=r"file.*: the copy in Arrow cannot be written .*cache="):
        as_arrow(path, cache=tmp_path / "file")
    assert not list(tmp_path.rglob("*.part"))


def full_after(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """Lets files that are written unfinished under a cache hold so many bytes: the disk is full then."""
    plain = Path.open

    class Full(io.FileIO):
        def write(self, data: Any, /) -> int:
            if self.tell() + memoryview(data).nbytes > num_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(data)

    def opened(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        return Full(path, "w+") if path.suffix == ".part" and mode == "w+b" else plain(path, mode, *args, **kwargs)

    monkeypatch.setattr(Path, "open", opened)


def test_a_full_disk_is_told_of_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRAIDAX_CACHE", str(tmp_path / "cache"))
    rows = pa.table({"x": np.random.default_rng(0).integers(0, 1 << 30, 4000)})
    pq.write_table(rows, tmp_path / "a.parquet")
    text = "\n".join(json.dumps({"x": row}) for row in range(4000))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "b.jsonl").write_text(text)
    full_after(monkeypatch, 5000)
    for name, work in (("a.parquet", as_arrow), ("a.jsonl.gz", bx.open), ("b.jsonl", bx.open)):
        with pytest.raises(
            FormatError, match=r"cannot be written .*No space left.*, after [\d,]+ bytes.*BRAIDAX_CACHE"
        ) as told:
            work(tmp_path / name)
        assert str(told.value).startswith(
            str(tmp_path / (".b.jsonl.filled-lines.index" if name == "b.jsonl" else "cache"))
        )
        assert "corrupt" not in str(told.value)
    assert not list(tmp_path.rglob("*.part"))
