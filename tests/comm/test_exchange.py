"""Streams: drawn ones, bounded memory, spilling, and all that can go wrong at either end."""

import ctypes
import gc
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies

from braidax.comm import Communicator
from braidax.comm.exchange import spilling
from braidax.comm.exchange.frames import begins, cut, frame_of, items_of
from braidax.comm.group_messages import CREDIT, MAX_NUMBER, STREAM, tag_of
from braidax.errors import Aborted, ArgumentError, CommError, WaitTimeout
from tests.support.comm.ranks import outcomes, results
from tests.support.comm.streaming import Drawn, take_part
from tests.support.comm.transports.tcps import IN_PYTHON
from tests.support.tree import ROOT

KIB, MIB = 1 << 10, 1 << 20
Item = tuple[int, list[Any]]


@pytest.mark.parametrize("transport", ["in-process", "tcp", "ucx"])
@hypothesis.settings(max_examples=12)
@hypothesis.given(
    key=strategies.integers(0, 1 << 30),
    size=strategies.integers(1, 4),
    chunk_bytes=strategies.sampled_from([KIB, 3 * KIB, 64 * KIB]),
    num_chunks=strategies.integers(3, 20),
    num_items=strategies.integers(0, 60),
    part=strategies.sampled_from([0.05, 0.5, 1.0]),
    spills=strategies.booleans(),
)
def test_what_arrives_is_what_was_sent(
    transport: str, key: int, size: int, chunk_bytes: int, num_chunks: int, num_items: int, part: float, spills: bool
) -> None:
    """In the order of each source, whatever fits in how many chunks, up to several windows in all."""
    window_bytes = size * chunk_bytes * num_chunks
    largest = int(part * (window_bytes // 16 * 15 // size - 2 * chunk_bytes))
    spill = Path(tempfile.gettempdir()) if spills else None
    drawn = Drawn(str(key), num_items, largest, chunk_bytes, window_bytes, spill)

    def twice(comm: Communicator) -> None:
        take_part(comm, drawn)
        take_part(comm, drawn)

    results(size, twice, transport=transport)


@hypothesis.given(
    lengths=strategies.lists(strategies.lists(strategies.integers(0, 300), max_size=5), min_size=1, max_size=8),
    chunk_bytes=strategies.sampled_from([64, 192, 100_000]),
)
def test_frames_are_read_as_they_were_made(lengths: list[list[int]], chunk_bytes: int) -> None:
    draw = np.random.default_rng(0)
    items = [[memoryview(draw.bytes(length)) for length in item] for item in lengths]
    parts, num_bytes = frame_of(items)
    chunks = cut(parts, num_bytes, chunk_bytes)
    assert all(sum(map(len, chunk)) == chunk_bytes for chunk in chunks[:-1])
    memory = np.frombuffer(b"".join(b"".join(chunk) for chunk in chunks), np.uint8)
    assert begins(memory.data, 0, min(num_bytes, chunk_bytes)) == (0, num_bytes)
    found = list(items_of(memory.data))
    assert [[bytes(memory.data[begin:end]) for begin, end in item] for item in found] == [
        [bytes(part) for part in item] for item in items
    ]
    assert all(begin % 64 == 0 for item in found for begin, end in item)


@hypothesis.given(data=strategies.binary(max_size=200), at=strategies.integers(0, 60), byte=strategies.integers(0, 255))
def test_what_is_no_frame_is_refused(data: bytes, at: int, byte: int) -> None:
    """A frame with any byte of its table changed is either one still, within its memory, or refused."""
    memory = np.frombuffer(b"".join(frame_of([[memoryview(data)], []])[0]), np.uint8).copy()
    memory[at % min(48, len(memory))] = byte
    try:
        kind, whole = begins(memory.data, 0, len(memory))
        if kind == 0 and whole == len(memory):
            assert all(0 <= begin <= end <= len(memory) for item in items_of(memory.data) for begin, end in item)
    except ValueError:
        pass
    with pytest.raises(ValueError, match="it has 5 bytes"):
        begins(memory.data, 0, 5)


def stream(comm: Communicator, parts: Callable[[], Iterator[Item]], **options: Any) -> list[tuple[int, list[bytes]]]:
    found = comm.exchange(parts(), **{"chunk_bytes": 4 * KIB, "window_bytes": 256 * KIB, **options})
    return [(source, [bytes(buffer) for buffer in buffers]) for source, buffers in found]


def nothing() -> Iterator[Item]:
    yield from ()


def one_way(num_items: int, num_bytes: int) -> Callable[[Communicator], list[Any]]:
    """Rank 0 sends to rank 1."""

    def run(comm: Communicator) -> list[Any]:
        parts = ((1, [bytes(num_bytes)]) for _ in range(num_items if comm.rank == 0 else 0))
        return stream(comm, lambda: parts)

    return run


@pytest.mark.parametrize("transport", ["in-process", "tcp", "ucx"])
def test_all_that_a_producer_may_raise_is_told_to_all(transport: str) -> None:
    def broken(comm: Communicator) -> None:
        def parts() -> Iterator[Item]:
            yield 1, [bytes(10_000)]
            raise FileNotFoundError("part 7")

        stream(comm, parts if comm.rank == 0 else nothing)

    mine, *others = outcomes(3, broken, transport=transport)
    assert isinstance(mine, FileNotFoundError)
    for other in others:
        assert isinstance(other, Aborted)
        assert str(other).endswith("ended the generation: exchange failed: FileNotFoundError: part 7")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((7, [b"x"]), r"parts' rank=7: expected a rank from 0 to 1"),
        ("ab!", r"parts= yields a str: expected pairs of a rank and the buffers for it"),
        ((1, ["text"]), r"parts\[0\]= is a str: expected a NumPy array, a buffer of bytes"),
        (
            (1, [bytes(200 * KIB)]),
            r"parts= yields an item of 204,800 bytes for rank 1, 204,864 with its table, where window_bytes=262,144 "
            r"has room for 121,\d+ of each of 2 ranks; raise window_bytes=, or yield the item in smaller ones",
        ),
    ],
)
def test_items_that_cannot_be(given: Any, words: str) -> None:
    mine, other = outcomes(2, lambda comm: stream(comm, lambda: iter([given] if comm.rank == 0 else [])))
    assert isinstance(mine, ArgumentError)
    with pytest.raises(ArgumentError, match=words):
        raise mine
    assert isinstance(other, Aborted)
    assert str(mine) in str(other)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"chunk_bytes": 10}, "chunk_bytes=10: expected a whole number of bytes, at least 1,024"),
        ({"window_bytes": 0}, "window_bytes=0: expected a whole number of bytes, at least 1"),
        (
            {"window_bytes": 8 * KIB},
            r"window_bytes=8,192: expected room for two chunks of each of 1 ranks, 9,\d+ bytes",
        ),
        ({"spill": "/no/such"}, "spill='/no/such' takes no file: .*; expected a folder of a local disk"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], words: str) -> None:
    (found,) = outcomes(1, lambda comm: stream(comm, nothing, **options))
    with pytest.raises(ArgumentError, match=words):
        raise found


