"""Local files: the bytes of each range, neighbors in one read, and an error that says what became of a file."""

import gc
import os
import pickle
import random
import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from braidax.data.storage import LocalFiles, Ranges, local
from braidax.data.storage.local import ReadAhead, merged
from braidax.errors import FormatError, ReadError

DATA = random.Random(0).randbytes(300_000)

Triples = list[tuple[int, int, int]]


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    for name, data in {"a": DATA, "b": DATA[::-1][:1000]}.items():
        (tmp_path / name).write_bytes(data)
    return [tmp_path / "a", tmp_path / "b"]


def ranges(triples: Triples) -> Ranges:
    fields = np.asarray(triples, np.int64).reshape(-1, 3).T
    return Ranges(*(np.ascontiguousarray(field) for field in fields))


@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 900), st.integers(0, 100)), max_size=50), st.integers(0, 290)
)
def test_it_reads_what_was_asked_for_in_its_order(paths_of: list[Path], triples: Triples, factor: int) -> None:
    wanted = [(file, offset * (factor if not file else 1), length) for file, offset, length in triples]
    contents = [path.read_bytes() for path in paths_of]
    found = LocalFiles(paths_of).read(ranges(wanted))
    assert [bytes(part) for part in found] == [contents[file][start : start + length] for file, start, length in wanted]


@pytest.fixture(scope="module")
def paths_of(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("files")
    (folder / "a").write_bytes(DATA)
    (folder / "b").write_bytes(DATA[::-1][:1000])
    return [folder / "a", folder / "b"]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 300), st.integers(0, 40)), max_size=40), st.integers(0, 50))
def test_merging_is_what_a_plain_loop_does(triples: Triples, gap_bytes: int) -> None:
    triples = sorted(triples)
    expected: list[list[int]] = []
    for number, (file, start, length) in enumerate(triples):
        if expected and expected[-1][0] == file and start <= expected[-1][2] + gap_bytes:
            expected[-1][2] = max(expected[-1][2], start + length)
            expected[-1][4] = number + 1
        else:
            expected.append([file, start, start + length, number, number + 1])
    found = merged(ranges(triples), gap_bytes=gap_bytes)
    assert found == [(file, start, stop - start, first, last) for file, start, stop, first, last in expected]


def test_neighbors_are_read_at_once(paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []
    pread = os.pread

    def counted(descriptor: int, length: int, offset: int) -> bytes:
        calls.append((offset, length))
        return pread(descriptor, length, offset)[:7_000]  # a read may return less than it was asked for

    monkeypatch.setattr(os, "pread", counted)
    found = LocalFiles(paths).read(ranges([(0, 50_000, 10), (0, 100, 10), (0, 200_000, 9000), (0, 900, 50)]))
    assert calls == [(100, 850), (50_000, 10), (200_000, 9000), (207_000, 2000)]
    assert [bytes(part) for part in found] == [DATA[50_000:50_010], DATA[100:110], DATA[200_000:209_000], DATA[900:950]]


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"nothing: cannot be opened .*No such file"):
        LocalFiles([tmp_path / "nothing"])
    with pytest.raises(FormatError, match=r"is a folder.*expected a file"):
        LocalFiles([tmp_path])


def test_opening_that_fails_leaves_no_descriptor(paths: list[Path]) -> None:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with pytest.raises(FormatError):
        LocalFiles([*paths, "nothing"])
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_descriptors_are_closed_when_nobody_uses_the_files(paths: list[Path]) -> None:
    gc.collect()  # what other tests left
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    files = LocalFiles(paths)
    assert len(os.listdir("/proc/self/fd")) == before + 2  # noqa: PTH208
    del files
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_more_files_than_may_be_open_are_read_by_many_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (64, 64))
    paths = [tmp_path / f"{number}" for number in range(50)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]) * 10)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    files = LocalFiles(paths)
    paths[3].unlink()  # among those that stay open as long as none else is wanted
    paths[40].unlink()
    assert bytes(files.read(ranges([(3, 2, 3)]))[0]) == b"\3\3\3"
    with pytest.raises(FormatError, match="40: cannot be opened"):
        files.read(ranges([(40, 2, 3)]))
    paths[40].write_bytes(b"another")
    with pytest.raises(FormatError, match="40: changed while it was open: 7 bytes, expected 10"):
        files.read(ranges([(40, 2, 3)]))
    chosen = [np.random.default_rng(seed).permutation(np.r_[4:40]) for seed in range(8)]
    windows = [ranges([(int(number), 0, 10) for number in window]) for window in chosen]
    with ThreadPoolExecutor(8) as threads:
        for window, found in zip(chosen, threads.map(files.read, windows), strict=True):
            assert [bytes(part) for part in found] == [bytes([number]) * 10 for number in window]
    assert len(os.listdir("/proc/self/fd")) <= before + 16  # noqa: PTH208


