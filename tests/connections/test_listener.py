"""Who meets at a listener, and what it leaves behind when the others give up."""

import json
import socket
import threading
import time
from pathlib import Path

import pytest

from braidax.connections.listener import Listener
from braidax.connections.world import World
from braidax.errors import HandshakeError


def num_selectors() -> int:
    """Returns how many selectors this process has open."""
    links = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            links.append(str(link.readlink()))
        except FileNotFoundError:  # that of the listing itself
            continue
    return links.count("anon_inode:[eventpoll]")


def test_who_has_come_is_let_go_when_another_gives_up() -> None:
    connected = threading.Event()

    def check() -> None:
        if connected.is_set():
            raise HandshakeError("rank 2 could not join")

    with Listener(interfaces=["127.0.0.1"]) as ours, Listener(interfaces=["127.0.0.1"]) as theirs:
        addresses, hosts, secret = [ours.address, theirs.address, b""], ["a"] * 3, b"s" * 32
        before = num_selectors()
        errors: list[BaseException] = []

        def wait() -> None:
            world = World(0, addresses, hosts, secret, check=check)
            try:
                ours.connect(world, purpose=b"test", dialed=[], accepted=[1, 2], deadline=float("inf"))
            except HandshakeError as error:
                errors.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        world = World(1, addresses, hosts, secret, check=lambda: None)
        opened = theirs.connect(world, purpose=b"test", dialed=[0], accepted=[], deadline=float("inf"))
        connected.set()
        waiting.join(30)
        with opened[0] as connection:
            connection.settimeout(30)
            assert connection.recv(1) == b""
        assert [str(error) for error in errors] == ["rank 2 could not join"]
        assert num_selectors() == before  # though the error, with its frames, is still here


def test_none_come_is_an_error_that_names_them() -> None:
    with Listener(interfaces=["127.0.0.1"]) as ours:
        world = World(0, [ours.address, b""], ["a", "b"], b"s" * 32, check=lambda: None)
        with pytest.raises(Exception, match=r"rank 1 .*did not connect to rank 0 .*in time"):
            ours.connect(world, purpose=b"test", dialed=[], accepted=[1], deadline=0.0)


def ipv6_addresses() -> list[str]:
    """Returns the loopback address of IPv6, where the kernel has it."""
    interfaces = Path("/proc/net/if_inet6")
    lines = interfaces.read_text().splitlines() if interfaces.exists() else []
    return ["::1" for line in lines if line.split()[0] == "0" * 31 + "1"]


@pytest.mark.parametrize("address", ["127.0.0.1", *ipv6_addresses()])
def test_ranks_of_different_hosts_meet_at_an_address(address: str) -> None:
    with Listener(interfaces=[address]) as ours, Listener(interfaces=[address]) as theirs:
        place = json.loads(ours.address)
        assert place["addresses"] == [address]
        elsewhere = json.dumps({**place, "host": "another"}).encode()
        addresses, hosts, secret = [elsewhere, theirs.address], ["a", "b"], b"s" * 32
        found: list[dict[int, socket.socket]] = []
        world = World(0, addresses, hosts, secret)
        deadline = time.monotonic() + 30
        waiting = threading.Thread(
            target=lambda: found.append(
                ours.connect(world, purpose=b"test", dialed=[], accepted=[1], deadline=deadline)
            )
        )
        waiting.start()
        opened = theirs.connect(
            World(1, addresses, hosts, secret), purpose=b"test", dialed=[0], accepted=[], deadline=deadline
        )
        waiting.join(30)
        with opened[0] as one, found[0][1] as other:
            one.sendall(b"here")
            assert other.recv(4) == b"here"
            assert one.getpeername()[0] == address
