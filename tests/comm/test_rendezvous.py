"""How ranks meet: what `connect` refuses, whom it names, and which strangers it does not mind."""

import base64
import contextlib
import importlib.metadata
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import numpy as np
import pytest

from braidax.comm import (
    Communicator,
    Hub,
    InProcessTransport,
    MemoryStore,
    Store,
    TcpStore,
    TcpStoreServer,
    Tuning,
    connect,
    rendezvous,
)
from braidax.comm.rendezvous import give_up_meeting
from braidax.comm.transports.tcp import TcpTransport
from braidax.connections.handshake import connect_handshake
from braidax.connections.world import World
from braidax.errors import Aborted, ArgumentError, BraidaxError, CommError, HandshakeError, PeerLost, WaitTimeout
from tests.support.comm.relay import altered

HOSTS = [Tuning(host=f"host-{rank}", peer_timeout_seconds=10.0) for rank in range(5)]
Meet = Callable[..., "list[Any]"]


class Ranks:
    """Ranks that are threads, each with arguments of its own for `connect`."""

    def __init__(self) -> None:
        self.outcomes: dict[int, Any] = {}
        self.seconds: dict[int, float] = {}
        self._threads: list[threading.Thread] = []

    def begin(self, store: Store, **given: Any) -> int:
        """Lets one more rank join, and sum ones. **Returns:** its number: `outcomes` has the sum or the error."""
        number = len(self._threads)
        given = {"timeout_seconds": 20.0, "tuning": HOSTS[given["rank"]], "job": "job", **given}

        def main() -> None:
            began = time.monotonic()
            try:
                with connect(store, **given) as comm:
                    self.outcomes[number] = comm.all_reduce(np.ones(3)).tolist()
                    comm.barrier()
            except BraidaxError as error:
                self.outcomes[number] = error
            self.seconds[number] = time.monotonic() - began

        self._threads.append(threading.Thread(target=main, name=f"rank-{number}"))
        self._threads[-1].start()
        return number

    def end(self) -> list[Any]:
        """Waits for all, and returns what came of them."""
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), f"{thread.name} hangs"
        return [self.outcomes[number] for number in range(len(self._threads))]


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    made.end()