def test_a_file_that_changed_is_an_error(paths: list[Path]) -> None:
    files = LocalFiles(paths)
    paths[1].write_bytes(b"other")
    with pytest.raises(FormatError, match="b: changed while it was open: 5 bytes, expected 1,000"):
        files.read(ranges([(1, 0, 3)]))
    assert bytes(files.read(ranges([(0, 0, 3)]))[0]) == DATA[:3]
    os.utime(paths[0], ns=(1, 1))
    with pytest.raises(FormatError, match="a: changed while it was open"):
        files.read(ranges([(0, 0, 3)]))


def test_a_range_beyond_the_end_is_an_error(paths: list[Path]) -> None:
    with pytest.raises(FormatError, match="b: ends before byte 1,010, which a record needs; it was truncated"):
        LocalFiles(paths).read(ranges([(1, 990, 20)]))


def test_a_disk_that_fails_is_no_error_of_the_record(paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> bytes:
        raise OSError(5, "Input/output error")

    files = LocalFiles(paths)
    monkeypatch.setattr(os, "pread", broken)
    with pytest.raises(ReadError, match=r"a: 20 bytes at offset 10 cannot be read .*Input/output error.*check"):
        files.read(ranges([(0, 10, 20)]))


def test_the_kernel_is_asked_ahead_only_when_reads_had_to_wait(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(local, "ask_ahead", lambda descriptor, offset, length: asked.append((offset, length)))
    waits = [0]
    monkeypatch.setattr(local, "_num_waits", lambda: waits[0])
    files = LocalFiles(paths)
    wanted = ranges([(0, 100, 10), (0, 200_000, 10)])
    files.read(wanted)
    files.prepare(wanted)
    assert asked == []  # warm
    pread = os.pread

    def cold(descriptor: int, length: int, offset: int) -> bytes:
        waits[0] += 1
        return pread(descriptor, length, offset)

    monkeypatch.setattr(os, "pread", cold)
    files.read(wanted)
    assert asked == []
    files.prepare(wanted)
    assert asked == [(100, 10), (200_000, 10)]
    files.read(wanted)
    assert asked == [(100, 10), (200_000, 10)] * 2
    later = local.time.monotonic() + 11
    monkeypatch.setattr(local.time, "monotonic", lambda: later)
    files.prepare(wanted)
    assert len(asked) == 4  # warm again


def test_some_waits_among_many_reads_are_not_cold() -> None:
    ahead = ReadAhead()
    ahead.saw(2, 100)
    assert not ahead.is_cold
    ahead.saw(3, 100)
    assert ahead.is_cold


def test_asking_ahead_brings_a_file_into_memory(tmp_path: Path) -> None:
    path = tmp_path / "cold"
    path.write_bytes(DATA)
    files = LocalFiles([path])
    files._ahead.saw(1, 1)
    files.prepare(ranges([(0, 0, 4096)]))
    assert bytes(files.read(ranges([(0, 5, 10)]))[0]) == DATA[5:15]


def test_files_travel_to_other_processes(paths: list[Path]) -> None:
    files = pickle.loads(pickle.dumps(LocalFiles(paths)))
    assert list(files.sizes) == [len(DATA), 1000]
    assert bytes(files.read(ranges([(0, 5, 10)]))[0]) == DATA[5:15]


def test_files_that_are_all_in_memory_are_not_asked_for_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the disk is asked for ahead is none of the quiet: those reads did not wait because of it."""
    waits, is_read = [0], [False]

    def ask(*place: Any) -> None:
        waits[0] += is_read[0]

    monkeypatch.setattr(local, "_num_waits", lambda: waits[0])
    monkeypatch.setattr(local, "ask_ahead", ask)
    (tmp_path / "a").write_bytes(bytes(100))
    files = LocalFiles([tmp_path / "a"])
    one = np.array([0])
    files._ahead.saw(5, 5)
    for _ in range(20):
        is_read[0] = True
        files.prepare(Ranges(one, one, one + 9))
        is_read[0] = False
        files.read(Ranges(one, one, one + 9))
        assert files.is_cold
    for _ in range(7):  # with the last of those above
        assert files.is_cold
        files.read(Ranges(one, one, one + 9))
    assert not files.is_cold
