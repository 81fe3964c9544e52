"""The handshake: who fits gets in, with a payload that is the other's own; all others are told why."""

import selectors
import socket
import struct
import time
from collections.abc import Iterator

import pytest

from braidax.connections import handshake
from braidax.connections.greeting import Greeting
from braidax.connections.handshake import Handshake, connect_handshake
from braidax.errors import ArgumentError, HandshakeError, WaitTimeout
from tests.support.comm.stores.servers import in_thread

SECRET = b"s" * 32


def soon() -> float:
    return time.monotonic() + 20


def accept_handshake(connection: socket.socket, *, purpose: bytes, peer: str) -> bytes:
    """Does the handshake of the accepting end, as those who accept connections do, and returns the payload."""
    connection.setblocking(False)
    greeting = Greeting(connection, Handshake("accept", purpose=purpose, secret=SECRET, peer=peer), soon())
    with selectors.DefaultSelector() as selector:
        selector.register(connection, greeting.interest)
        while not greeting.advance():
            assert selector.select(20)
            selector.modify(connection, greeting.interest)
    connection.settimeout(None)
    assert greeting.handshake.payload is not None
    return greeting.handshake.payload


def shake(connecting: Handshake, accepting: Handshake, *, step: int = 10_000) -> None:
    """Passes bytes between two ends until nothing moves any more."""
    ends = {connecting: bytearray(), accepting: bytearray()}  # what is on the way to each
    moved = True
    while moved:
        moved = False
        for end, other in ((connecting, accepting), (accepting, connecting)):
            outgoing = end.take()
            ends[other] += outgoing
            moved = moved or bool(outgoing)
            while ends[end] and end.needed_bytes:
                num_bytes = min(step, end.needed_bytes)
                data = bytes(ends[end][:num_bytes])
                del ends[end][:num_bytes]
                end.feed(data)
                moved = True


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


@pytest.mark.parametrize("step", [1, 7, 10_000])
def test_both_ends_get_the_payload_of_the_other(step: int) -> None:
    connecting = Handshake("connect", purpose=b"tcp", secret=SECRET, peer="b", payload=b"rank 1")
    accepting = Handshake("accept", purpose=b"tcp", secret=SECRET, peer="a", payload=b"x" * 1024)
    assert connecting.payload is None
    shake(connecting, accepting, step=step)
    assert (connecting.done, accepting.done) == (True, True)
    assert (connecting.payload, accepting.payload) == (b"x" * 1024, b"rank 1")
    assert (connecting.needed_bytes, accepting.needed_bytes) == (0, 0)


