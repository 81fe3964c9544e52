import contextlib
import pickle
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import braidax.data.formats.records.lines as lines
from braidax.data.formats.records.lines import open_lines, scan_filled_lines, scan_lines
from braidax.data.formats.records.records import RecordSource
from braidax.data.storage import LocalFiles
from braidax.errors import FormatError, RecordError
from tests.support.data.formats.reading import read


def opened(folder: Path, *contents: bytes) -> RecordSource:
    paths = [folder / f"{number}.txt" for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    return open_lines(LocalFiles(paths))


def texts(source: Any) -> list[str]:
    return read(source)["text"].tolist()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"one\ntwo\n", ["one", "two"]),
        (b"one\ntwo", ["one", "two"]),
        (b"one\r\ntwo\r\n", ["one", "two"]),
        (b"one\r\ntwo\r", ["one", "two"]),
        (b"\n\none\n\n", ["", "", "one", ""]),
        (b"\r\n\r\none\r\n", ["", "", "one"]),
        (b"\xef\xbb\xbfone\n\xef\xbb\xbftwo\n", ["one", "\ufefftwo"]),
        (b"\xef\xbb\xbf\r\none", ["", "one"]),
        ("grün\n日本\u2028x\n".encode(), ["grün", "日本\u2028x"]),
        (b"a\rb\n\x00\n", ["a\rb", "\x00"]),
    ],
)
def test_lines_of_every_kind(tmp_path: Path, content: bytes, expected: list[str]) -> None:
    assert texts(opened(tmp_path, content)) == expected


@given(
    content=st.lists(st.sampled_from([b"\n", b"\r\n", b"\r", b"a", b"bcd", b"\xef\xbb\xbf"])), size=st.integers(3, 7)
)
def test_chunks_of_any_size_give_the_same_lines(content: list[bytes], size: int) -> None:
    data = b"".join(content)
    expected = data.removeprefix(lines.BOM).split(b"\n")
    expected = [line.removesuffix(b"\r") for line in (expected if expected[-1] else expected[:-1])]
    for scan, wanted in ((scan_lines, expected), (scan_filled_lines, [line for line in expected if line])):
        with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
            patch.setattr(lines, "_CHUNK_BYTES", size)
            found: list[bytes] = []
            file = stack.enter_context(tempfile.TemporaryFile())
            file.write(data)
            file.seek(0)
            for offsets, lengths in scan(file, "x"):
                found += [data[at : at + n] for at, n in zip(offsets.tolist(), lengths.tolist(), strict=True)]
        assert found == wanted


def test_many_files_are_one_source(tmp_path: Path) -> None:
    source = opened(tmp_path, b"a\nb", b"", b"c\n")
    assert texts(source) == ["a", "b", "c"]
    assert read(source, [2, 0, 2])["text"].tolist() == ["c", "a", "c"]
    assert texts(pickle.loads(pickle.dumps(source))) == ["a", "b", "c"]
    facts = source.describe()
    assert (facts["format"], facts["files"], facts["samples"]) == ("text lines", "3: 0.txt, 1.txt, 2.txt", "3")
    assert str(tmp_path) in facts["index"]


def test_a_line_longer_than_a_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "_CHUNK_BYTES", 1000)
    assert texts(opened(tmp_path, b"x" * 5000 + b"\ny\n")) == ["x" * 5000, "y"]


def test_text_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    source = opened(tmp_path, b"one\ntwo\nd\xe9j\xe0\n")
    with pytest.raises(
        RecordError, match=r"0\.txt, record 2 \(at byte 8\): is no UTF-8 text .*byte 0xe9 at 1 of the record\); convert"
    ):
        read(source, [0, 2])


def test_utf_16_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"0\.txt: begins with b'\\xff\\xfe', the mark of UTF-16; expected UTF-8"):
        opened(tmp_path, "one\n".encode("utf-16"))


def test_files_without_a_line(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"0\.txt: holds 0 records in 2 file\(s\); expected at least one"):
        opened(tmp_path, b"", b"")


@pytest.mark.parametrize("change", ["longer", "shorter", "as long"])
def test_a_change_while_open_is_an_error_and_opening_again_heals(tmp_path: Path, change: str) -> None:
    source = opened(tmp_path, b"one\ntwo\n")
    content = {"longer": b"one\ntwo\nthree\n", "shorter": b"one\n", "as long": b"eno\nowt\n"}[change]
    (tmp_path / "0.txt").write_bytes(content)
    with pytest.raises(FormatError, match=r"0\.txt: .*expected 8.*open it again"):
        read(source, [0])
    assert texts(open_lines(LocalFiles([tmp_path / "0.txt"]))) == content.decode().split()


def test_indices_are_checked(tmp_path: Path) -> None:
    source = opened(tmp_path, b"one\n")
    with pytest.raises(RecordError, match=r"there is no record 1; it holds 1 samples"):
        read(source, [1])
    source.prepare(np.array([0, 1, -1]))
