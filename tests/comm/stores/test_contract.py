"""The contract of stores, for each of them: between threads, between processes, between jobs."""

import contextlib
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import trustme

from braidax.comm.stores.file import FileStore
from braidax.comm.stores.jax import JaxStore
from braidax.comm.stores.limits import MAX_AMOUNT, MAX_KEY_BYTES
from braidax.comm.stores.memory import MemoryStore
from braidax.comm.stores.redis import RedisStore
from braidax.comm.stores.store import ScopedStore, Store
from braidax.comm.stores.tcp_server import TcpStoreServer
from braidax.comm.stores.urls import open_store
from braidax.errors import ArgumentError, WaitTimeout
from tests.support.comm.stores.servers import (
    REDIS_PASSWORD,
    SECRET,
    Neighbor,
    coordination_service,
    in_thread,
    redis_server,
)

ODD_KEYS = ["", ".", "..", "/", "a/b", "/a/b", "a//b", "a/b/", "a b\n\0", "Ä€😀", "A", "%2F", "\ud800", "k" * 4000]


@dataclass
class Place:
    """A store of the test's own job, and other processes that see the same one."""

    store: Store
    job: str
    name: str
    neighbors: list[Neighbor]

    def tell(self, number: int, action: str, **given: Any) -> None:
        self.neighbors[number].tell(action, self.name, job=self.job, generation=0, **given)

    def ask(self, number: int, action: str, **given: Any) -> Any:
        self.tell(number, action, **given)
        return self.neighbors[number].hear()


@pytest.fixture(scope="module")
def neighbors() -> Iterator[list[Neighbor]]:
    with contextlib.ExitStack() as stack:
        started = [Neighbor() for _ in range(2)]
        for neighbor in started:
            stack.callback(neighbor.close)
        assert [neighbor.hear() for neighbor in started] == ["ready"] * 2
        yield started


@pytest.fixture(scope="module", params=["memory", "file", "tcp", "tls", "redis", "jax"])
def opened(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Store, list[Neighbor]]]:
    """Each store once, opened in all processes that can."""
    name: str = request.param
    folder = tmp_path_factory.mktemp(name)
    with contextlib.ExitStack() as stack:
        if name == "memory":
            yield name, stack.enter_context(MemoryStore()), []
            return
        others: list[Neighbor] = request.getfixturevalue("neighbors")
        if name == "jax":
            yield name, JaxStore(stack.enter_context(coordination_service(others, name))), others
            return
        store, authority = _open(name, folder, stack)
        for other in others:
            assert other.ask("open", name, url=store.address, authority=authority) is None
        yield name, store, others


def _open(name: str, folder: Path, stack: contextlib.ExitStack) -> tuple[Store, str | None]:
    if name == "file":
        return stack.enter_context(FileStore(folder / "a store, 100%")), None
    if name == "redis":
        port = stack.enter_context(redis_server(folder))
        return stack.enter_context(RedisStore(f"redis://:{REDIS_PASSWORD}@127.0.0.1:{port}/3")), None
    if name == "tcp":
        server = stack.enter_context(TcpStoreServer(secret=SECRET))
        return stack.enter_context(open_store(server.address, secret=SECRET)), None
    server_tls, client_tls, authority = contexts(folder)
    server = stack.enter_context(TcpStoreServer(secret=SECRET, tls=server_tls))
    return stack.enter_context(open_store(server.address, secret=SECRET, tls=client_tls)), authority


def contexts(folder: Path) -> tuple[ssl.SSLContext, ssl.SSLContext, str]:
    """Returns the TLS of a server on loopback, that of its clients, and the file of their authority."""
    authority = trustme.CA()
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(server)
    authority.cert_pem.write_to_path(str(folder / "authority.pem"))
    return server, ssl.create_default_context(cafile=folder / "authority.pem"), str(folder / "authority.pem")


@pytest.fixture
def place(opened: tuple[str, Store, list[Neighbor]]) -> Place:
    name, store, others = opened
    job = uuid4().hex
    return Place(ScopedStore(store, job=job, generation=0), job, name, others)


@pytest.mark.parametrize("value", [b"", b"\0\xff text", bytes(range(256)) * 4096], ids=["empty", "short", "1 MiB"])
def test_a_value_is_what_was_set_last(place: Place, value: bytes) -> None:
    place.store.set("key", b"first")
    assert place.store.get("key", timeout_seconds=0) == b"first"
    place.store.set("key", value)
    assert place.store.get("key", timeout_seconds=0) == value
    for number in range(len(place.neighbors)):
        assert bytes.fromhex(place.ask(number, "get", key="key", seconds=0)) == value


def test_get_waits_for_another_thread(place: Place) -> None:
    begun = time.monotonic()
    waiting = [in_thread(place.store.get, f"late {number % 2}", timeout_seconds=60.0) for number in range(6)]
    with pytest.raises(WaitTimeout):
        place.store.get("never", timeout_seconds=0.2)
    place.store.set("late 1", b"1")
    place.store.set("late 0", b"0")
    assert [result.get() for result in waiting] == [b"0", b"1"] * 3
    assert time.monotonic() - begun < 10


