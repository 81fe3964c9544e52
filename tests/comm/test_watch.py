"""What a rank concludes from the end of its neighbor's connection."""

import socket
import sys

import pytest

from braidax.comm.watch import Notice
from braidax.connections.hosts import ADDRESS, LOOPBACK
from tests.support.comm.watches import LIMIT_SECONDS, two_watches


@pytest.mark.skipif(sys.platform != "linux", reason="inside a host ranks connect through TCP elsewhere")
@pytest.mark.parametrize(
    ("address", "words"),
    [(None, "its process ended"), (LOOPBACK, "the connection to it broke: [Errno 104] Connection reset by peer")],
)
def test_an_end_with_unread_bytes(address: str | None, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel says the same of a process that ends with unread bytes and of a connection that was cut on the way."""
    if address is not None:
        monkeypatch.setenv(ADDRESS, address)
    watches = two_watches()
    try:
        watches[0].tell(Notice("left", 0, "it is not read"))
        ended = watches[1]._neighbors[0].channel.socket
        ended.settimeout(LIMIT_SECONDS)
        assert ended.recv(1, socket.MSG_PEEK)  # it has come
        ended.close()
        found: list[Notice] = []
        while not found:
            found = watches[0].look()
        assert found == [Notice("lost", 1, words)]
    finally:
        watches[1]._neighbors.clear()
        for watch in watches:
            watch.close()


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (b"\xff" * 16, "it announced a frame of 65,535 parts; expected at most 1"),
        (
            b"\x00\x01" + b"\xff" * 8,
            "it announced a frame of 18,446,744,073,709,551,615 bytes; expected at most 65,536",
        ),
        (b"\x00\x01" + bytes(7) + b"\x01{", "it sent what is no notice: "),
        (b"\x00\x01" + bytes(7) + b"\x02{}", "it sent what is no notice: "),
    ],
)
def test_a_neighbor_that_says_what_is_no_notice_is_lost(said: bytes, words: str) -> None:
    watches = two_watches()
    try:
        watches[1]._neighbors[0].channel.socket.sendall(said)
        found: list[Notice] = []
        while not found:
            found = watches[0].look()
        assert (found[0].kind, found[0].rank) == ("lost", 1)
        assert found[0].reason.startswith(words)
    finally:
        for watch in watches:
            watch.close()


def test_beats_are_left_out_for_a_neighbor_that_reads_nothing() -> None:
    watches = two_watches()
    try:
        neighbor = watches[0]._neighbors[0]
        neighbor.channel.send([bytes(1 << 23)])  # more than the kernel keeps
        before = neighbor.channel.unsent_bytes
        assert before > 1 << 16
        neighbor.beat()
        assert neighbor.channel.unsent_bytes == before
    finally:
        for watch in watches:
            watch.close()
