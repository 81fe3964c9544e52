"""What a rank concludes from the end of its neighbor's connection."""

import socket
import sys

import pytest

from braidax.comm.watch import Notice
from braidax.connections.hosts import ADDRESS, LOOPBACK
from tests.comm.watches import LIMIT_SECONDS, two_watches


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
