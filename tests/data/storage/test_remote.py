"""Remote files: the right bytes or an error that says why, whatever the server does."""

import gc
import math
import os
import pickle
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braidax.data.storage import Files, Ranges, Remote, flights, open_files
from braidax.errors import DataError, FormatError, ReadError, WaitTimeout
from tests.support.data.storage.faulty_server import RIGHT, Reply, Request, Server, serving

DATA = random.Random(0).randbytes(1 << 20)
SMALL = random.Random(1).randbytes(5000)
UNCACHED = Remote(cache_bytes=0, timeout_seconds=20.0)


@pytest.fixture
def server() -> Iterator[Server]:
    with serving({"train/a.bin": DATA, "train/b c.bin": SMALL, "train/none.bin": b""}) as running:
        yield running


def ranges(*triples: tuple[int, int, int]) -> Ranges:
    fields = np.asarray(triples, np.int64).reshape(-1, 3).T
    return Ranges(*(np.ascontiguousarray(field) for field in fields))


def opened(server: Server, remote: Remote = UNCACHED) -> Files:
    return open_files([f"{server.url}/train/a.bin", f"{server.url}/train/b%20c.bin"], remote=remote)


def bytes_of(files: Files, wanted: Ranges) -> list[bytes]:
    return [bytes(part) for part in files.read(wanted)]


def right(wanted: Ranges) -> list[bytes]:
    return [
        (DATA, SMALL)[file][offset : offset + length] for file, offset, length in zip(*map(list, wanted), strict=True)
    ]


def some_ranges(seed: int, num: int, *, most: int = 3000) -> Ranges:
    rng = np.random.default_rng(seed)
    file = rng.integers(0, 2, num)
    length = rng.integers(0, np.where(file == 0, most, 2000))
    offset = rng.integers(0, np.where(file == 0, len(DATA), len(SMALL)) - length + 1)
    return Ranges(file, offset, length)


def fault(seed: int, share: float) -> Callable[[Request], Reply]:
    """Returns faults that depend on the seed and the request's number, for a share of the requests."""
    kinds = (
        Reply(status=500),
        Reply(status=503),
        Reply(keep=0.5),
        Reply(keep=0.0),
        Reply(shorter=1),
        Reply(missing=1),
        Reply(ignore_range=True),
        Reply(delay_seconds=0.05),
    )

    def answer(request: Request) -> Reply:
        rng = random.Random(f"{seed} {request.number}")
        return rng.choice(kinds) if rng.random() < share and request.stop != 1 else RIGHT

    return answer


@settings(max_examples=8)
@given(
    st.integers(0, 1 << 30),
    st.sampled_from([0, 1 << 26]),
    st.sampled_from([None, 4096]),
    st.sampled_from([None, 0.0, 0.01, math.inf]),
    st.booleans(),
)
def test_bytes_are_right_whatever_the_server_does(
    seed: int, cache_bytes: int, block_bytes: int | None, hedge_seconds: float | None, honors_if_match: bool
) -> None:
    with serving({"train/a.bin": DATA, "train/b c.bin": SMALL}) as server, tempfile.TemporaryDirectory() as folder:
        server.honors_if_match = honors_if_match
        remote = Remote(
            cache_dir=folder, cache_bytes=cache_bytes, block_bytes=block_bytes, hedge_seconds=hedge_seconds, retries=20
        )
        files = opened(server, remote)
        server.answer = fault(seed, 0.2)
        windows = [some_ranges(seed + number, 25) for number in range(4)]
        windows[3] = windows[0]
        for window in windows[1:3]:
            files.prepare(window)
        with ThreadPoolExecutor(3) as threads:
            found = list(threads.map(lambda window: bytes_of(files, window), windows))
        assert found == [right(window) for window in windows]
        assert any(request.start != 0 for request in server.requests)


@pytest.mark.parametrize("honors_if_match", [True, False])
def test_hundreds_of_requests_are_in_flight(server: Server, honors_if_match: bool) -> None:
    server.honors_if_match = honors_if_match
    files = opened(server)
    server.delay_seconds = 0.1
    wanted = ranges(*((0, 40_000 * number, 100) for number in range(26)), *((1, 0, 5),))
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(bytes_of, files, wanted).result(10) == right(wanted)
    assert server.most_open_requests == 27  # from one thread