def test_sockets_are_left_as_they_were_and_nothing_behind_is_read(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[0].settimeout(7)
    accepted = in_thread(accept_handshake, pair[1], purpose=b"w", peer="a")
    assert connect_handshake(pair[0], purpose=b"w", secret=SECRET, peer="b", deadline=soon(), payload=b"P") == b""
    pair[0].sendall(b"behind")
    assert accepted.get() == b"P"
    assert pair[1].recv(100) == b"behind"
    assert (pair[0].gettimeout(), pair[1].gettimeout()) == (7, None)


def test_another_secret_is_refused_at_both_ends(pair: tuple[socket.socket, socket.socket]) -> None:
    accepted = in_thread(accept_handshake, pair[1], purpose=b"tcp", peer="rank 3")
    with pytest.raises(HandshakeError, match=r"^rank 0 does not know the secret of this process; .*BRAIDAX_SECRET"):
        connect_handshake(pair[0], purpose=b"tcp", secret=b"S" * 32, peer="rank 0", deadline=soon())
    with pytest.raises(HandshakeError, match=r"^rank 3 does not know the secret of this process; .* secret="):
        accepted.get()


def test_the_accepting_end_proves_nothing_to_a_stranger() -> None:
    stranger = Handshake("connect", purpose=b"tcp", secret=b"S" * 32, peer="b")
    accepting = Handshake("accept", purpose=b"tcp", secret=SECRET, peer="a")
    with pytest.raises(HandshakeError):
        shake(stranger, accepting)
    assert accepting.take() == bytes(32)
    assert not accepting.done


def test_the_payload_is_covered_by_the_proof() -> None:
    connecting = Handshake("connect", purpose=b"tcp", secret=SECRET, peer="b", payload=b"rank 1")
    accepting = Handshake("accept", purpose=b"tcp", secret=SECRET, peer="a")
    hello = connecting.take().replace(b"rank 1", b"rank 2")
    connecting_proof = feed(connecting, accepting.take())
    with pytest.raises(HandshakeError, match="does not know the secret"):
        feed(accepting, hello + connecting_proof)


def feed(end: Handshake, data: bytes) -> bytes:
    """Gives an end all it can take; returns what it has to send."""
    while data and end.needed_bytes:
        num_bytes = end.needed_bytes
        end.feed(data[:num_bytes])
        data = data[num_bytes:]
    return end.take()


@pytest.mark.parametrize("role", ["connect", "accept"])
def test_a_reflected_hello_is_refused(role: handshake.Role) -> None:
    end = Handshake(role, purpose=b"tcp", secret=SECRET, peer="mirror")
    with pytest.raises(HandshakeError, match=r"mirror plays the role \d in the handshake, expected \d"):
        feed(end, end.take())


def test_a_reflected_proof_is_refused() -> None:
    victim = Handshake("connect", purpose=b"tcp", secret=SECRET, peer="mirror")
    hello = bytearray(victim.take())
    hello[8] = 2  # the role: the mirror pretends to accept
    proof = feed(victim, bytes(hello))
    assert len(proof) == 32
    with pytest.raises(HandshakeError, match="mirror does not know the secret"):
        feed(victim, proof)


def test_a_recorded_handshake_proves_nothing_again() -> None:
    connecting = Handshake("connect", purpose=b"tcp", secret=SECRET, peer="b")
    accepting = Handshake("accept", purpose=b"tcp", secret=SECRET, peer="a")
    recorded = connecting.take()
    recorded += feed(connecting, accepting.take())
    feed(accepting, recorded)
    assert accepting.done
    again = Handshake("accept", purpose=b"tcp", secret=SECRET, peer="a")
    again.take()
    with pytest.raises(HandshakeError, match="does not know the secret"):
        feed(again, recorded)


def test_another_version_is_named_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    accepting = Handshake("accept", purpose=b"tcp", secret=SECRET, peer="rank 1")
    old = accepting.take()
    with monkeypatch.context() as patch:
        patch.setattr(handshake, "VERSION", 3)
        newer = Handshake("connect", purpose=b"tcp", secret=SECRET, peer="rank 0")
        hello = newer.take()
        with pytest.raises(HandshakeError, match=r"rank 0 speaks version 2 .*, this process version 3; install the"):
            feed(newer, old)
    with pytest.raises(HandshakeError, match=r"rank 1 speaks version 3 .*, this process version 2; install the"):
        feed(accepting, hello)


def test_another_purpose_is_named() -> None:
    with pytest.raises(HandshakeError, match=r"^a is a connection for b'watch', expected one for b'store'"):
        shake(
            Handshake("connect", purpose=b"watch", secret=SECRET, peer="b"),
            Handshake("accept", purpose=b"store", secret=SECRET, peer="a"),
        )


def test_a_payload_that_is_longer_than_wanted_is_refused_before_it_comes() -> None:
    connecting = Handshake("connect", purpose=b"tcp", secret=SECRET, peer="b", payload=b"x" * 65)
    accepting = Handshake("accept", purpose=b"tcp", secret=SECRET, peer="a", max_payload_bytes=64)
    with pytest.raises(HandshakeError, match="a announced a purpose of 3 and a payload of 65 bytes; expected at most"):
        feed(accepting, connecting.take()[:44])
    with pytest.raises(HandshakeError, match="announced a purpose of 0"):
        feed(
            Handshake("accept", purpose=b"tcp", secret=SECRET, peer="a"),
            struct.pack("!7sBBBH32s", b"braidax", 2, 1, 0, 0, bytes(32)),
        )


@pytest.mark.parametrize("greeting", [b"HTTP/1.1 400 Bad Request\r\n", b"SSH-2.0-OpenSSH\r\n", b"\x15\x03\x01", b"b\0"])
def test_what_is_no_braidax_is_shown(pair: tuple[socket.socket, socket.socket], greeting: bytes) -> None:
    pair[1].sendall(greeting)
    with pytest.raises(HandshakeError) as caught:
        connect_handshake(pair[0], purpose=b"tcp", secret=SECRET, peer="rank 2", deadline=soon())
    assert str(caught.value).startswith(
        f"rank 2 does not speak Braidax's protocol: it began with {greeting[:8]!r}; is it the right address"
    )


def test_an_end_that_goes_is_an_error_at_once(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[1].shutdown(socket.SHUT_WR)
    with pytest.raises(
        HandshakeError, match=r"rank 2 closed the connection within the handshake \(end of the stream\)"
    ):
        connect_handshake(pair[0], purpose=b"tcp", secret=SECRET, peer="rank 2", deadline=soon())


def test_silence_and_drops_end_in_time(pair: tuple[socket.socket, socket.socket]) -> None:
    begun = time.monotonic()
    pair[1].sendall(b"braid")
    with pytest.raises(WaitTimeout, match="rank 2 did not finish the handshake in time"):
        connect_handshake(pair[0], purpose=b"tcp", secret=SECRET, peer="rank 2", deadline=begun + 0.3)
    assert 0.3 <= time.monotonic() - begun < 3


def test_what_cannot_work() -> None:
    with pytest.raises(ArgumentError, match=r"^secret= has 15 bytes: expected at least 16"):
        Handshake("accept", purpose=b"tcp", secret=b"x" * 15, peer="a")
    with pytest.raises(ArgumentError, match=r"purpose=b'': expected 1 to 16 bytes"):
        Handshake("accept", purpose=b"", secret=SECRET, peer="a")
    with pytest.raises(ArgumentError, match=r"payload= has 1,025 bytes: expected at most 1,024"):
        Handshake("accept", purpose=b"tcp", secret=SECRET, peer="a", payload=bytes(1025))
    with pytest.raises(ArgumentError, match=r"data= has 9 bytes: expected at most needed_bytes, 8"):
        Handshake("accept", purpose=b"tcp", secret=SECRET, peer="a").feed(b"braidax!!")