def texts(outcomes: Sequence[Any], kind: type[BaseException] = HandshakeError) -> list[str]:
    """Returns the messages of errors, all of one kind but where a rank only heard of another's."""
    for outcome in outcomes:
        heard = str(outcome).startswith("another rank could not join, and this generation is over: ")
        assert type(outcome) is (Aborted if heard else kind), outcomes
    assert any(type(outcome) is kind for outcome in outcomes), outcomes
    return [str(outcome) for outcome in outcomes]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"rank": 0, "size": 0}, "size=0: expected a whole number >= 1"),
        ({"rank": 2, "size": 2}, "rank=2: expected a whole number from 0 to size - 1, 1"),
        ({"rank": -1, "size": 2}, "rank=-1: expected a whole number from 0 to size - 1, 1"),
        ({"rank": 0, "size": 1, "timeout_seconds": 0}, "timeout_seconds=0: expected seconds > 0"),
        ({"rank": 0, "size": 1, "job": "a/b"}, "job='a/b': expected a name without '/'"),
        ({"rank": 0, "size": 1, "generation": -1}, "generation=-1: expected a whole number >= 0"),
        ({"rank": 0, "size": 1, "transport": "pigeon"}, "'pigeon': expected one of"),
    ],
)
def test_arguments_that_cannot_work(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        connect(MemoryStore(), **given)


def test_a_wrong_size_is_named_at_both(ranks: Ranks) -> None:
    store = MemoryStore()
    ranks.begin(store, rank=0, size=2)
    ranks.begin(store, rank=1, size=3)
    one, other = texts(ranks.end())
    pid = os.getpid()
    assert (
        one == f"rank 1 (host host-1, pid {pid}) was started as one of size=3 ranks, rank 0 as one of 2; "
        "start all with the same size"
    ) or "another rank could not join, and this generation is over: HandshakeError in rank 1: " in one
    assert f"rank 0 (host host-0, pid {pid}) was started as one of size=2 ranks, rank 1 as one of 3" in other
    assert max(ranks.seconds.values()) < 5


def test_a_rank_that_is_there_twice(ranks: Ranks) -> None:
    """Two jobs of the same name meet in one store: the second hears why it cannot join, and so does the first."""
    store = MemoryStore()
    ranks.begin(store, rank=0, size=2)
    while "job/0/card/0" not in {key.decode() for key in store._values}:
        time.sleep(0.01)
    ranks.begin(store, rank=0, size=2)
    first, second = texts(ranks.end())
    words = (
        f"rank 0 has joined job='job', generation=0, at {store.address} before; expected each rank once: give another "
        "job its own job=, and the same job, when it connects again, the next generation="
    )
    assert second == words
    assert first == f"another rank could not join, and this generation is over: HandshakeError in rank 0: {words}"
    assert max(ranks.seconds.values()) < 5


def test_jobs_and_generations_of_one_store_do_not_meet(ranks: Ranks) -> None:
    store = MemoryStore()
    for job, size in (("a", 2), ("b", 3)):
        for generation in range(2):
            for rank in range(size):
                ranks.begin(store, rank=rank, size=size, job=job, generation=generation)
    assert ranks.end() == [[2.0] * 3] * 4 + [[3.0] * 3] * 6


def test_other_versions_are_named(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = importlib.metadata.version("braidax")
    monkeypatch.setattr(
        importlib.metadata,
        "version",
        lambda name: "9.9.9" if threading.current_thread().name == "rank-1" else installed,
    )
    store = MemoryStore()
    ranks.begin(store, rank=0, size=2)
    ranks.begin(store, rank=1, size=2)
    one, other = texts(ranks.end())
    assert (
        f"rank 1 (host host-1, pid {os.getpid()}) runs braidax 9.9.9, rank 0 {installed}; install the same" in one
        or ("HandshakeError in rank 1" in one)
    )
    assert (
        f"rank 0 (host host-0, pid {os.getpid()}) runs braidax {installed}, rank 1 9.9.9; install the same" in other
        or ("HandshakeError in rank 0" in other)
    )
    assert max(ranks.seconds.values()) < 5


def test_other_transports_are_named(ranks: Ranks) -> None:
    store = MemoryStore()
    ranks.begin(store, rank=0, size=2, transport="tcp")
    ranks.begin(store, rank=1, size=2, transport=InProcessTransport(Hub()))
    found = texts(ranks.end())
    assert any(
        "uses transport='in-process', rank 0 'tcp'; give all ranks the same transport" in text for text in found
    ) or any("uses transport='tcp', rank 1 'in-process'; give all ranks the same transport" in text for text in found)
    assert max(ranks.seconds.values()) < 5


def test_ranks_that_never_come_are_named(ranks: Ranks) -> None:
    store = MemoryStore()
    for rank in (0, 2):
        ranks.begin(store, rank=rank, size=5, timeout_seconds=1.0)
    outcomes = ranks.end()
    assert any(isinstance(outcome, WaitTimeout) for outcome in outcomes)
    for text in outcomes:
        assert isinstance(text, WaitTimeout | Aborted)
        assert (
            f"ranks 1, 3, 4 of 5 did not join job='job', generation=0, at {store.address} within timeout_seconds=1; "
            "expected all of them: look at their logs, and see that all use the same store, job, generation and size"
        ) in str(text)
    assert all(0.9 < seconds < 6 for seconds in ranks.seconds.values())


def test_ranks_are_told_that_others_will_not_come(ranks: Ranks) -> None:
    """By somebody who knows, whichever ranks wait already; another generation is not concerned."""
    store = MemoryStore()
    ranks.begin(store, rank=0, size=3)
    give_up_meeting(store, job="job", generation=0, reason="rank 1 ended")
    ranks.begin(store, rank=2, size=3)
    for outcome in ranks.end():
        assert isinstance(outcome, Aborted)
        assert str(outcome).startswith("another rank could not join, and this generation is over: ")
        assert str(outcome).endswith("rank 1 ended")
    assert max(ranks.seconds.values()) < 10
    ranks.begin(store, rank=0, size=1, generation=1)
    assert ranks.end()[-1] == [1.0] * 3


class AlteredStore(Store):
    """A store in which the place of one rank is another."""

    def __init__(self, rank: int, places: dict[str, Any]) -> None:
        self._store = MemoryStore()
        self._rank = rank
        self._places = places

    @property
    def address(self) -> str:
        return self._store.address

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)

    def get(self, key: str, *, timeout_seconds: float) -> bytes:
        value = self._store.get(key, timeout_seconds=timeout_seconds)
        if "/card/" not in key:
            return value
        return altered(value, lambda rank, places: places | (self._places if rank == self._rank else {}))

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def close(self) -> None:
        self._store.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_an_address_at_which_nobody_listens(ranks: Ranks) -> None:
    port = free_port()
    store = AlteredStore(0, {"port": port})
    for rank in range(2):
        ranks.begin(store, rank=rank, size=2, timeout_seconds=3.0)
    waited, dialed = ranks.end()
    assert isinstance(dialed, PeerLost)
    assert (dialed.rank, dialed.host) == (0, "host-0")
    assert str(dialed).startswith(f"rank 0 (host host-0) is lost: nobody listens at 127.0.0.1:{port} any more; ")
    assert ranks.seconds[1] < 3
    assert "rank 1" in str(waited), waited
    assert ranks.seconds[0] < 8


def test_several_addresses_that_refuse(ranks: Ranks) -> None:
    port = free_port()
    store = AlteredStore(0, {"host": "elsewhere", "addresses": ["127.0.0.2", "127.0.0.3"], "port": port})
    for rank in range(2):
        ranks.begin(store, rank=rank, size=2, timeout_seconds=1.5)
    waited, dialed = texts(ranks.end(), WaitTimeout)
    assert f"rank 0 (host host-0) cannot be reached: 127.0.0.2:{port}: [Errno 111] Connection refused" in dialed
    assert f"127.0.0.3:{port}: [Errno 111] Connection refused; expected one of its addresses to answer" in dialed
    assert "BRAIDAX_ADDRESS there" in dialed
    assert waited.startswith("rank 1 (host host-1) did not connect to rank 0 (host host-0) in time; expected the port ")
    assert all(1.4 < seconds < 7 for seconds in ranks.seconds.values())


class StrangeStore(AlteredStore):
    """A store that lets strangers connect wherever a rank listens, before any peer does."""

    def __init__(self, stranger: Callable[[int], Any]) -> None:
        super().__init__(0, {})
        self._stranger = stranger
        self.opened: list[Any] = []

    def set(self, key: str, value: bytes) -> None:
        if "/card/" in key:
            card = json.loads(value)
            for name in ("address", "watch"):
                self.opened.append(self._stranger(json.loads(base64.b64decode(card[name]))["port"]))
        super().set(key, value)


def silent(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port))


