"""Files that fit in memory are read in their order before records all over them are."""

import ctypes
import mmap
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from braidax.data.storage import mapped
from braidax.data.storage.files import compiled
from braidax.data.storage.mapped import Mapped

PAGE = mmap.PAGESIZE
ONE = np.int64(1)


def unread(path: Path, num_bytes: int) -> Path:
    """Makes a file of nothing but a hole, which no page of memory holds before it is read."""
    with path.open("wb") as file:
        file.truncate(num_bytes)
    return path


def in_memory(path: Path) -> list[bool]:
    """Returns of each page of a file whether memory holds it."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        array = np.frombuffer(data, np.uint8)
        held = np.zeros(-(-len(array) // PAGE), np.uint8)
        address, num_bytes = ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(len(array))
        assert ctypes.CDLL(None).mincore(address, num_bytes, ctypes.c_void_p(held.ctypes.data)) == 0
        del array
    return (held & 1).astype(bool).tolist()


def spread(memory: Mapped, count: int = 32) -> Any:
    """Returns places from the first byte to the last."""
    return memory.origins[0] + np.linspace(0, memory.sizes[0] - 1, count).astype(np.int64)


class Brings:
    """Stands in for what is compiled: notes what is brought, and says whether all of it is there."""

    def __init__(self, *, answer: bool = True) -> None:
        self.asked: list[tuple[int, float]] = []
        self.answer = answer

    def bring(self, data: Any, seconds: float) -> bool:
        self.asked.append((len(data), seconds))
        return self.answer


@pytest.fixture
def brings(monkeypatch: pytest.MonkeyPatch) -> Brings:
    found = Brings()
    monkeypatch.setattr(mapped, "compiled", lambda: found)
    return found


def test_a_piece_after_the_other_is_brought_until_time_is_up(tmp_path: Path) -> None:
    reads = compiled()
    assert reads is not None
    path = unread(tmp_path / "a", (20 << 20) + 5)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        assert not reads.bring(data, -1.0)
        assert not any(in_memory(path))
        assert reads.bring(data, 60.0)
        assert all(in_memory(path))
        assert reads.bring(data, -1.0)  # nothing is left to bring


def test_only_memory_that_begins_with_a_page_is_brought() -> None:
    reads = compiled()
    assert reads is not None
    memory = np.zeros(3 * PAGE, np.uint8)
    first = -memory.ctypes.data % PAGE
    assert reads.bring(memory[first : first + PAGE], 1.0)
    with pytest.raises(ValueError, match="expected memory that begins with a page, as a mapped file does"):
        reads.bring(memory[first + 1 : first + PAGE], 1.0)


def test_a_window_of_records_all_over_a_file_brings_it_once(tmp_path: Path) -> None:
    path = unread(tmp_path / "a", 1 << 24)
    memory = Mapped([path])
    memory.gather(spread(memory), np.empty((32, 1), np.uint8))
    assert all(in_memory(path))


def test_files_are_brought_in_their_order_within_half_a_second(tmp_path: Path, brings: Brings) -> None:
    sizes = [64 * PAGE, 3 * PAGE, 5]
    memory = Mapped([unread(tmp_path / str(size), size) for size in sizes])
    places = np.concatenate([memory.origins, memory.origins + np.array(sizes) - 1] * 3)
    for _ in range(2):
        with memory.reading(places, ONE):
            assert [size for size, _ in brings.asked] == sizes
    seconds = [seconds for _, seconds in brings.asked]
    assert 0.5 > seconds[0] > seconds[1] > seconds[2]


def test_what_is_not_brought_in_time_is_left_to_reads(tmp_path: Path, brings: Brings) -> None:
    brings.answer = False
    memory = Mapped([unread(tmp_path / name, 64 * PAGE) for name in "ab"])
    for _ in range(2):
        with memory.reading(np.concatenate([memory.origins, memory.origins + 64 * PAGE - 1] * 8), ONE):
            assert len(brings.asked) == 1


@pytest.mark.parametrize("why", ["few records", "records that lie close to each other", "more than memory"])
def test_files_that_are_not_brought(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, brings: Brings, why: str) -> None:
    if why == "more than memory":
        monkeypatch.setattr(mapped, "_physical_bytes", lambda: 100 * PAGE)
    memory = Mapped([unread(tmp_path / "a", 64 * PAGE)])
    places = spread(memory)
    if why == "few records":
        places = spread(memory, 15)
    elif why == "records that lie close to each other":
        places = memory.origins[0] + np.arange(32) * (PAGE // 2)
    for _ in range(2):
        with memory.reading(places, ONE):
            assert not brings.asked


def test_windows_wait_until_the_files_are_brought(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended = threading.Event(), threading.Event()
    brought, read = list[int](), list[bool]()

    def bring(data: Any, seconds: float) -> bool:
        begun.set()
        brought.append(len(data))
        return ended.wait(20)

    monkeypatch.setattr(mapped, "compiled", lambda: SimpleNamespace(bring=bring))
    memory = Mapped([unread(tmp_path / "a", 64 * PAGE)])

    def window() -> None:
        with memory.reading(spread(memory), ONE):
            read.append(ended.is_set())

    threads = [threading.Thread(target=window) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert begun.wait(20)
    assert not read
    ended.set()
    for thread in threads:
        thread.join(20)
    assert read == [True] * 3
    assert brought == [64 * PAGE]
