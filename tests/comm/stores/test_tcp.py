"""The TCP store: strangers stay out, nobody blocks the others, and what ends is told at once."""

import contextlib
import os
import resource
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from braidax.comm.stores.tcp import TcpStore
from braidax.comm.stores.tcp_server import TcpStoreServer
from braidax.connections.greeting import Greeting
from braidax.connections.handshake import Handshake, connect_handshake
from braidax.errors import ArgumentError, CommError, HandshakeError, WaitTimeout
from tests.support.comm.stores.servers import free_port, in_thread

SECRET = b"0123456789abcdef" * 2


def port_of(server: TcpStoreServer) -> int:
    return int(server.address.rpartition(":")[2])


def client(server: TcpStoreServer, **options: Any) -> TcpStore:
    return TcpStore("127.0.0.1", port_of(server), secret=SECRET, **options)


def stranger(server: TcpStoreServer) -> socket.socket:
    """Returns a connection that has read the server's hello."""
    connection = socket.create_connection(("127.0.0.1", port_of(server)), timeout=20)
    assert read(connection, 49).startswith(b"braidax\x02")
    return connection


def insider(server: TcpStoreServer) -> socket.socket:
    """Returns a connection that has proved itself."""
    connection = socket.create_connection(("127.0.0.1", port_of(server)), timeout=20)
    connect_handshake(connection, purpose=b"store", secret=SECRET, peer="it", deadline=time.monotonic() + 20)
    return connection


def frame(*parts: bytes) -> bytes:
    """Returns what a client writes."""
    return announced(*map(len, parts)) + b"".join(parts)


def announced(*lengths: int) -> bytes:
    """Returns what a frame begins with."""
    return struct.pack(f"!H{len(lengths)}Q", len(lengths), *lengths)