def test_the_least_window_that_an_error_names_is_enough() -> None:
    def run(comm: Communicator) -> int:
        with pytest.raises(ArgumentError, match="expected room for two") as caught:
            comm.exchange([], chunk_bytes=5000, window_bytes=KIB)
        least = int(str(caught.value).split(" ranks, ")[1].split(" bytes")[0].replace(",", ""))
        return len(stream(comm, lambda: iter([(0, [bytes(1000)])] * 5), chunk_bytes=5000, window_bytes=least))

    # An argument that cannot be ends the generation of several ranks, as they would wait for this one.
    assert results(1, run) == [5]


def test_ranks_that_do_not_bring_the_same_window() -> None:
    found = outcomes(2, lambda comm: stream(comm, nothing, window_bytes=(1 + comm.rank) * MIB))
    assert {type(each) for each in found} <= {CommError, Aborted}
    assert all("exchange of chunks of 4,096 bytes in windows of 2,097,152" in str(each) for each in found)


def test_a_rank_that_leaves_a_stream_ends_it_for_all() -> None:
    def run(comm: Communicator) -> None:
        for _ in comm.exchange(((1 - comm.rank, [bytes(1000)]) for _ in range(500)), chunk_bytes=4 * KIB):
            if comm.rank == 0:
                break
        comm.barrier()

    for found in outcomes(2, run):
        assert isinstance(found, Aborted)
        assert "rank 0 (host" in str(found)
        assert "exchange was left before its end; expected every rank to take all items" in str(found)


def test_a_stream_that_is_closed_ends_the_generation_and_one_that_is_over_does_not() -> None:
    def run(comm: Communicator) -> str:
        over = comm.exchange([])
        assert list(over) == []
        over.close()
        del over
        comm.barrier()
        begun = comm.exchange([])
        if comm.rank == 0:
            begun.close()
        assert comm.rank or list(begun) == []
        comm.barrier()
        return "not reached"

    for found in outcomes(2, run):
        assert isinstance(found, Aborted)
        assert "exchange was left before its end" in str(found)


