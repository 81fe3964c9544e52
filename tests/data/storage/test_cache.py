"""The cache: right bytes or none, whatever crashed, and never more of them than it may hold."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braidax.data.storage.cache import PageCache, default_folder
from braidax.data.storage.options import PAGE_BYTES
from braidax.errors import ArgumentError
from tests.support.data.storage.cache import DATA, SEGMENT, cache, write_and_read
from tests.support.tree import ROOT


def stored(folder: Path, **options: object) -> PageCache:
    made = cache(folder, **options)
    made.store(0, 0, memoryview(DATA))
    return made


def segment_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*-*") if path.is_file())


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.integers(0, 41), st.integers(1, 20)), max_size=6),
    st.lists(st.tuples(st.integers(0, len(DATA) - 1), st.integers(1, 3 * SEGMENT)), max_size=6),
)
def test_it_holds_what_was_stored(
    tmp_path_factory: pytest.TempPathFactory, writes: list[tuple[int, int]], reads: list[tuple[int, int]]
) -> None:
    made, pages = cache(tmp_path_factory.mktemp("cache")), set[int]()
    for page, num_pages in writes:
        made.store(0, page * PAGE_BYTES, memoryview(DATA)[page * PAGE_BYTES : (page + num_pages) * PAGE_BYTES])
        pages |= set(range(page, min(page + num_pages, 41)))
    spans = sorted((0, start, min(start + length, len(DATA))) for start, length in reads)
    covered = [set(range(start // PAGE_BYTES, -(-stop // PAGE_BYTES))) <= pages for _, start, stop in spans]
    assert made.holds(spans) == covered
    assert made.read(spans) == [DATA[a:b] if here else None for (_, a, b), here in zip(spans, covered, strict=True)]


def test_parts_of_pages_are_not_stored(tmp_path: Path) -> None:
    made = cache(tmp_path)
    made.store(0, 10, memoryview(DATA)[10 : 3 * PAGE_BYTES + 10])
    pages = [(0, page * PAGE_BYTES, (page + 1) * PAGE_BYTES) for page in range(4)]
    assert made.holds(pages) == [False, True, True, False]


def test_other_versions_and_other_objects_are_told_apart(tmp_path: Path) -> None:
    stored(tmp_path)
    whole = [(0, 0, len(DATA))]
    assert cache(tmp_path).read(whole) == [DATA]
    assert cache(tmp_path, keys=("b",)).read(whole) == [None]
    assert cache(tmp_path, data=DATA + b"x").read(whole) == [None]
    unnamed = stored(tmp_path, keys=("",))
    assert unnamed.read(whole) == [None]


HEAD = PAGE_BYTES  # in front of the table of checksums, which takes 128 bytes
PAGES = HEAD + 128


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: data[: HEAD + 200] + bytes(len(data) - HEAD - 200),
        lambda data: data[:-5] + b"\1" + data[-4:],
        lambda data: data[:HEAD] + b"\1" + data[HEAD + 1 :],
        lambda data: (  # the second page is the first one, checksum and all
            data[: HEAD + 8]
            + data[HEAD : HEAD + 8]
            + data[HEAD + 16 : PAGES]
            + 2 * data[PAGES : PAGES + PAGE_BYTES]
            + data[PAGES + 2 * PAGE_BYTES :]
        ),
        lambda data: data[: PAGES + PAGE_BYTES] + data[PAGES : PAGES + PAGE_BYTES] + data[PAGES + 2 * PAGE_BYTES :],
    ],
)
def test_a_damaged_page_is_not_returned_and_can_be_stored_again(tmp_path: Path, damage: object) -> None:
    made = stored(tmp_path)
    [path] = [path for path in segment_files(tmp_path) if path.name.endswith("-1")]
    path.write_bytes(damage(path.read_bytes()))
    pages = [(0, page * PAGE_BYTES, (page + 1) * PAGE_BYTES) for page in range(40)]
    found = made.read(pages)
    assert None in found[16:32]
    for (_, start, stop), page in zip(pages, found, strict=True):
        assert page in (None, DATA[start:stop])
    assert None not in found[:16] + found[32:]
    made.store(0, SEGMENT, memoryview(DATA)[SEGMENT : 2 * SEGMENT])
    assert made.read(pages) == [DATA[start:stop] for _, start, stop in pages]


def test_the_longest_unused_segments_make_room(tmp_path: Path) -> None:
    room = 20 * SEGMENT
    names = tuple(f"object {number}" for number in range(24))
    data = DATA[:SEGMENT]
    made = cache(tmp_path, cache_bytes=room, keys=names, data=data)
    for number in range(24):
        made.store(number, 0, memoryview(data))
        path = made.path(number, 0)
        if path.exists():
            os.utime(path, (number, number))  # long ago, in this order
        if number == 10:
            assert made.read([(3, 0, 5)]) == [data[:5]]  # which makes it young
        used = sum(path.stat().st_blocks * 512 for path in segment_files(tmp_path))
        assert used <= room
    here = made.holds([(number, 0, 5) for number in range(24)])
    assert here[3]
    assert not any(here[:3])
    assert all(here[-12:])


def test_a_full_disk_is_said_once_and_does_not_stop_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = cache(tmp_path)

    def full(*arguments: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.warns(RuntimeWarning, match=r"cache_dir=.*pages cannot be written .*No space left.*cache_bytes=0"):
        made.store(0, 0, memoryview(DATA))
    made.store(0, 0, memoryview(DATA))
    assert made.read([(0, 0, 10)]) == [None]


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ArgumentError, match=r"cache_dir='.*file' cannot be written .*cache_bytes=0 for no cache"):
        cache(tmp_path / "file")


def test_the_default_folder_is_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("BRAIDAX_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "braidax" / "remote"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_folder() == tmp_path / ".cache" / "braidax" / "remote"
    monkeypatch.setenv("BRAIDAX_CACHE", str(tmp_path / "mine"))
    assert default_folder() == tmp_path / "mine" / "remote"


def test_processes_share_it_while_it_overflows_and_one_of_them_is_killed(tmp_path: Path) -> None:
    room = 12 * SEGMENT
    code = (
        f"import sys; from pathlib import Path; sys.path.insert(0, {str(ROOT)!r})\n"
        "from tests.support.data.storage.cache import write_and_read\n"
        f"print('ready', flush=True); write_and_read(Path({str(tmp_path)!r}), 9, 1 << 30, {room})"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "ready\n"
            write_and_read(tmp_path, 1, 1500, room)
            assert other.poll() is None  # it has found no wrong bytes
        finally:
            other.send_signal(signal.SIGKILL)
    write_and_read(tmp_path, 2, 200, room)
    made = cache(tmp_path, cache_bytes=room, keys=tuple(f"object {number}" for number in range(8)))
    places = [(file, page * PAGE_BYTES) for file in range(8) for page in range(41)]
    found = made.read([(file, start, min(start + PAGE_BYTES, len(DATA))) for file, start in places])
    assert sum(page is not None for page in found) > 40
    assert all(page in (None, DATA[start : start + PAGE_BYTES]) for (_, start), page in zip(places, found, strict=True))
    assert sum(path.stat().st_blocks * 512 for path in segment_files(tmp_path)) <= room