def read(connection: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        got = connection.recv(num_bytes - len(data))
        assert got
        data += got
    return data


def is_dropped(connection: socket.socket) -> bool:
    """Waits until the other end closes; what it says before does not matter."""
    try:
        while connection.recv(1000):
            pass
    except ConnectionError:
        pass
    return True


def until(condition: Callable[[], bool]) -> None:
    """Waits until something has happened in the server's thread."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture
def server() -> Iterator[TcpStoreServer]:
    with TcpStoreServer(secret=SECRET) as opened:
        yield opened


def test_another_secret_is_refused_at_once(server: TcpStoreServer) -> None:
    begun = time.monotonic()
    with pytest.raises(
        HandshakeError, match=rf"the store at {server.address} does not know the secret of this process"
    ):
        TcpStore("127.0.0.1", port_of(server), secret=b"x" * 32)
    assert time.monotonic() - begun < 5
    until(lambda: server.num_refused == 1)
    with client(server) as store:
        assert store.add("n", 1) == 1


def test_garbage_gets_nobody_in_and_harms_nobody(server: TcpStoreServer) -> None:
    attacks = [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(300),
        os.urandom(300),
        b"braidax\x01" + bytes(100),
        struct.pack("!7sBBBH32s", b"braidax", 2, 1, 5, 65535, bytes(32)) + bytes(70000),
        struct.pack("!7sBBBH32s", b"braidax", 2, 1, 255, 0, bytes(32)),
        struct.pack("!7sBBBH32s", b"braidax", 2, 1, 5, 0, bytes(32)) + b"store" + bytes(32),
        struct.pack("!7sBBBH32s", b"braidax", 2, 1, 5, 0, bytes(32)) + b"watch",
        frame(b"\x01", b"k", b"v"),
    ]
    with client(server) as store:
        waiting = in_thread(store.get, "key", timeout_seconds=60.0)
        for attack in attacks:
            with stranger(server) as connection:
                with contextlib.suppress(ConnectionError):
                    connection.sendall(attack)
                assert is_dropped(connection)
        until(lambda: server.num_refused == len(attacks))
        store.set("key", b"safe")
        assert waiting.get() == b"safe"


def test_a_mirror_gets_nothing(server: TcpStoreServer) -> None:
    with socket.create_connection(("127.0.0.1", port_of(server)), timeout=20) as connection:
        hello = read(connection, 49)
        connection.sendall(hello)
        assert is_dropped(connection)
    with socket.create_connection(("127.0.0.1", port_of(server)), timeout=20) as connection:
        hello = bytearray(read(connection, 49))
        hello[8] = 1
        connection.sendall(hello + bytes(32))
        assert read(connection, 32) == bytes(32)  # refused, and no proof of the server's own
        assert is_dropped(connection)


def test_the_silent_are_dropped_and_block_nobody() -> None:
    with TcpStoreServer(secret=SECRET, handshake_seconds=1.0) as server, contextlib.ExitStack() as stack:
        begun = time.monotonic()
        silent = [stack.enter_context(stranger(server)) for _ in range(20)]
        silent[0].sendall(b"braid")
        with client(server) as store:
            store.set("key", b"v")
            assert store.get("key", timeout_seconds=0) == b"v"
            assert all(is_dropped(connection) for connection in silent)
            assert 0.9 < time.monotonic() - begun < 10
            with stranger(server) as last:  # longer than the client has been there
                assert is_dropped(last)
            assert store.get("key", timeout_seconds=0) == b"v"
            assert server.num_refused == 21


def test_a_crowd_of_strangers_leaves_room_for_clients(server: TcpStoreServer) -> None:
    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(stranger(server)) for _ in range(300)]
        with client(server) as store:
            store.set("key", b"v")
            assert server.num_refused == 45  # the oldest, so that with the client 256 were left
            assert all(is_dropped(connection) for connection in crowd[:45])


def test_a_process_without_descriptors_accepts_again_later(server: TcpStoreServer) -> None:
    with client(server) as store, contextlib.ExitStack() as stack:
        store.set("key", b"v")
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        waiting = socket.socket()
        stack.enter_context(waiting).settimeout(20)
        limit = max(int(path.name) for path in Path("/proc/self/fd").iterdir()) + 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        try:
            with contextlib.suppress(OSError):
                while True:  # fill the gaps
                    stack.callback(os.close, os.dup(0))
            waiting.connect(("127.0.0.1", port_of(server)))
            used = time.process_time()
            time.sleep(0.5)  # the time in which nobody is accepted is what is tested
            assert time.process_time() - used < 0.25  # it does not spin
            assert store.get("key", timeout_seconds=0) == b"v"
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert read(waiting, 49).startswith(b"braidax\x02")


@pytest.mark.parametrize(
    "data",
    [
        announced(1, 1, (64 << 20) + 4096),
        announced(1, 1, (1 << 64) - 1),
        announced(1, 1, 1, 0),
        frame(b"\x01", bytes(4097), b""),
        announced(1, 1, (64 << 20) + 1) + b"\x01k" + bytes((64 << 20) + 1),
        frame(b"\x01", b"k"),
        frame(),
        frame(b"\x09", b"k", b""),
        frame(b"", b"k", b""),
        frame(b"\x02", b"k", b"xxx"),
        frame(b"\x03", b"k", bytes(9)),
        frame(b"\x01", b"k", b"v") + b"more",
        frame(b"\x01", b"k", b"v") + b"\x00\x00",
    ],
    ids=[
        "long frame",
        "longest frame",
        "many parts",
        "long key",
        "long value",
        "few parts",
        "no part",
        "operation",
        "no operation",
        "seconds",
        "amount",
        "more",
        "empty frame",
    ],
)
def test_a_client_that_misbehaves_is_dropped_alone(server: TcpStoreServer, data: bytes) -> None:
    with client(server) as store, insider(server) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(data)
        assert is_dropped(connection)
        assert store.add("n", 1) == 1
        assert server.num_refused == 0


@pytest.mark.parametrize("seconds", [float("nan"), float("-inf"), -1.0])
def test_odd_limits_ask_once(server: TcpStoreServer, seconds: float) -> None:
    with insider(server) as connection:
        connection.sendall(frame(b"\x02", b"k", struct.pack("!d", seconds)))
        assert read(connection, 19) == frame(b"\x02", b"")


def test_a_client_that_goes_while_it_waits_is_forgotten(server: TcpStoreServer) -> None:
    with client(server) as store:
        for impatient in (insider(server), insider(server)):
            impatient.sendall(frame(b"\x02", b"key", struct.pack("!d", 60.0)))
            impatient.close()
        with insider(server) as pushy:
            pushy.sendall(frame(b"\x02", b"key", struct.pack("!d", 60.0)))
            pushy.sendall(frame(b"\x03", b"n", struct.pack("!i", 1)))
            assert is_dropped(pushy)
        waiting = in_thread(store.get, "key", timeout_seconds=60.0)
        until(lambda: list(map(len, server._loop._waiting.values())) == [1])
        store.set("key", b"v")
        assert waiting.get() == b"v"
        assert not server._loop._waiting
        until(lambda: len(server._loop._clients) == 2)


def test_a_client_that_does_not_read_blocks_nobody(server: TcpStoreServer) -> None:
    value = os.urandom(32 << 20)
    with client(server) as store, insider(server) as slow:
        store.set("large", value)
        slow.sendall(frame(b"\x02", b"large", bytes(8)))
        assert store.get("large", timeout_seconds=0) == value
        assert store.add("n", 1) == 1
        assert read(slow, 19) == announced(1, len(value)) + b"\x01"
        assert b"".join(iter_read(slow, len(value))) == value


def iter_read(connection: socket.socket, num_bytes: int) -> Iterator[bytes]:
    while num_bytes:
        got = connection.recv(min(num_bytes, 1 << 20))
        assert got
        num_bytes -= len(got)
        yield got


def test_a_server_that_ends_is_told_at_once() -> None:
    with TcpStoreServer(secret=SECRET) as server, client(server) as store:
        waiting = [in_thread(store.get, "key", timeout_seconds=60.0) for _ in range(3)]
        until(lambda: list(map(len, server._loop._waiting.values())) == [3])
        begun = time.monotonic()
        server.close()
        server.close()
        for result in waiting:
            with pytest.raises(
                CommError, match=r"the connection ended \(.*\), asked for the key 'key'; the process of"
            ):
                result.get()
        with pytest.raises(
            CommError, match=rf"^{server.address}: unreachable within 60 s \(.*refused\); expected a Tcp"
        ):
            store.set("key", b"v")
        assert time.monotonic() - begun < 5


def test_closing_ends_the_waits_of_other_threads(server: TcpStoreServer) -> None:
    store = client(server)
    waiting = in_thread(store.get, "key", timeout_seconds=60.0)
    until(lambda: bool(server._loop._waiting))
    store.close()
    with pytest.raises(CommError, match="this TcpStore was closed while it was asked for the key 'key'"):
        waiting.get()
    with pytest.raises(CommError, match="this TcpStore is closed; open another one"):
        store.set("key", b"v")
    until(lambda: not server._loop._clients)


def test_a_server_may_come_later() -> None:
    port = free_port()
    opening = in_thread(TcpStore, "127.0.0.1", port, secret=SECRET, timeout_seconds=30.0)
    with pytest.raises(CommError):
        TcpStore("127.0.0.1", port, secret=SECRET, timeout_seconds=0.1)
    with TcpStoreServer(port=port, secret=SECRET), opening.get() as store:
        assert store.add("n", 1) == 1


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid"])
def test_nobody_there_is_told_in_time(host: str) -> None:
    port, begun = free_port(), time.monotonic()
    with pytest.raises(CommError) as caught:
        TcpStore(host, port, secret=SECRET, timeout_seconds=0.5)
    assert 0.5 <= time.monotonic() - begun < 8
    assert str(caught.value).startswith(f"tcp://{host}:{port}: unreachable within 0.5 s (")
    assert "does its process run, are host and port right, and do firewalls" in str(caught.value)


def test_a_silent_port_is_told_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        begun = time.monotonic()
        with pytest.raises(WaitTimeout, match=r"the store at tcp://.* did not finish the handshake in time"):
            TcpStore("127.0.0.1", silent.getsockname()[1], secret=SECRET, timeout_seconds=0.4)
        assert 0.4 <= time.monotonic() - begun < 5


def test_what_is_no_store_is_shown_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as web:
        opening = in_thread(TcpStore, "127.0.0.1", web.getsockname()[1], secret=SECRET)
        accepted, _ = web.accept()
        with accepted:
            accepted.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            with pytest.raises(HandshakeError, match=r"does not speak Braidax's protocol: it began with b'HTTP/1.1'"):
                opening.get()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (announced(1, (64 << 20) + 1), r"it announced a frame of 67,108,866 bytes; expected at most 67,108,865"),
        (announced(1, 1, 1), r"it announced a frame of 3 parts; expected at most 2"),
        (frame(b"\x01"), r"an answer of 1 parts"),
        (b"\x00", r"its process ended"),
    ],
)
def test_a_server_that_answers_what_is_none_is_named(answer: bytes, words: str) -> None:
    def serve(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection:
            connection.setblocking(False)
            handshake = Handshake("accept", purpose=b"store", secret=SECRET, peer="it")
            greeting = Greeting(connection, handshake, 0.0)
            until(greeting.advance)
            connection.settimeout(20)
            assert connection.recv(1000)
            connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        serving = in_thread(serve, listening)
        with TcpStore("127.0.0.1", listening.getsockname()[1], secret=SECRET) as store:
            named = rf"^tcp://127.0.0.1:\d+: the connection ended \({words}\), asked for the key 'key'; the process of"
            with pytest.raises(CommError, match=named):
                store.set("key", b"v")
        serving.get()


def test_a_frozen_server_is_told_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with TcpStoreServer(secret=SECRET) as server, client(server, timeout_seconds=0.3) as store:
        store.set("key", b"v")
        entered, thaw = in_lock(server, monkeypatch)
        begun = time.monotonic()
        try:
            with pytest.raises(
                CommError, match=r"no answer within 0.3 s, asked for the key 'key'; is the process of the"
            ):
                store.set("key", b"w")
            assert 0.3 <= time.monotonic() - begun < 5
            assert entered()
        finally:
            thaw()


def in_lock(server: TcpStoreServer, monkeypatch: pytest.MonkeyPatch) -> tuple[Callable[[], bool], Callable[[], None]]:
    """Stops a server's thread at the next event."""
    entered, thawed = threading.Event(), threading.Event()

    def frozen(*_: object) -> None:
        entered.set()
        assert thawed.wait(30)

    monkeypatch.setattr(server._loop, "_serve", frozen)
    return entered.is_set, thawed.set


def test_ipv6_and_all_addresses() -> None:
    with TcpStoreServer(host="::1", secret=SECRET) as server:
        assert server.address == f"tcp://[::1]:{port_of(server)}"
        with TcpStore("::1", port_of(server), secret=SECRET) as store:
            assert store.address == server.address
            assert store.add("n", 1) == 1
    for everything in ("", "::"):
        with TcpStoreServer(host=everything, secret=SECRET) as server:
            assert server.address == f"tcp://{socket.gethostname()}:{port_of(server)}"
            with TcpStore("::1", port_of(server), secret=SECRET) as store:
                store.set("key", b"value")
            with TcpStore("127.0.0.1", port_of(server), secret=SECRET) as store:
                assert store.get("key", timeout_seconds=5.0) == b"value"


@pytest.mark.filterwarnings(r"ignore:os.fork\(\) was called:RuntimeWarning")  # by JAX, which the child does not use
def test_a_forked_child_goes_its_own_way(server: TcpStoreServer) -> None:
    with client(server) as store:
        assert store.add("n", 1) == 1
        child = os.fork()
        if child == 0:
            code = 1
            with contextlib.suppress(BaseException):
                total = store.add("n", 1)
                store.set("from the child", b"%d" % total)
                server.close()  # not the child's
                store.close()
                code = 0
            os._exit(code)
        assert store.get("from the child", timeout_seconds=60) == b"2"
        assert os.waitpid(child, 0)[1] == 0
        assert store.add("n", 1) == 3


def test_what_cannot_work(server: TcpStoreServer) -> None:
    with pytest.raises(CommError, match=rf"^host='127.0.0.1' port={port_of(server)}: cannot be listened on"):
        TcpStoreServer(port=port_of(server), secret=SECRET)
    with pytest.raises(CommError, match=r"^host='no-such-host.invalid' port=0: cannot be listened on"):
        TcpStoreServer(host="no-such-host.invalid", secret=SECRET)
    with pytest.raises(ArgumentError, match=r"^secret= has 3 bytes"):
        TcpStoreServer(secret=b"abc")
    with pytest.raises(ArgumentError, match=r"^secret= has 3 bytes"):
        TcpStore("127.0.0.1", 1, secret=b"abc")
    with pytest.raises(ArgumentError, match=r"^port=0: expected 1 to 65535"):
        TcpStore("127.0.0.1", 0, secret=SECRET)
    with pytest.raises(ArgumentError, match=r"^timeout_seconds=0: expected more than 0"):
        TcpStore("127.0.0.1", 1, secret=SECRET, timeout_seconds=0)
    with pytest.raises(ArgumentError, match=r"^handshake_seconds=0: expected more than 0"):
        TcpStoreServer(secret=SECRET, handshake_seconds=0)


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def tls_server(authority: trustme.CA) -> Iterator[TcpStoreServer]:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    with TcpStoreServer(secret=SECRET, tls=context, handshake_seconds=1.0) as opened:
        yield opened


def test_tls_carries_large_values_and_waits(tls_server: TcpStoreServer, authority: trustme.CA) -> None:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    value = os.urandom(8 << 20)
    with client(tls_server, tls=context) as store:
        waiting = [in_thread(store.get, "large", timeout_seconds=60.0) for _ in range(3)]
        until(lambda: list(map(len, tls_server._loop._waiting.values())) == [3])
        store.set("large", value)
        assert [result.get() == value for result in waiting] == [True] * 3


def test_a_certificate_of_somebody_else_is_refused(tls_server: TcpStoreServer) -> None:
    with pytest.raises(
        HandshakeError, match=r"has a certificate that tls= does not accept \(.*\); expected one for '127"
    ):
        client(tls_server, tls=ssl.create_default_context())


def test_tls_at_one_end_only_is_told(server: TcpStoreServer, tls_server: TcpStoreServer) -> None:
    with pytest.raises(
        HandshakeError, match=r"closed the connection within the handshake .* do both ends use TLS or none"
    ):
        client(tls_server, timeout_seconds=10.0)
    with pytest.raises(HandshakeError, match=r"cannot do TLS \(.*\); has its TcpStoreServer tls= as well"):
        client(server, tls=ssl.create_default_context(), timeout_seconds=10.0)


def test_strangers_to_tls_harm_nobody(tls_server: TcpStoreServer, authority: trustme.CA, tmp_path: Path) -> None:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    address = ("127.0.0.1", port_of(tls_server))
    with client(tls_server, tls=context) as store, socket.create_connection(address, timeout=20) as silent:
        with socket.create_connection(address, timeout=20) as loud:
            loud.sendall(os.urandom(2000))
            assert is_dropped(loud)
        with pytest.raises(HandshakeError, match="does not know the secret"):
            TcpStore(*address, secret=b"y" * 32, tls=context)
        with (
            socket.create_connection(address, timeout=20) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as wrapped,
        ):
            wrapped.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert is_dropped(wrapped)
        assert is_dropped(silent)
        assert store.add("n", 1) == 1
    until(lambda: tls_server.num_refused == 4)