def test_a_consumer_that_never_reads_is_named() -> None:
    done = threading.Event()

    def run(comm: Communicator) -> None:
        begun = comm.exchange(
            ((1, [bytes(4 * KIB)]) for _ in range(100 if comm.rank == 0 else 0)),
            chunk_bytes=4 * KIB,
            window_bytes=64 * KIB,
        )
        if comm.rank == 1:
            assert done.wait(30)
        try:
            list(begun)
        finally:
            done.set()

    late, other = outcomes(2, run, timeout_seconds=1.0)
    with pytest.raises(
        WaitTimeout, match=r"rank 0 .* waited up to the limit for rank 1 \(host .*\) to take items of a str"
    ):
        raise late
    assert isinstance(other, Aborted)
    assert "exchange took longer than 1 s" in str(other)


def test_a_source_that_never_ends_is_named() -> None:
    done = threading.Event()

    def run(comm: Communicator) -> None:
        def parts() -> Iterator[Item]:
            assert comm.rank == 0 or done.wait(30)
            yield from ()

        try:
            list(comm.exchange(parts()))
        finally:
            done.set()

    late, _ = outcomes(2, run, timeout_seconds=1.0)
    with pytest.raises(
        WaitTimeout, match=r"rank 0 .* waited up to the limit for rank 1 \(host .*\) to go on with a stream"
    ):
        raise late


@pytest.mark.parametrize("transport", ["in-process", "tcp", "ucx"])
def test_an_item_ends_with_the_next_one_and_what_was_made_of_it_does_not(transport: str) -> None:
    """Arrays of items keep their part of the window; what is only a view is of no use behind the next item."""

    def run(comm: Communicator) -> None:
        kept: list[tuple[int, np.ndarray]] = []
        before: list[memoryview] = []
        stream = comm.exchange(
            ((1, [np.full(3000, index, np.uint8)]) for index in range(200 if comm.rank == 0 else 0)),
            chunk_bytes=4 * KIB,
            window_bytes=256 * KIB,
        )
        for index, (_, buffers) in enumerate(stream):
            if before:
                with pytest.raises(ValueError, match="released"):
                    bytes(before[0])
            before = buffers
            if index % 4 == 1:
                kept.append((index, np.frombuffer(buffers[0], np.uint8)))
                before = []
            if len(kept) == 5:
                for number, array in kept:
                    assert (array == number).all()
                kept.clear()
                del array

    results(2, run, transport=transport)


def test_a_window_that_is_full_of_what_the_caller_keeps() -> None:
    def run(comm: Communicator) -> None:
        parts = ((1, [bytes(4 * KIB)]) for _ in range(200 if comm.rank == 0 else 0))
        stream = comm.exchange(parts, chunk_bytes=4 * KIB, window_bytes=64 * KIB)
        kept = [np.frombuffer(buffers[0], np.uint8) for _, buffers in stream]
        raise AssertionError(len(kept))

    _, late = outcomes(2, run, timeout_seconds=1.0)
    if isinstance(late, Aborted):  # its peer came first
        assert "as its window is full" in str(late)
    else:
        with pytest.raises(WaitTimeout, match="its window full of items of ranks 0 of which something was made"):
            raise late


def test_what_a_thread_lets_go_of_frees_the_window() -> None:
    def run(comm: Communicator) -> int:
        kept: list[np.ndarray] = []
        count = 0
        parts = ((1, [bytes(4 * KIB)]) for _ in range(60 if comm.rank == 0 else 0))
        timers: list[threading.Timer] = []
        for _, buffers in comm.exchange(parts, chunk_bytes=4 * KIB, window_bytes=64 * KIB):
            count += 1
            kept.append(np.frombuffer(buffers[0], np.uint8))
            del buffers
            if len(kept) == 6:  # nearly all: the next call waits for the thread
                timers.append(threading.Timer(0.1, kept.clear))
                timers[-1].start()
        for timer in timers:
            timer.join()
        return count

    assert results(2, run) == [0, 60]


def test_producers_go_on_where_there_is_a_disk(tmp_path: Path) -> None:
    """All is drawn while nobody takes anything, several windows of it, and the folder stays empty."""
    drawn = threading.Event()

    def run(comm: Communicator) -> int:
        def parts() -> Iterator[Item]:
            for index in range(300):
                yield 1, [np.full(4000, index, np.uint16)]
            assert list(tmp_path.iterdir()) == []
            drawn.set()

        stream = comm.exchange(
            parts() if comm.rank == 0 else [], chunk_bytes=4 * KIB, window_bytes=64 * KIB, spill=tmp_path
        )
        if comm.rank == 1:
            assert drawn.wait(30)
        count = 0
        for count, (_, buffers) in enumerate(stream, 1):
            assert bytes(buffers[0]) == np.full(4000, count - 1, np.uint16).tobytes()
        return count

    before = list(Path("/proc/self/fd").iterdir())
    assert results(2, run, transport="tcp") == [0, 300]
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) <= len(before)
    assert list(tmp_path.iterdir()) == []


