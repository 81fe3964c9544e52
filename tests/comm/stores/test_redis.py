"""The Redis store: keys that vanish, passwords that stay secret, errors in time."""

import contextlib
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from braidax.comm.stores.redis import RedisStore
from braidax.errors import ArgumentError, CommError, HandshakeError, MissingExtra
from tests.support.comm.stores.servers import REDIS_PASSWORD, free_port, in_thread, redis_server


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with redis_server(tmp_path_factory.mktemp("redis")) as found:
        yield found


def test_keys_live_for_a_day(port: int) -> None:
    with (
        RedisStore(f"redis://:{REDIS_PASSWORD}@127.0.0.1:{port}/1") as store,
        redis.Redis(port=port, db=1, password=REDIS_PASSWORD) as client,
    ):
        store.set("key", b"v")
        assert [store.add("n", 2), store.add("n", 2)] == [2, 4]
        names = sorted(client.keys())
        assert names == [b"braidax/counters/n", b"braidax/values/key"]
        assert all(86000 < client.ttl(name) <= 86400 for name in names)
        client.expire("braidax/counters/n", 50)
        assert store.add("n", 1) == 5
        assert 0 < client.ttl("braidax/counters/n") <= 50  # refreshed by nothing


def test_the_password_is_in_no_address_and_no_message(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BRAIDAX_REDIS_PASSWORD", raising=False)
    with RedisStore(f"redis://default:{REDIS_PASSWORD}@127.0.0.1:{port}/1?health_check_interval=30") as store:
        assert store.address == f"redis://default@127.0.0.1:{port}/1?health_check_interval=30"
        store.set("key", b"v")
        address = store.address
    with RedisStore(f"redis://127.0.0.1:{port}?password={REDIS_PASSWORD}") as store:
        assert store.address == f"redis://127.0.0.1:{port}"
    with pytest.raises(
        HandshakeError, match=r"refuses the password \(.*\); put the right one into .* BRAIDAX_REDIS_PASS"
    ):
        RedisStore(f"redis://127.0.0.1:{port}")
    with pytest.raises(HandshakeError) as caught:
        RedisStore(f"redis://:wr0ng@127.0.0.1:{port}")
    assert "wr0ng" not in str(caught.value)
    monkeypatch.setenv("BRAIDAX_REDIS_PASSWORD", REDIS_PASSWORD)
    with RedisStore(address) as store:
        assert store.get("key", timeout_seconds=0) == b"v"


def test_nobody_there_is_told_in_time() -> None:
    port, begun = free_port(), time.monotonic()
    with pytest.raises(CommError) as caught:
        RedisStore(f"redis://:pa55word@127.0.0.1:{port}", timeout_seconds=0.4)
    assert 0.4 <= time.monotonic() - begun < 5
    assert str(caught.value).startswith(f"redis://127.0.0.1:{port}: unreachable, asked for up to 0.4 s (")
    assert "is it running, are host and port right" in str(caught.value)


def test_a_silent_port_is_told_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        begun = time.monotonic()
        with pytest.raises(CommError, match=r"unreachable, asked for up to 0\.3 s"):
            RedisStore(f"redis://127.0.0.1:{silent.getsockname()[1]}", timeout_seconds=0.3)
        assert 0.3 <= time.monotonic() - begun < 5


def test_a_server_that_ends_while_it_is_waited_for_is_told(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(redis_server(tmp_path))
        with RedisStore(f"redis://:{REDIS_PASSWORD}@127.0.0.1:{port}") as store:
            waiting = in_thread(store.get, "key", timeout_seconds=60.0)
            begun = time.monotonic()
            stack.close()
            with pytest.raises(CommError, match=rf"^redis://127.0.0.1:{port}: unreachable"):
                waiting.get()
            assert time.monotonic() - begun < 10


def test_what_the_server_refuses_is_told(port: int) -> None:
    with (
        RedisStore(f"redis://:{REDIS_PASSWORD}@127.0.0.1:{port}/2") as store,
        redis.Redis(port=port, db=2, password=REDIS_PASSWORD) as client,
    ):
        client.lpush("braidax/values/key", "somebody's own")
        with pytest.raises(
            CommError, match=r"the Redis server refused \(WRONGTYPE .*\); expected one that may be writ"
        ):
            store.get("key", timeout_seconds=0)


def test_what_cannot_work(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match=r"^url='redis://host:port': Port could not be cast"):
        RedisStore("redis://host:port")
    with pytest.raises(
        ArgumentError, match=r"^url='redis://host\?nonsense=1': .*nonsense.*; expected redis://host:port"
    ):
        RedisStore("redis://host?nonsense=1")
    with pytest.raises(ArgumentError, match=r"^timeout_seconds=0: expected more than 0"):
        RedisStore("redis://host", timeout_seconds=0)
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(MissingExtra, match=r'RedisStore needs the module .redis.*pip install "braidax\[redis\]"'):
        RedisStore("redis://host")