def garbage(port: int) -> socket.socket:
    connection = silent(port)
    connection.sendall(b"GET / HTTP/1.1\r\nHost: example\r\n\r\n" + bytes(range(256)) * 100)
    return connection


def gone(port: int) -> socket.socket:
    connection = silent(port)
    connection.close()
    return connection


def other_secret(port: int) -> threading.Thread:
    def main() -> None:
        with silent(port) as connection, pytest.raises(HandshakeError):
            connect_handshake(
                connection,
                purpose=b"tcp",
                secret=bytes(32),
                peer="a rank",
                deadline=time.monotonic() + 20,
                payload=(1).to_bytes(4, "big"),
            )

    thread = threading.Thread(target=main, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("stranger", [silent, garbage, gone, other_secret])
def test_strangers_do_not_disturb(stranger: Callable[[int], Any], ranks: Ranks) -> None:
    store = StrangeStore(stranger)
    for rank in range(3):
        ranks.begin(store, rank=rank, size=3)
    assert ranks.end() == [[3.0] * 3] * 3
    assert len(store.opened) == 6
    for opened in store.opened:
        if isinstance(opened, socket.socket):
            opened.close()
        else:
            opened.join(30)
            assert not opened.is_alive()
    assert max(ranks.seconds.values()) < 5


@final
class Tap:
    """Forwards connections to a port of this host, and keeps all that passes, in both directions."""

    def __init__(self, port: int) -> None:
        self.passed = bytearray()
        self._to = port
        self._opened: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        """Ends when both ends of all connections have."""
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(30)
        for opened in (self._listener, *self._opened):
            opened.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                here, _ = self._listener.accept()
                there = socket.create_connection(("127.0.0.1", self._to))
                self._opened += [here, there]
                for ends in ((here, there), (there, here)):
                    self._threads.append(threading.Thread(target=self._pass, args=ends))
                    self._threads[-1].start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):  # reset
            while data := source.recv(1 << 16):
                self.passed += data
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


