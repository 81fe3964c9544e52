"""Windows of records in one piece of memory, read by compiled code as they are read one by one."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from braidax.data.storage import LocalFiles, Ranges, local
from braidax.data.storage.files import compiled, joined, read_joined
from braidax.errors import FormatError, ReadError

CONTENTS = [bytes(range(256)) * 20, b"", bytes(range(255, -1, -1)) * 3]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("files")
    for number, content in enumerate(CONTENTS):
        (folder / f"{number}").write_bytes(content)
    return [folder / f"{number}" for number in range(len(CONTENTS))]


def ranges(*triples: tuple[int, int, int]) -> Ranges:
    fields = np.asarray(triples, np.int64).reshape(-1, 3).T
    return Ranges(*(np.ascontiguousarray(field) for field in fields))


@given(st.lists(st.tuples(st.sampled_from([0, 2]), st.integers(0, 600), st.integers(0, 168)), max_size=20))
def test_the_bytes_of_all_ranges_lie_in_their_order(paths: list[Path], triples: list[tuple[int, int, int]]) -> None:
    files = LocalFiles(paths)
    found = read_joined(files, ranges(*triples))
    expected = [CONTENTS[file][start : start + length] for file, start, length in triples]
    assert [bytes(part) for part in found.payloads()] == expected
    assert found.data.tobytes() == b"".join(expected)
    apart = joined(files.read(ranges(*triples)))
    assert all(np.array_equal(one, other) for one, other in zip(found, apart, strict=True))
    rows = list(range(0, len(triples), 2))
    assert [bytes(part) for part in found.payloads(rows)] == expected[::2]


def test_it_is_the_same_without_compiled_code(paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ranges((2, 5, 7), (0, 0, 3), (2, 1, 2))
    quick = LocalFiles(paths).read_joined(wanted)
    monkeypatch.setattr(local, "compiled", lambda: None)
    slow = LocalFiles(paths).read_joined(wanted)
    assert all(np.array_equal(one, other) for one, other in zip(quick, slow, strict=True))


def test_a_file_that_is_too_short_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(100))
    files = LocalFiles([path])
    with pytest.raises(FormatError, match=r"a: ends before byte 101, which a record needs"):
        files.read_joined(ranges((0, 0, 10), (0, 95, 6), (0, 20, 1)))
    path.write_bytes(bytes(99))
    with pytest.raises(FormatError, match=r"a: changed while it was open: 99 bytes, expected 100"):
        files.read_joined(ranges((0, 0, 10)))
    with pytest.raises(FormatError, match="changed while it was open"):
        files.read_joined(ranges((0, 0, 0)))


def test_a_disk_that_fails_is_named_and_what_it_reads_at_last_is_taken(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, pread, calls = compiled(), local.os.pread, list[int]()
    assert reads is not None
    read = reads.read

    def one(file: int, offsets: np.ndarray, lengths: np.ndarray, starts: np.ndarray, data: np.ndarray) -> int:
        calls.append(len(offsets))
        return read(file, offsets[:1], lengths[:1], starts[:1], data)

    monkeypatch.setattr(reads, "read", one)
    wanted = ranges(*((0, 7 * number, 5) for number in range(6)))
    found = LocalFiles(paths).read_joined(wanted)
    assert [bytes(part) for part in found.payloads()] == [CONTENTS[0][7 * n : 7 * n + 5] for n in range(6)]
    assert calls == [6, 4, 2, 0]  # every second one by Python

    def broken(descriptor: int, length: int, offset: int) -> bytes:
        if offset == 7:
            raise OSError(5, "Input/output error")
        return pread(descriptor, length, offset)

    monkeypatch.setattr(local.os, "pread", broken)
    with pytest.raises(ReadError, match=r"0: 5 bytes at offset 7 cannot be read \(.*Input/output error"):
        LocalFiles(paths).read_joined(wanted)


def test_ranges_that_do_not_fit_the_memory_are_refused(paths: list[Path]) -> None:
    reads = compiled()
    assert reads is not None
    data = np.zeros(10, np.uint8)
    with paths[0].open("rb") as file:

        def read(offset: int, length: int, start: int) -> int:
            return reads.read(file.fileno(), *(np.array([one]) for one in (offset, length, start)), data)

        assert read(3, 10, 0) == 1
        assert data.tolist() == list(range(3, 13))
        assert read(3, 0, 10) == 1
        assert read(len(CONTENTS[0]) - 4, 5, 0) == 0
        for wrong in [(0, 11, 0), (0, 5, 6), (0, -1, 0), (0, 1, -1), (-1, 1, 0), (2**63 - 1, 1, 0), (0, 2**63 - 1, 1)]:
            with pytest.raises(ValueError, match="expected an offset, a length and a place"):
                read(*wrong)
        with pytest.raises(ValueError, match="expected an offset"):
            reads.read(file.fileno(), np.zeros(2, np.int64), np.zeros(1, np.int64), np.zeros(1, np.int64), data)
