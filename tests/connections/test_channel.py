"""Channels: what is sent arrives whole, what is too long takes no memory, and how it ended is known exactly."""

import contextlib
import errno
import os
import selectors
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import trustme
from hypothesis import given
from hypothesis import strategies as st

from braidax.connections import channel as module
from braidax.connections.channel import ALIGNMENT, LARGE_BYTES, Channel, End, Frame, close_sent
from braidax.connections.channel_loop import ChannelLoop

SECONDS = 20.0
CLOSED = End("closed", "its process ended")
LONG = 4 << 20
"""More than a kernel keeps of what nobody reads."""


@contextlib.contextmanager
def pair(**options: Any) -> Generator[tuple[Channel, Channel]]:
    """Two ends of a connection inside of this host."""
    ends = [Channel(end, **{"max_bytes": 1 << 30, **options}) for end in socket.socketpair()]
    try:
        yield ends[0], ends[1]
    finally:
        for end in ends:
            end.close()


@contextlib.contextmanager
def over_tcp() -> Generator[tuple[socket.socket, socket.socket]]:
    """Two ends of a connection of TCP: who connected, who accepted."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        connecting = socket.create_connection(server.getsockname(), timeout=SECONDS)
        accepted, _ = server.accept()
    with connecting, accepted:
        yield connecting, accepted


@contextlib.contextmanager
def raw(**options: Any) -> Generator[tuple[socket.socket, Channel]]:
    """A peer that writes what it likes, and the channel that hears it."""
    there, here = socket.socketpair()
    there.settimeout(SECONDS)
    channel = Channel(here, **{"max_bytes": 1 << 20, **options})
    with there, contextlib.closing(channel):
        yield there, channel


def soon() -> float:
    return time.monotonic() + SECONDS


def announced(*lengths: int) -> bytes:
    """Returns what a frame begins with."""
    return struct.pack(f"!H{len(lengths)}Q", len(lengths), *lengths)


def written(frame: Sequence[bytes | bytearray | memoryview]) -> bytes:
    """Returns the bytes of a frame."""
    return announced(*map(len, frame)) + b"".join(frame)


def moved(ours: Channel, theirs: Channel, num_frames: int) -> list[Frame]:
    """Returns so many frames that are on their way from one end to the other, both in this thread."""
    found: list[Frame] = []
    deadline = soon()
    while len(found) < num_frames:
        ours.flush()
        found += theirs.receive()
        assert time.monotonic() < deadline
        assert theirs.ended is None
    return found


def ended(channel: Channel) -> End:
    """Waits for the end of a channel, and drops what comes before it."""
    with contextlib.suppress(ConnectionError):
        while True:
            channel.take(soon())
    assert channel.ended is not None
    return channel.ended


parts = st.lists(st.one_of(st.binary(max_size=40), st.integers(0, 3 * LARGE_BYTES).map(bytes)), max_size=5)


@given(st.lists(parts, max_size=6))
def test_what_is_sent_arrives(frames: list[list[bytes]]) -> None:
    with pair() as (ours, theirs):
        for frame in frames:
            ours.send(frame)
        assert moved(ours, theirs, len(frames)) == frames
        assert ours.unsent_bytes == 0


@given(st.lists(parts, min_size=1, max_size=4), st.data())
def test_pieces_of_any_length_make_the_same_frames(frames: list[list[bytes]], data: st.DataObject) -> None:
    stream = b"".join(map(written, frames))
    found: list[Frame] = []
    with raw() as (there, channel):
        while stream:
            count = data.draw(st.integers(1, min(len(stream), 1 << 15)))
            there.sendall(stream[:count])
            stream = stream[count:]
            found += channel.receive()
        assert found == frames
        there.close()
        assert (channel.receive(), channel.ended) == ([], CLOSED)


def test_byte_by_byte() -> None:
    frames: list[Frame] = [[], [b"", b"ab"], [bytes(range(256)), b"", bytes(LARGE_BYTES)]]
    with raw() as (there, channel):
        found: list[Frame] = []
        for byte in b"".join(map(written, frames)):
            there.sendall(bytes([byte]))
            found += channel.receive()
        assert found == frames


def test_a_large_part_is_aligned_and_may_be_written_and_is_not_copied() -> None:
    sent = np.arange(1 << 20)
    with pair() as (ours, theirs):
        ours.send([b"head", memoryview(cast("Any", sent)), b"tail"])
        assert ours.unsent_bytes > LONG  # of the array's own memory: what changes now, arrives changed
        sent[-1] = 0
        ((head, part, tail),) = moved(ours, theirs, 1)
    array = np.frombuffer(part, np.int64)
    assert (head, tail) == (b"head", b"tail")
    assert (array.ctypes.data % ALIGNMENT, array.flags.writeable, int(array[-1])) == (0, True, 0)
    np.testing.assert_array_equal(array, sent)


def test_many_small_frames_wait_in_line_and_arrive_in_order() -> None:
    with pair() as (ours, theirs):
        for number in range(20_000):
            ours.send([number.to_bytes(4, "big"), b"x" * 50])
        assert ours.unsent_bytes > 0
        found = moved(ours, theirs, 20_000)
        assert [int.from_bytes(number, "big") for number, _ in found] == list(range(20_000))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (announced(*[0] * 5), "it announced a frame of 5 parts; expected at most 4"),
        (b"\xff" * 16, "it announced a frame of 65,535 parts; expected at most 4"),
        (announced((1 << 20) + 1), "it announced a frame of 1,048,577 bytes; expected at most 1,048,576"),
        (announced(1, (1 << 64) - 1), "it announced a frame of 18,446,744,073,709,551,616 bytes; expected at most"),
        (announced(1 << 19, 1 << 19, 1), "it announced a frame of 1,048,577 bytes"),
    ],
)
def test_a_hostile_length_is_refused_at_once(data: bytes, words: str) -> None:
    with raw(max_parts=4) as (there, channel):
        there.sendall(written([b"before"]) + data)
        assert channel.receive() == [[b"before"]]
        assert channel.ended is not None
        assert channel.ended.kind == "refused"
        assert channel.ended.words.startswith(words)
        there.sendall(written([b"after"]))
        assert channel.receive() == []
        with pytest.raises(ConnectionError, match=r"^it announced a frame of"):
            channel.take(soon())


def test_a_length_alone_takes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident()
    with raw(max_bytes=1 << 40) as (there, channel):
        there.sendall(announced(1 << 33))
        assert channel.receive() == []
        assert channel.ended is None
        assert resident() - before < 1 << 28

    def no_room(num_bytes: int) -> memoryview:
        raise MemoryError

    monkeypatch.setattr(module, "room_for", no_room)
    with raw(max_bytes=1 << 40) as (there, channel):
        there.sendall(announced(1 << 33))
        assert channel.receive() == []
        words = "it announced a part of 8,589,934,592 bytes, and this host has no room for it"
        assert channel.ended == End("refused", words)


def test_a_peer_that_reads_nothing_is_not_waited_for() -> None:
    begun = time.monotonic()
    with pair() as (ours, theirs):
        ours.send([bytes(LONG)])
        assert 0 < ours.unsent_bytes < LONG + 20
        with pytest.raises(TimeoutError):
            ours.drain(time.monotonic() + 0.05)
        draining = threading.Thread(target=ours.drain, args=(soon(),))
        draining.start()
        assert len(theirs.take(soon())[0]) == LONG
        draining.join(SECONDS)
        assert ours.unsent_bytes == 0
    assert time.monotonic() - begun < SECONDS


def test_a_peer_that_leaves_too_much_unread_is_given_up() -> None:
    with pair(max_unsent_bytes=1000) as (ours, _):
        while ours.ended is None:
            ours.send([bytes(500)])
        assert ours.ended == End("refused", f"it left {ours.unsent_bytes:,} bytes unread; expected at most 1,000")
        assert 1000 < ours.unsent_bytes < 2000


def test_a_turn_has_an_end() -> None:
    """Who sends without end cannot keep the thread that serves others as well."""
    with raw() as (there, channel):
        there.sendall(written([bytes(1000)]) * 150)  # more than is read at once, less than the kernel keeps
        turns: list[int] = []
        while sum(turns) < 150:
            turns.append(len(channel.receive(most_bytes=1)))
        assert turns[0] < 100
        assert sum(turns) == 150


def test_waits_have_a_limit() -> None:
    with pair() as (ours, _):
        for deadline in (time.monotonic() + 0.05, 0.0):
            with pytest.raises(TimeoutError):
                ours.take(deadline)


@pytest.mark.parametrize("deadline", [None, float("inf")])
def test_a_wait_without_limit_ends_with_the_channel(deadline: float | None) -> None:
    with pair() as (ours, theirs):
        cutting = threading.Timer(0.05, ours.cut)
        cutting.start()
        with pytest.raises(ConnectionError, match=r"^its process ended$"):
            ours.take(deadline)
        cutting.join(SECONDS)
        assert ended(theirs) == CLOSED


@pytest.mark.parametrize("has_unread", [False, True])
def test_inside_a_host_all_ends_are_the_process(has_unread: bool) -> None:
    with pair() as (ours, theirs):
        theirs.send([b"last words"])
        if has_unread:
            ours.send([b"never read"])
        theirs.close()
        assert ours.take(soon()) == [b"last words"]
        ours.send([b"nobody"])
        assert ended(ours) == CLOSED


def test_over_tcp_a_break_is_no_end() -> None:
    with over_tcp() as (connecting, accepted):
        ours = Channel(connecting, max_bytes=1 << 20)
        accepted.sendall(written([b"last words"]))
        accepted.close()
        assert ours.take(soon()) == [b"last words"]
        assert ended(ours) == CLOSED
    with over_tcp() as (connecting, accepted):
        ours = Channel(connecting, max_bytes=1 << 20)
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a close breaks it
        accepted.close()
        assert ended(ours) == End("broke", "the connection to it broke: [Errno 104] Connection reset by peer")


def test_a_break_that_writing_has_seen_is_told_once_all_is_read() -> None:
    """The kernel tells of a reset once, to whoever comes first; reading alone would take it for an end."""
    with over_tcp() as (connecting, accepted):
        ours = Channel(connecting, max_bytes=1 << 20)
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        accepted.close()
        module._wait(connecting, selectors.EVENT_READ, soon())  # it has come
        ours.send([b"nobody"])
        with pytest.raises(ConnectionError, match="reset by peer"):
            ours.drain(soon())
        assert ended(ours) == End("broke", "the connection to it broke: [Errno 104] Connection reset by peer")


def test_a_system_that_fails_to_send_ends_the_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        """A socket whose writes fail, though the peer is there."""

        def __init__(self, real: socket.socket) -> None:
            self._real = real

        def __getattr__(self, name: str) -> Any:
            return getattr(self._real, name)

        def send(self, data: bytes) -> int:
            raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))

    with pair() as (ours, theirs), contextlib.closing(ChannelLoop[str]()) as loop, monkeypatch.context() as patch:
        loop.add(ours, "ours")
        theirs.send([b"it is there"])
        patch.setattr(ours, "socket", Failing(ours.socket))
        loop.send(ours, [b"never"])
        assert ours.unsent_bytes == 0
        with pytest.raises(ConnectionError, match="No buffer space"):
            ours.drain(soon())
        assert loop.wait(SECONDS) == [("ours", [[b"it is there"]])]
        assert loop.wait(SECONDS) == [("ours", [])]  # though the peer does nothing
        assert ours.ended == End("broke", "the connection to it broke: [Errno 105] No buffer space available")


def test_a_killed_process_and_its_last_frame() -> None:
    code = (
        "import os, signal, socket, sys; from braidax.connections.channel import Channel\n"
        "channel = Channel(socket.socket(fileno=int(sys.argv[1])), max_bytes=100)\n"
        "channel.send([b'here']); os.kill(os.getpid(), signal.SIGKILL)"
    )
    there, here = socket.socketpair()
    with contextlib.closing(Channel(here, max_bytes=100)) as channel:
        with there:
            started = subprocess.Popen([sys.executable, "-c", code, str(there.fileno())], pass_fds=[there.fileno()])
        assert channel.take(time.monotonic() + 60) == [b"here"]
        assert ended(channel) == CLOSED
        started.wait(SECONDS)


def test_what_was_sent_arrives_behind_a_close() -> None:
    with over_tcp() as (connecting, accepted):
        ours, theirs = (Channel(end, max_bytes=1 << 30) for end in (connecting, accepted))
        theirs.send([b"never read"])
        ours.send([bytes(LONG)])
        assert ours.unsent_bytes > 0
        closing = threading.Thread(target=close_sent, args=([ours], soon()))
        closing.start()
        assert len(theirs.take(soon())[0]) == LONG
        theirs.close()
        closing.join(SECONDS)
        assert ours.socket.fileno() < 0


def test_who_reads_nothing_does_not_keep_others_from_what_was_sent() -> None:
    with pair() as (deaf, _), over_tcp() as (connecting, accepted):
        ours, theirs = (Channel(end, max_bytes=1 << 30) for end in (connecting, accepted))
        deaf.send([bytes(LONG)])
        ours.send([bytes(LONG)])
        begun = time.monotonic()
        closing = threading.Thread(target=close_sent, args=([deaf, ours], begun + 2.0))
        closing.start()
        assert len(theirs.take(soon())[0]) == LONG
        closing.join(SECONDS)
        assert time.monotonic() - begun < 10


@pytest.fixture(scope="module")
def contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """A server's and a client's."""
    authority = trustme.CA()
    server, client = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), ssl.create_default_context()
    authority.issue_cert("127.0.0.1").configure_cert(server)
    authority.configure_trust(client)
    return server, client


@contextlib.contextmanager
def over_tls(contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> Generator[tuple[Channel, Channel]]:
    with over_tcp() as (connecting, accepted):
        found: list[ssl.SSLSocket] = []
        accepting = threading.Thread(target=lambda: found.append(contexts[0].wrap_socket(accepted, server_side=True)))
        accepting.start()
        wrapped = contexts[1].wrap_socket(connecting, server_hostname="127.0.0.1")
        accepting.join(SECONDS)
        ends = [Channel(end, max_bytes=1 << 30) for end in (wrapped, found[0])]
        try:
            yield ends[0], ends[1]
        finally:
            for end in ends:
                end.close()


def test_tls_carries_the_same(contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    frames: list[Frame] = [[], [b"a", b""], [os.urandom(LONG), b"tail"], [bytes(LARGE_BYTES + 1)] * 20]
    with over_tls(contexts) as (ours, theirs), contextlib.closing(ChannelLoop[str]()) as loop:
        loop.add(theirs, "theirs")
        for frame in frames:
            ours.send(frame)
        assert ours.unsent_bytes > 0
        found: list[Frame] = []
        deadline = soon()
        while len(found) < len(frames):
            ours.flush()
            found += [each for _, come in loop.wait(0.05) for each in come]
            assert time.monotonic() < deadline
        assert found == frames
        ours.close()
        assert loop.wait(SECONDS) == [("theirs", [])]
        assert theirs.ended == CLOSED


def test_no_bytes_stay_hidden_inside_of_tls(contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    """A record holds the end of a large part and a frame behind it: the latter is no longer in the kernel then."""
    with over_tls(contexts) as (ours, theirs):
        stream = written([bytes(LARGE_BYTES)]) + written([b"last"])
        ours.socket.settimeout(SECONDS)
        for take in (lambda: [theirs.take(soon()) for _ in range(2)], lambda: theirs.receive(most_bytes=1)):
            ours.socket.sendall(stream[:-200])
            while theirs._place is None:
                module._wait(theirs.socket, selectors.EVENT_READ, soon())
                assert theirs.receive() == []
            ours.socket.sendall(stream[-200:])
            module._wait(theirs.socket, selectors.EVENT_READ, soon())
            assert [len(frame[0]) for frame in take()] == [LARGE_BYTES, 4]


def test_damaged_tls_is_a_break(contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    with over_tls(contexts) as (ours, theirs):
        socket.socket.send(ours.socket, b"\x17\x03\x03\x00\x20" + bytes(32))
        end = ended(theirs)
        assert end.kind == "broke"
        assert "the connection to it broke: [SSL" in end.words


def test_a_loop_serves_many_and_tells_of_ends_once() -> None:
    with contextlib.ExitStack() as opened:
        loop = opened.enter_context(contextlib.closing(ChannelLoop[int]()))
        pairs = [opened.enter_context(pair()) for _ in range(3)]
        for number, (ours, _) in enumerate(pairs):
            loop.add(ours, number)
        assert loop.wait(0) == []
        pairs[0][1].send([b"a"])
        pairs[2][1].send([b"c"])
        pairs[2][1].close()
        assert dict(loop.wait(SECONDS)) == {0: [[b"a"]], 2: [[b"c"]]}
        assert loop.wait(SECONDS) == [(2, [])]
        assert pairs[2][0].ended == CLOSED
        assert loop.wait(0) == []  # it is told of once
        loop.discard(pairs[2][0])
        loop.discard(pairs[0][0])
        pairs[0][1].send([b"a"])
        assert loop.wait(0) == []


def test_a_loop_writes_what_was_not_taken() -> None:
    with pair() as (ours, theirs), contextlib.closing(ChannelLoop[str]()) as loop:
        loop.add(ours, "ours")
        loop.send(ours, [bytes(LONG)])
        assert ours.unsent_bytes > 0
        assert loop.wait(0.05) == []  # it does not turn while nobody reads
        taking: list[Frame] = []
        thread = threading.Thread(target=lambda: taking.append(theirs.take(soon())))
        thread.start()
        while ours.unsent_bytes:
            assert loop.wait(SECONDS)
        thread.join(SECONDS)
        assert taking == [[bytes(LONG)]]
        assert loop.wait(0) in ([], [("ours", [])])
        assert loop.wait(0) == []  # nor when all is written


def test_a_loop_is_woken_and_has_other_things_to_wait_for() -> None:
    there, here = socket.socketpair()
    with there, here, contextlib.closing(ChannelLoop[str]()) as loop:
        loop.add(here, "here")
        waking = threading.Timer(0.05, loop.wake)
        waking.start()
        assert (loop.wait(SECONDS), loop.was_woken) == ([], True)
        waking.join(SECONDS)
        assert (loop.wait(0), loop.was_woken) == ([], False)
        for _ in range(100_000):  # more than its pipe takes
            loop.wake()
        there.send(b"x")
        assert (loop.wait(SECONDS), loop.was_woken) == ([("here", [])], True)
        loop.close()
        loop.wake()
        loop.close()


def test_what_a_loop_gives_up_is_not_waited_for() -> None:
    with pair(max_unsent_bytes=1000) as (ours, theirs), contextlib.closing(ChannelLoop[str]()) as loop:
        loop.add(ours, "ours")
        while ours.ended is None:
            loop.send(ours, [bytes(500)])
        theirs.send([b"x"])
        assert loop.wait(0) == []


ROUTES: list[tuple[str, Callable[[Channel], object]]] = [
    ("send", lambda channel: channel.send([b"x"])),
    ("flush", lambda channel: channel.flush()),
    ("cut", lambda channel: channel.cut()),
    ("close", lambda channel: channel.close()),
]


@pytest.mark.parametrize("use", [use for _, use in ROUTES], ids=[name for name, _ in ROUTES])
def test_a_closed_channel_harms_nobody(use: Callable[[Channel], object]) -> None:
    with pair() as (ours, _), contextlib.closing(ChannelLoop[str]()) as loop:
        loop.add(ours, "ours")
        loop.discard(ours)
        ours.close()
        use(ours)
        loop.send(ours, [b"x"])
        assert (ours.receive(), loop.wait(0)) == ([], [])