def test_who_reads_along_at_the_store_cannot_join(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets: set[bytes] = set()

    def keep(*given: Any, **options: Any) -> World:
        world = World(*given, **options)
        secrets.add(world.secret)
        return world

    monkeypatch.setattr(rendezvous, "World", keep)
    of_store = b"the secret of the store itself.."
    with TcpStoreServer(secret=of_store) as server, contextlib.ExitStack() as stack:
        tap = Tap(int(server.address.rpartition(":")[2]))
        stack.callback(tap.close)
        for generation in range(2):
            for rank in range(2):
                store = stack.enter_context(TcpStore("127.0.0.1", tap.port, secret=of_store))
                ranks.begin(store, rank=rank, size=2, generation=generation)
        assert ranks.end() == [[2.0] * 3] * 4
        assert len(secrets) == 2  # one a generation
        for secret in (*secrets, of_store):
            assert len(secret) == 32
            assert secret not in tap.passed
        assert b"job/1/seed" in tap.passed


def test_the_same_job_meets_again_as_the_next_generation() -> None:
    store = MemoryStore()
    for generation in range(3):
        made = Ranks()
        for rank in range(3):
            made.begin(store, rank=rank, size=3, generation=generation)
        assert made.end() == [[3.0] * 3] * 3


def test_an_generation_that_is_over_takes_nobody_back() -> None:
    store = MemoryStore()
    with connect(store, rank=0, size=1, job="job") as comm:
        assert isinstance(comm, Communicator)
    with pytest.raises(
        HandshakeError, match=r"rank 0 has joined job='job', generation=0, at memory:.* before; .* generation="
    ):
        connect(store, rank=0, size=1, job="job")


def test_a_rank_that_gives_up_while_connecting_ends_the_wait_of_all() -> None:
    """The third rank's transport fails after all have met: the others need not wait for it up to the limit."""

    def fail(world: object, *, timeout_seconds: float) -> None:
        raise CommError("no such device")

    start = time.monotonic()
    store = MemoryStore()
    found: list[BaseException] = []

    def join(rank: int) -> None:
        transport = TcpTransport()
        if rank == 2:
            transport.connect = fail
        try:
            connect(store, rank=rank, size=3, transport=transport, timeout_seconds=60)
        except BaseException as error:  # noqa: BLE001 (looked at below)
            found.append(error)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert time.monotonic() - start < 20
    assert len(found) == 3
    assert all("no such device" in str(error) or isinstance(error, PeerLost) for error in found)