def test_many_objects_are_read_too_and_each_request_demands_its_version(server: Server) -> None:
    server.objects |= {f"{number}": bytes([number]) * 10 for number in range(20)}
    files = open_files([f"{server.url}/{number}" for number in range(20)], remote=UNCACHED)
    server.requests.clear()
    wanted = ranges(*((number, 2, 3) for number in range(20)))
    assert bytes_of(files, wanted) == [bytes([number]) * 3 for number in range(20)]
    assert [request.headers["if-match"] for request in server.requests] == [
        server.etag(request.path) for request in server.requests
    ]


def test_neighbors_are_fetched_together_and_repeats_once(server: Server) -> None:
    files = opened(server)
    server.requests.clear()
    wanted = ranges((0, 500, 10), (0, 100, 10), (0, 500, 10), (0, 505, 20), (0, 200_000, 7), (1, 3, 0))
    assert bytes_of(files, wanted) == right(wanted)
    assert sorted((request.start, request.stop) for request in server.requests) == [(100, 525), (200_000, 200_007)]


def test_what_is_in_flight_is_shared_between_threads(server: Server) -> None:
    files = opened(server)
    server.requests.clear()
    asked, go_on = threading.Event(), threading.Event()

    def answer(request: Request) -> Reply:
        asked.set()
        go_on.wait(10)
        return RIGHT

    server.answer = answer
    wanted = ranges((0, 1000, 500))
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(bytes_of, files, wanted)
        assert asked.wait(10)
        second = threads.submit(bytes_of, files, ranges((0, 1100, 50)))
        until(lambda: files._flights._units.find(0, 1100, 1150).readers == 2)
        go_on.set()
        assert first.result(10) == right(wanted)
        assert second.result(10) == [DATA[1100:1150]]
    assert len(server.requests) == 1


def test_what_is_prepared_is_not_fetched_again(server: Server) -> None:
    files = opened(server)
    window = some_ranges(5, 60)
    files.prepare(window)
    assert bytes_of(files, window) == right(window)
    server.requests.clear()
    window = some_ranges(6, 60)
    files.prepare(window)
    until(lambda: len(files._flights._arrived) == len(files._flights._units))
    asked = len(server.requests)
    assert asked > 10
    assert bytes_of(files, window) == right(window)
    assert len(server.requests) == asked
    assert len(files._flights._units) == 0  # nothing is kept that was read


def test_prepare_stays_within_its_budget_and_moves_on_as_records_are_read(server: Server) -> None:
    files = opened(server, Remote(cache_bytes=0, ahead_bytes=3000))
    server.requests.clear()
    windows = [ranges((0, 100_000 * number, 1000)) for number in range(6)]
    for window in windows:
        files.prepare(window)
    until(lambda: len(server.requests) == 3 and not server.open_requests)
    assert sorted(request.start for request in server.requests) == [0, 100_000, 200_000]
    assert bytes_of(files, windows[0]) == right(windows[0])
    until(lambda: len(server.requests) == 4)
    assert server.requests[3].start == 300_000
    assert bytes_of(files, windows[5]) == right(windows[5])  # out of turn: it does not wait for the budget


def test_what_could_not_be_fetched_ahead_is_fetched_when_it_is_read(server: Server) -> None:
    files = opened(server, Remote(cache_bytes=0, retries=0))
    server.requests.clear()
    server.answer = lambda request: Reply(status=500)
    files.prepare(ranges((0, 10, 100)))
    until(lambda: server.requests and not len(files._flights._units))
    server.answer = lambda request: RIGHT
    assert bytes_of(files, ranges((0, 10, 100))) == [DATA[10:110]]