def test_get_waits_for_another_process(place: Place) -> None:
    for number in range(len(place.neighbors)):
        here = in_thread(place.store.get, f"from {number}", timeout_seconds=60.0)
        place.tell(number, "get", key=f"to {number}", seconds=60.0)
        with pytest.raises(WaitTimeout):
            place.store.get("never", timeout_seconds=0.2)
        place.store.set(f"to {number}", b"hello")
        assert bytes.fromhex(place.neighbors[number].hear()) == b"hello"
        assert place.ask(number, "set", key=f"from {number}", value=b"hi".hex()) is None
        assert here.get() == b"hi"


def test_no_two_callers_add_up_to_the_same(place: Place) -> None:
    for number in range(len(place.neighbors)):
        place.tell(number, "add", key="count", amount=1, times=50)
    threads = [in_thread(lambda: [place.store.add("count", 1) for _ in range(50)]) for _ in range(3)]
    sums = [thread.get() for thread in threads] + [neighbor.hear() for neighbor in place.neighbors]
    assert sorted(number for each in sums for number in each) == list(range(1, 50 * len(sums) + 1))
    assert all(each == sorted(each) for each in sums)
    assert place.store.add("count", -7) == 50 * len(sums) - 7
    assert place.store.add("count", 0) == 50 * len(sums) - 7
    assert place.store.add("large", MAX_AMOUNT) == MAX_AMOUNT
    assert place.store.add("large", MAX_AMOUNT) == 2 * MAX_AMOUNT


def test_a_counter_and_a_value_of_one_key_do_not_meet(place: Place) -> None:
    assert place.store.add("key", 5) == 5
    place.store.set("key", b"x")
    assert place.store.add("key", 1) == 6
    assert place.store.get("key", timeout_seconds=0) == b"x"


@pytest.mark.parametrize("seconds", [0, 0.3])
def test_a_wait_ends_in_time_and_names_key_and_store(place: Place, seconds: float) -> None:
    begun = time.monotonic()
    with pytest.raises(WaitTimeout) as caught:
        place.store.get("nobody's", timeout_seconds=seconds)
    took = time.monotonic() - begun
    assert seconds <= took < seconds + 5
    assert place.store.address in str(caught.value)
    assert f'the key "{place.job}/0/nobody\'s" got no value within {seconds:g} s' in str(caught.value)
    assert "does it use the same store, job and generation?" in str(caught.value)


def test_all_derive_the_same_secret_of_a_seed(place: Place) -> None:
    seed = bytes(range(32))
    derived = place.store.derive_secret(seed)
    assert len(derived) == 32
    for number in range(len(place.neighbors)):
        assert bytes.fromhex(place.ask(number, "derive_secret", seed=seed.hex())) == derived
    with_secret = place.name in ("tcp", "tls")
    assert (derived == seed) == (not with_secret)
    assert (place.store.derive_secret(bytes(32)) == derived) is False


def test_odd_keys_are_keys_of_their_own(place: Place) -> None:
    for number, key in enumerate(ODD_KEYS):
        place.store.set(key, b"%d" % number)
        assert place.store.add(key, number) == number
    assert [int(place.store.get(key, timeout_seconds=0)) for key in ODD_KEYS] == list(range(len(ODD_KEYS)))
    assert [place.store.add(key, 0) for key in ODD_KEYS] == list(range(len(ODD_KEYS)))
    if place.neighbors:
        seen = [bytes.fromhex(place.ask(0, "get", key=key, seconds=0)) for key in ODD_KEYS]
        assert seen == [b"%d" % number for number in range(len(ODD_KEYS))]


def test_jobs_and_generations_do_not_meet(opened: tuple[str, Store, list[Neighbor]]) -> None:
    job = uuid4().hex
    scopes = [
        ScopedStore(opened[1], job=f"{job}{name}", generation=generation)
        for name in ("a", "b")
        for generation in (0, 1)
    ]
    for number, scope in enumerate(scopes):
        with pytest.raises(WaitTimeout):
            scope.get("key", timeout_seconds=0)
        scope.set("key", b"%d" % number)
        assert scope.add("ranks", 1) == 1
    assert [scope.get("key", timeout_seconds=0) for scope in scopes] == [b"0", b"1", b"2", b"3"]


def test_what_no_store_takes(opened: tuple[str, Store, list[Neighbor]]) -> None:
    store = opened[1]
    with pytest.raises(ArgumentError, match=r"key='é+'… has 4,098 bytes: expected at most 4,096"):
        store.set("é" * (MAX_KEY_BYTES // 2 + 1), b"")
    with pytest.raises(ArgumentError, match=r"value= of the key 'k' has 67,108,865 bytes: expected at most 67,108,864"):
        store.set("k", bytes((64 << 20) + 1))
    with pytest.raises(ArgumentError, match=r"amount=2147483648: expected at most 2,147,483,647"):
        store.add("k", 1 << 31)


@pytest.mark.parametrize("name", ["memory", "file", "tcp", "tls", "redis"])
def test_closing_keeps_the_values_and_may_be_done_twice(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BRAIDAX_REDIS_PASSWORD", REDIS_PASSWORD)
    with contextlib.ExitStack() as stack:
        store, authority = (MemoryStore(), None) if name == "memory" else _open(name, tmp_path, stack)
        store.set("key", b"kept")
        tls = ssl.create_default_context(cafile=authority) if authority else None
        again = store if name == "memory" else open_store(store.address, secret=SECRET, tls=tls)
        store.close()
        store.close()
        with again:
            assert again.get("key", timeout_seconds=0) == b"kept"
