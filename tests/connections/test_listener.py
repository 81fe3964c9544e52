"""Who meets at a listener, and what it leaves behind when the others give up."""

import json
import selectors
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from braidax.connections import reception
from braidax.connections.greeting import Greeting
from braidax.connections.handshake import Handshake
from braidax.connections.hosts import host_id
from braidax.connections.listener import Listener
from braidax.connections.world import World
from braidax.errors import HandshakeError, WaitTimeout


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


def meet(listeners: list[Listener], *, hosts: list[str] | None = None, seconds: float = 30) -> list[float]:
    """Lets ranks meet that each listen, all with all, and returns how long each took."""
    places = [json.loads(listener.address) for listener in listeners]
    names = hosts or [f"host {rank}" for rank in range(len(places))]
    addresses = [json.dumps({**place, "host": name}).encode() for place, name in zip(places, names, strict=True)]
    begun = time.monotonic()

    def join(rank: int) -> float:
        world = World(rank, addresses, names, b"s" * 32)
        opened = listeners[rank].connect(
            world, purpose=b"test", dialed=range(rank), accepted=range(rank + 1, len(places)), deadline=begun + seconds
        )
        took = time.monotonic() - begun
        for connection in opened.values():
            connection.close()
        return took

    with ThreadPoolExecutor(len(listeners)) as threads:
        return [joined.result() for joined in [threads.submit(join, rank) for rank in range(len(listeners))]]


def strangers(listener: Listener, num: int) -> list[socket.socket]:
    """Connects to a port, and says nothing."""
    return [socket.create_connection(("127.0.0.1", json.loads(listener.address)["port"])) for _ in range(num)]


def test_idle_strangers_hold_up_nobody() -> None:
    with ExitStack() as opened:
        listeners = [opened.enter_context(Listener(interfaces=["127.0.0.1"])) for _ in range(3)]
        idle = [opened.enter_context(stranger) for listener in listeners[:2] for stranger in strangers(listener, 200)]
        assert max(meet(listeners)) < 5  # seconds, the limit of one handshake: in fact it is a tenth of one
        for stranger in idle:
            stranger.settimeout(30)
            assert stranger.recv(100)[:7] == b"braidax"  # the hello, and no more: all have been let go
            assert stranger.recv(100) == b""


def test_whoever_says_nothing_is_let_go_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reception, "_HANDSHAKE_SECONDS", 0.2)
    with Listener(interfaces=["127.0.0.1"]) as ours, ExitStack() as opened:
        (stranger,) = [opened.enter_context(each) for each in strangers(ours, 1)]
        seen: list[float] = []

        def look() -> None:
            stranger.settimeout(30)
            while stranger.recv(100):
                pass
            seen.append(time.monotonic())

        looking = threading.Thread(target=look)
        looking.start()
        begun = time.monotonic()
        world = World(0, [ours.address, b""], ["a", "b"], b"s" * 32)
        with pytest.raises(WaitTimeout, match="rank 1"):
            ours.connect(world, purpose=b"test", dialed=[], accepted=[1], deadline=begun + 1.5)
        looking.join(30)
        assert 0.2 <= seen[0] - begun < 1.4


def test_where_there_are_too_many_known_hosts_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reception, "_MAX_STRANGERS", 2)

    def greet(connection: socket.socket, deadline: float) -> Greeting:
        return Greeting(connection, Handshake("accept", purpose=b"test", secret=bytes(32), peer="it"), deadline)

    with ExitStack() as opened:
        listening = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        place = listening.getsockname()
        found = opened.enter_context(reception.Reception([listening], known=["127.0.0.2"], greet=greet))
        came = []
        for source in ("127.0.0.2", "127.0.0.1", "127.0.0.3", "127.0.0.2"):
            came.append(opened.enter_context(socket.create_connection(place, source_address=(source, 0))))
            assert list(found.arrivals(10)) == []
        stays = []
        for stranger in came:
            stranger.settimeout(0.2)
            try:
                while data := stranger.recv(100):
                    assert data
                stays.append(False)
            except TimeoutError:
                stays.append(True)
        assert stays == [True, False, False, True]


def test_a_host_is_known_by_its_addresses() -> None:
    here = json.dumps({"host": host_id(), "addresses": ["10.0.0.1", "fe80::1%eth0"]}).encode()
    there = json.dumps({"host": "there", "addresses": ["::ffff:10.0.0.2"]}).encode()
    world = World(0, [b"", here, there, here], ["a"] * 4, b"s" * 32)
    assert reception.known_addresses(world, [0, 2]) == {"10.0.0.2"}
    assert reception.known_addresses(world, [1]) == {"10.0.0.1", "fe80::1", "127.0.0.1", "::1"}


def test_a_rank_that_is_hung_up_on_comes_again() -> None:
    """The port is crowded: whoever listens there lets the first connections go."""
    with Listener(interfaces=["127.0.0.1"]) as theirs, socket.create_server(("127.0.0.1", 0)) as crowded:

        def let_go() -> None:
            for _ in range(3):
                crowded.accept()[0].close()
            connection, _ = crowded.accept()
            with connection, selectors.DefaultSelector() as selector:
                connection.setblocking(False)
                handshake = Handshake("accept", purpose=b"test", secret=b"s" * 32, peer="it", payload=bytes(4))
                greeting = Greeting(connection, handshake, 0.0)
                selector.register(connection, selectors.EVENT_READ)
                while not greeting.advance():
                    selector.select(30)

        place = {**json.loads(theirs.address), "host": "another", "port": crowded.getsockname()[1]}
        world = World(1, [json.dumps(place).encode(), theirs.address], ["a", "b"], b"s" * 32)
        letting = threading.Thread(target=let_go)
        letting.start()
        opened = theirs.connect(world, purpose=b"test", dialed=[0], accepted=[], deadline=time.monotonic() + 30)
        opened[0].close()
        letting.join(30)


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