def test_what_nobody_reads_makes_room(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    files = opened(server, Remote(cache_bytes=0, ahead_bytes=3000))
    server.requests.clear()
    for number in range(3):
        files.prepare(ranges((0, 100_000 * number, 1000)))  # a loop that was left
    until(lambda: len(server.requests) == 3 and not server.open_requests)
    for number in range(4, 8):
        wanted = ranges((0, 100_000 * number, 1000))
        files.prepare(wanted)
        assert bytes_of(files, wanted) == right(wanted)
    assert files._flights._ahead_bytes == 2000
    later = time.monotonic() + 61
    monkeypatch.setattr(flights.time, "monotonic", lambda: later)
    files.prepare(ranges((0, 900_000, 1000)))
    monkeypatch.undo()
    assert bytes_of(files, ranges((0, 900_000, 1000))) == [DATA[900_000:901_000]]
    assert files._flights._ahead_bytes == 0
    assert len(files._flights._units) == 0


@pytest.mark.parametrize(
    ("reply", "kind", "words"),
    [
        (Reply(status=403), FormatError, "a.bin: the server answered 403.*credentials.*Remote\\(client="),
        (Reply(status=404), FormatError, "a.bin: there is no such object \\(404\\); check the URL"),
        (Reply(status=412), FormatError, "a.bin: changed while it was open.*open it again"),
        (Reply(status=500), ReadError, "a.bin: cannot be read: the server answered 500 2 times; check the server"),
        (Reply(shorter=1), ReadError, "a.bin: cannot be read:.*10..110, got 10..109"),
        (Reply(missing=1), ReadError, "a.bin: cannot be read: 100 bytes from byte 10 on were asked for, 99 came"),
        (Reply(keep=0.5), ReadError, "a.bin: cannot be read:.*body error"),
        (Reply(ignore_range=True), FormatError, "a.bin: the server does not support Range requests"),
    ],
)
@pytest.mark.parametrize("honors_if_match", [True, False])
def test_what_does_not_help_is_an_error_that_says_why(
    server: Server, reply: Reply, kind: type[DataError], words: str, honors_if_match: bool
) -> None:
    server.honors_if_match = honors_if_match
    files = opened(server, Remote(cache_bytes=0, retries=1))
    server.answer = lambda request: reply
    server.requests.clear()
    with pytest.raises(kind, match=words):
        files.read(ranges((0, 10, 100)))
    if reply.status is not None and reply.status < 500:
        assert len(server.requests) == 1  # not tried again
    server.answer = lambda request: RIGHT
    assert bytes_of(files, ranges((0, 10, 100))) == [DATA[10:110]]


@pytest.mark.parametrize("honors_if_match", [True, False])
@pytest.mark.parametrize("cache_bytes", [0, 1 << 26])
def test_an_object_that_was_written_anew_is_an_error(
    server: Server, tmp_path: Path, honors_if_match: bool, cache_bytes: int
) -> None:
    server.honors_if_match = honors_if_match
    remote = Remote(cache_dir=tmp_path, cache_bytes=cache_bytes, block_bytes=4096)
    files = opened(server, remote)
    assert bytes_of(files, ranges((0, 0, 4))) == [DATA[:4]]
    server.objects["train/a.bin"] = DATA[::-1]
    with pytest.raises(FormatError, match=r"a\.bin: changed while it was open: .*; open it again"):
        files.read(ranges((0, 500_000, 4)))
    assert bytes_of(opened(server, remote), ranges((0, 0, 4))) == [DATA[::-1][:4]]  # nothing stale


def test_a_server_without_etags_is_read_and_never_cached(server: Server, tmp_path: Path) -> None:
    server.etags["train/a.bin"] = ""
    files = opened(server, Remote(cache_dir=tmp_path))
    assert files.stamps[0] == ""
    wanted = ranges((0, 10, 100))
    assert bytes_of(files, wanted) == right(wanted)
    server.requests.clear()
    assert bytes_of(files, wanted) == right(wanted)
    assert len(server.requests) == 1
    server.objects["train/a.bin"] = DATA + b"more"
    with pytest.raises(FormatError, match=r"changed while it was open.*1,048,580 bytes.*expected.*1,048,576"):
        files.read(wanted)


def test_a_range_beyond_the_end_is_an_error(server: Server) -> None:
    with pytest.raises(FormatError, match=r"b%20c\.bin: ends after 5,000 bytes, before byte 5,001"):
        opened(server).read(ranges((1, 4990, 11)))


def test_a_server_that_never_answers_is_a_timeout(server: Server) -> None:
    files = opened(server, Remote(cache_bytes=0, timeout_seconds=0.2))
    server.answer = lambda request: Reply(hang=True)
    with pytest.raises((WaitTimeout, ReadError), match=r"a\.bin: "):
        files.read(ranges((0, 10, 100)))
    server.answer = lambda request: RIGHT
    assert bytes_of(files, ranges((0, 10, 100))) == [DATA[10:110]]


def test_a_server_that_is_gone_is_named() -> None:
    with serving({"train/a.bin": DATA, "train/b c.bin": SMALL}) as server:
        files = opened(server, Remote(cache_bytes=0, retries=1))
    with pytest.raises(
        ReadError, match=r"a\.bin: cannot be read: .*error sending request; check the server and the net"
    ):
        files.read(ranges((0, 10, 100)))


def test_a_straggler_is_hedged(server: Server) -> None:
    files = opened(server, Remote(cache_bytes=0, hedge_seconds=0.05))
    server.requests.clear()
    server.answer = lambda request: Reply(hang=request.number == 0)
    begin = time.monotonic()
    assert bytes_of(files, ranges((0, 10, 100))) == [DATA[10:110]]
    assert time.monotonic() < begin + 15  # the client itself tries again after 20 s
    assert [(request.start, request.stop) for request in server.requests] == [(10, 110)] * 2


def test_late_requests_are_hedged_by_the_99th_percentile_of_recent_ones(server: Server) -> None:
    files = opened(server, Remote(cache_bytes=0))
    for number in range(50):
        files.read(ranges((0, number, 100)))
    server.requests.clear()
    server.answer = lambda request: Reply(hang=request.number == 0)
    begin = time.monotonic()
    assert bytes_of(files, ranges((0, 10, 100))) == [DATA[10:110]]
    assert time.monotonic() < begin + 15
    assert len(server.requests) == 2


def test_a_large_range_is_read_in_parts(server: Server) -> None:
    large = random.Random(3).randbytes(20 << 20)
    server.objects["large"] = large
    files = open_files(f"{server.url}/large", remote=UNCACHED)
    server.requests.clear()
    assert bytes_of(files, ranges((0, 5, len(large) - 5))) == [large[5:]]
    assert len(server.requests) == 3


def test_closed_files_say_so_and_leave_no_thread(server: Server) -> None:
    files = opened(server)
    server.answer = lambda request: Reply(hang=True)
    files.prepare(ranges((0, 10, 100)))
    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(files.read, ranges((0, 10, 100)))
        until(lambda: server.open_requests > 0)
        files.close()
        with pytest.raises(ReadError, match="closed"):
            reading.result(10)
    with pytest.raises(ReadError, match=r"a\.bin: was closed; open it again"):
        files.read(ranges((0, 10, 100)))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("braidax")]


def test_files_that_nobody_uses_leave_no_thread(server: Server) -> None:
    files = opened(server)
    files.read(ranges((0, 10, 100)))
    assert "braidax-remote" in [thread.name for thread in threading.enumerate()]
    del files
    gc.collect()
    assert "braidax-remote" not in [thread.name for thread in threading.enumerate()]


def test_a_forked_process_is_told_to_open_them_again(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    files = opened(server)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(ReadError, match=r"a\.bin: was opened before this process was forked.*open it again here"):
        files.read(ranges((0, 10, 100)))


def test_files_travel_to_other_processes(server: Server) -> None:
    files = pickle.loads(pickle.dumps(opened(server)))
    assert files.sizes == [len(DATA), len(SMALL)]
    assert bytes_of(files, ranges((1, 10, 100))) == [SMALL[10:110]]


def until(is_so: Callable[[], object]) -> None:
    """Waits for something, at most 10 s."""
    deadline = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < deadline, "it did not happen within 10 s"
        threading.Event().wait(0.001)
