"""Tables of text that are parsed once: rows have what the text says, and errors are those of reading the text."""

import errno
import io
import json
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import braidax.data as sources
from braidax.data.formats.records.csv import open_csv
from braidax.data.formats.records.jsonl import open_jsonl
from braidax.data.formats.tables import parsed
from braidax.data.formats.tables.parsed import Parsed
from braidax.data.source import Source, stamp_of, widened
from braidax.data.storage import LocalFiles
from braidax.errors import FormatError, RecordError
from tests.support.data.formats.reading import assert_equal, read

ROWS = 700
HUGE = 1 << 40  # which does not fit in 32 bits


@pytest.fixture(autouse=True)
def _small_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Parses files of a few bytes once, in several windows."""
    monkeypatch.setenv("BRAIDAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(parsed, "LEAST_BYTES", 1)
    monkeypatch.setattr(parsed, "_WINDOW_RECORDS", 300)


def records() -> list[dict[str, Any]]:
    return [
        {"id": row, "x": row / 7, "flag": row % 3 == 0, "pair": [row, -row], "gap": None if row % 5 == 2 else row}
        for row in range(ROWS)
    ]


def jsonl(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def csv(path: Path, other: dict[int, str] | None = None, *, num_rows: int = ROWS) -> Path:
    """Writes a table; `other`: lines by their numbers."""
    lines = [f"{row},{row / 7},{'' if row % 5 == 2 else row}" for row in range(num_rows)]
    for row, line in (other or {}).items():
        lines[row] = line
    path.write_text("\n".join(["id,x,gap", *lines, ""]))
    return path


def kept(folder: Path) -> list[Path]:
    return sorted((folder / "cache").rglob("*.rows"))


def as_text(path: Path) -> Source:
    files = LocalFiles([path])
    return open_csv(files) if path.suffix == ".csv" else open_jsonl(files)


def assert_reads_as_text(path: Path) -> None:
    source, text = sources.open(path), as_text(path)
    assert isinstance(source, Parsed)
    assert source.sample_spec == text.sample_spec
    assert stamp_of(source) == stamp_of(text)
    for order in (None, [ROWS - 1, 0, 3, 3, 299, 300], []):
        assert_equal(read(source, order), read(text, order))
        assert_equal(read(widened(source), order), read(widened(text), order))
    assert_equal(read(pickle.loads(pickle.dumps(source)), [5, 2]), read(text, [5, 2]))
    assert_equal(read(pickle.loads(pickle.dumps(source.widened())), [5, 2]), read(widened(text), [5, 2]))


def assert_same_errors(path: Path, wrong: list[int]) -> None:
    """Compares what is raised for some records with what reading the text raises, and reads all others."""
    source, text = sources.open(path), as_text(path)
    assert isinstance(source, Parsed)
    for row in wrong:
        with pytest.raises(RecordError) as told:
            read(text, [row])
        with pytest.raises(RecordError) as found:
            read(source, [0, row, 1])
        assert str(found.value) == str(told.value)
    others = [row for row in range(ROWS) if row not in wrong]
    assert_equal(read(source, others), read(text, others))


def test_rows_are_what_the_text_says(tmp_path: Path) -> None:
    assert_reads_as_text(jsonl(tmp_path / "a.jsonl", records()))
    assert_reads_as_text(csv(tmp_path / "a.csv"))
    assert len(kept(tmp_path)) == 2
    facts = sources.open(tmp_path / "a.csv").describe()
    assert facts["format"] == "CSV"
    assert facts["rows"].startswith("parsed once, into ")
    assert facts["rows"].endswith(".rows")


def test_several_files(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    for number in range(3):
        csv(tmp_path / "t" / f"{number}.csv", num_rows=10 + number)
    source = sources.open(tmp_path / "t")
    assert isinstance(source, Parsed)
    assert read(source, [32, 10, 9])["id"].tolist() == [11, 0, 9]


def test_records_that_do_not_parse_are_errors_of_their_own(tmp_path: Path) -> None:
    broken = {4: "{", 302: "[1]", 303: '{"id": 1}', 306: '{"id": "one"}'}  # none of those that tell what fields hold
    lines: list[Any] = [broken.get(row, record) for row, record in enumerate(records())]
    lines[5] = {**records()[5], "id": HUGE}
    assert_same_errors(jsonl(tmp_path / "a.jsonl", lines), [4, 5, 302, 303, 306])
    path = csv(tmp_path / "a.csv", {3: "1,x,2", 300: "1,2", 301: f"{HUGE},1,1", 302: "1,1,1,1"})
    assert_same_errors(path, [3, 300, 301, 302])


@pytest.mark.parametrize("row", [7, 650])
def test_integers_that_need_64_bits(tmp_path: Path, row: int) -> None:
    """In the first window the column is kept in 64 bits, later its record is read as text."""
    path = csv(tmp_path / "a.csv", {row: f"{HUGE},1,1"})
    assert_same_errors(path, [row])
    wide = widened(sources.open(path))
    assert isinstance(wide, Parsed)
    window = read(wide, [row, 0, 8])
    assert window["id"].tolist() == [HUGE, 0, 8]
    assert window["id"].dtype == np.int64


def test_rows_are_made_once_and_anew_for_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = csv(tmp_path / "a.csv")
    before = read(sources.open(path))
    (rows,) = kept(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(parsed, "_parsed_text", None)  # which would make them
        assert_equal(read(sources.open(path)), before)
    csv(path, {1: "9,9,9"})
    os.utime(path, ns=(1, 1))
    assert read(sources.open(path), [1])["id"].tolist() == [9]
    (other,) = kept(tmp_path)
    assert other != rows
    assert list(sources.open(path, columns=["x"]).sample_spec) == ["x"]
    assert read(sources.open(path, columns={"id": "float32"}), [3])["id"].dtype == np.float32
    assert len(kept(tmp_path)) == 3


def test_many_threads_make_them_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    write = parsed._write
    monkeypatch.setattr(parsed, "_write", lambda *given: (made.append(1), write(*given))[1])
    path, found = csv(tmp_path / "a.csv"), list[Any]()
    threads = [threading.Thread(target=lambda: found.append(read(sources.open(path), [3, 1]))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [window["id"].tolist() for window in found] == [[3, 1]] * 6
    assert made == [1]


def test_what_is_not_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = jsonl(tmp_path / "text.jsonl", [{"id": row, "text": "x"} for row in range(9)])
    lists = jsonl(tmp_path / "lists.jsonl", [{"ids": list(range(row))} for row in range(9)])
    lines = tmp_path / "a.txt"
    lines.write_text("1\n2\n")
    small, large, long = csv(tmp_path / "small.csv"), csv(tmp_path / "large.csv"), csv(tmp_path / "long.csv")
    limits = {small: ("LEAST_BYTES", 1 << 20), large: ("MOST_BYTES", 100), long: ("_MOST_ROW_BYTES", 9000)}
    for path in (text, lists, lines, small, large, long):
        with monkeypatch.context() as patch:
            if path in limits:
                patch.setattr(parsed, *limits[path])
            source = sources.open(path)
        assert not isinstance(source, Parsed)
        assert "rows" not in source.describe()
    assert kept(tmp_path) == []


def test_a_full_disk_is_told_of_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, path = Path.open, csv(tmp_path / "a.csv")
    data = path.read_bytes()

    class Full(io.FileIO):
        def write(self, data: Any, /) -> int:
            if self.tell() + memoryview(data).nbytes > 9000:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(data)

    def opened(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        full = path.suffix == ".part" and mode == "w+b" and "rows" in path.name
        return Full(path, "w+") if full else plain(path, mode, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", opened)
        with pytest.raises(
            FormatError, match=r"cache.*\.rows: the rows of .*a\.csv cannot be written .*No space left.*BRAIDAX_CACHE"
        ):
            sources.open(path)
    assert path.read_bytes() == data
    assert not list(tmp_path.rglob("*.part"))
    assert_reads_as_text(path)


def test_without_a_place_it_says_so_and_reads_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = csv(tmp_path / "a.csv")
    (tmp_path / "file").write_text("mine")
    monkeypatch.setenv("BRAIDAX_CACHE", str(tmp_path / "file"))
    source = sources.open(path)
    assert not isinstance(source, Parsed)
    assert_equal(read(source), read(as_text(path)))
    assert "a.csv: its records are parsed anew in each epoch" in caplog.text
    assert "BRAIDAX_CACHE" in caplog.text
    assert (tmp_path / "file").read_text() == "mine"


def test_what_is_not_ours_is_not_overwritten(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = csv(tmp_path / "a.csv")
    sources.open(path)
    (rows,) = kept(tmp_path)
    rows.write_bytes(b"ten years of work")
    assert_equal(read(sources.open(path)), read(as_text(path)))
    assert rows.read_bytes() == b"ten years of work"
    assert "was not written by Braidax" in caplog.text


def test_damaged_rows_are_told_of(tmp_path: Path) -> None:
    path = csv(tmp_path / "a.csv")
    sources.open(path)
    (rows,) = kept(tmp_path)
    state, data = rows.stat(), bytearray(rows.read_bytes())
    data[4100] ^= 1
    rows.write_bytes(data)
    os.utime(rows, ns=(state.st_atime_ns, state.st_mtime_ns))
    source = sources.open(path)
    read(source, [0])
    with pytest.raises(FormatError, match=r"\.rows: the 4,096 bytes from byte 4,096 on are not those .*delete it"):
        read(source)


def test_rows_are_checked_in_all_of_the_blocks_that_they_lie_in(tmp_path: Path) -> None:
    """A row of 28 bytes crosses the border of a block, one of 12,000 has blocks of its own."""
    narrow = jsonl(tmp_path / "a.jsonl", records())
    wide = jsonl(tmp_path / "b.jsonl", [{"x": [row] * 3000} for row in range(3)])
    for path, place, fine, wrong in ((narrow, 4100, 145, 146), (wide, 6000, 1, 0)):
        sources.open(path)
        (rows,) = [rows for rows in kept(tmp_path) if rows.stat().st_mtime_ns != 1]
        data = bytearray(rows.read_bytes())
        data[place] ^= 1
        rows.write_bytes(data)
        os.utime(rows, ns=(1, 1))
        source = sources.open(path)
        read(source, [fine])
        with pytest.raises(FormatError, match=r"\.rows: the 4,096 bytes from byte 4,096 on are not those"):
            read(source, [wrong])
        os.utime(rows, ns=(1, 1))


def test_a_file_that_changes_is_noticed(tmp_path: Path) -> None:
    path = csv(tmp_path / "a.csv")
    source = sources.open(path)
    with path.open("a") as file:
        file.write("1,1,1\n")
    with pytest.raises(FormatError, match=r"a\.csv: changed while it was open: .*open it again"):
        read(source, [0])


def test_rows_that_are_gone_are_told_of_in_another_process(tmp_path: Path) -> None:
    path = csv(tmp_path / "a.csv")
    sent = pickle.dumps(sources.open(path))
    (rows,) = kept(tmp_path)
    rows.unlink()
    with pytest.raises(FormatError, match=r"\.rows: the rows are gone, or others by now; open .*a\.csv again"):
        pickle.loads(sent)
