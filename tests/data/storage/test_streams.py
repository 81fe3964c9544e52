"""Streams of remote files: the bytes of a local file, in few requests, parts ahead while they are read in order."""

import io
import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braidax.data.storage import Remote, open_files
from tests.support.data.storage.faulty_server import Server, serving

DATA = random.Random(0).randbytes(30 << 20)
UNCACHED = Remote(cache_bytes=0)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving({"large": DATA, "small": b"a\nb\n", "empty": b""}) as running:
        yield running


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("read"), st.integers(-1, 200_000)),
            st.tuples(st.just("seek"), st.integers(0, 1_100_000)),
            st.tuples(st.just("tail"), st.integers(0, 1000)),
        ),
        max_size=6,
    )
)
def test_it_reads_as_a_file_in_memory_does(server: Server, steps: list[tuple[str, int]]) -> None:
    server.objects["part"] = DATA[:1_000_000]
    expected = io.BytesIO(DATA[:1_000_000])
    with open_files(f"{server.url}/part", remote=UNCACHED).open(0) as stream:
        for step, number in steps:
            if step == "read":
                assert stream.read(number) == expected.read(number)
            elif step == "seek":
                assert stream.seek(number) == expected.seek(number)
            else:
                assert stream.seek(-number, io.SEEK_END) == expected.seek(-number, io.SEEK_END)
            assert stream.tell() == expected.tell()


def test_what_is_read_in_order_is_fetched_in_large_parts_ahead(server: Server) -> None:
    files = open_files(f"{server.url}/large", remote=UNCACHED)
    server.requests.clear()
    found, server.most_open_requests = list[bytes](), 0
    server.delay_seconds = 0.02
    with files.open(0) as stream:
        while chunk := stream.read(1 << 20):
            found.append(chunk)
    server.delay_seconds = 0.0
    assert b"".join(found) == DATA
    assert len(server.requests) == 8  # 4 MiB each
    assert server.most_open_requests >= 4


def test_what_is_read_here_and_there_is_fetched_as_it_is(server: Server) -> None:
    files = open_files(f"{server.url}/large", remote=UNCACHED)
    server.requests.clear()
    with files.open(0) as stream:
        stream.seek(10_000_000)
        assert stream.read(100) == DATA[10_000_000:10_000_100]
        stream.seek(-8, io.SEEK_END)
        assert stream.read() == DATA[-8:]
    assert sum((request.stop or 0) - (request.start or 0) for request in server.requests) <= 1 << 17


def test_lines_and_nothing(server: Server) -> None:
    files = open_files([f"{server.url}/small", f"{server.url}/empty"], remote=UNCACHED)
    with files.open(0) as stream:
        assert list(stream) == [b"a\n", b"b\n"]
        with pytest.raises(ValueError, match="negative seek"):
            stream.seek(-1)
    with files.open(1) as stream:
        assert stream.read() == b""
    assert stream.closed