def test_places_on_disk_are_used_again(tmp_path: Path) -> None:
    file = spilling.SpillFile(tmp_path, KIB)
    for turn in range(5):
        places = [file.write([memoryview(bytes([turn, index]) * 100)] * 3, 600) for index in range(4)]
        assert sorted(places) == [0, 1, 2, 3]
        assert file.num_waiting == 4
        for index, place in enumerate(places):
            memory = file.read(place, 600)
            assert bytes(memory[:600]) == bytes([turn, index]) * 300
            file.give_back(memory)
    file.close()
    file.close()


FULL_DISK = """
import subprocess, sys
from tests.support.comm.ranks import outcomes
folder = sys.argv[1]
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=True)
def run(comm):
    parts = ((1, [bytes(4000)]) for _ in range(2000 if comm.rank == 0 else 0))
    stream = comm.exchange(parts, chunk_bytes=4096, window_bytes=1 << 16, spill=folder)
    if comm.rank == 1:
        comm.recv(0, tag=7)
    list(stream)
for outcome in outcomes(2, run, timeout_seconds=20):
    print(type(outcome).__name__, outcome)
"""


_PRIVATE = ["unshare", "--user", "--map-root-user", "--mount"]


@pytest.mark.skipif(
    subprocess.run([*_PRIVATE, "true"], check=False).returncode != 0, reason="needs a mount namespace of its own"
)
def test_a_full_disk_is_an_exact_error(tmp_path: Path) -> None:
    done = subprocess.run(
        [*_PRIVATE, sys.executable, "-c", FULL_DISK, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    mine, other = done.stdout.splitlines()
    assert mine.startswith(f"CommError spill={str(tmp_path)!r} cannot take a chunk of ")
    assert "No space left on device; make room there, name a folder of another disk" in mine
    assert other.startswith("Aborted rank 0 ")
    assert "exchange failed: spill=" in other


def test_nothing_is_left_of_streams_in_the_transport() -> None:
    """Every receive that was posted has ended, and every message has been received."""

    def run(comm: Communicator) -> list[int]:
        left: list[int] = []
        for _ in range(3):
            one_way(40, 3000)(comm)
            list(comm.exchange([]))
            comm.barrier()
            transport: Any = comm._progress._transport
            tags = [tag for link in transport._worker._links.values() for tag in (*link.posted, *link.kept)]
            left.append(sum(tag >> 30 & 7 in (STREAM, CREDIT) for tag in tags))
        return left

    assert results(3, run, transport=IN_PYTHON) == [[0, 0, 0]] * 3


def test_hostile_chunks_and_credits_are_refused() -> None:
    """A peer that sends what cannot be ends the generation, and writes nothing where it must not."""

    def run(comm: Communicator, chunk: bytes, credit: bytes) -> None:
        number = comm._group.calls.next_tag & MAX_NUMBER
        if comm.rank == 0:
            if chunk:
                comm._progress.send(1, tag_of(0, STREAM, number), (memoryview(chunk),))
            if credit:
                comm._progress.send(1, tag_of(0, CREDIT, number), (memoryview(credit),))
        stream(comm, nothing)

    word = ctypes.c_uint64
    wrong = [
        (b"short", b"", "it has 5 bytes"),
        (bytes(word(9)) + bytes(word(24)) + bytes(word(0)), b"", "its kind is 9"),
        (bytes(word(0)) + bytes(word(1 << 40)) + bytes(word(0)), b"", "a frame of 1,099,511,627,776 bytes begins at"),
        (bytes(word(0)) + bytes(word(24)) + bytes(word(1 << 60)), b"", "its table has 1,152,921,504,606,846,976 words"),
        (b"", bytes(word(77)), "gave back 77 chunks of a stream, 0 before, of 0 that"),
        (b"", b"abc", "chunks of a stream, 0 before, of 0 that"),
    ]
    for chunk, credit, words in wrong:
        found = outcomes(2, lambda comm, chunk=chunk, credit=credit: run(comm, chunk, credit), timeout_seconds=10)
        assert words in str(found[1]), found
        assert isinstance(found[1], CommError)
