"""Stores by URL: what there is opens, what there is not is told."""

import re
from importlib import metadata
from pathlib import Path

import pytest

from braidax.comm.stores import urls
from braidax.comm.stores.file import FileStore
from braidax.comm.stores.memory import MemoryStore
from braidax.comm.stores.tcp import TcpStore
from braidax.comm.stores.tcp_server import TcpStoreServer
from braidax.comm.stores.urls import open_store
from braidax.errors import ArgumentError, CommError

SECRET = b"0123456789abcdef"


def test_a_folder_opens_by_path_and_by_url(tmp_path: Path) -> None:
    folder = tmp_path / "a b#?%20ä"
    with open_store(str(folder)) as store:
        assert isinstance(store, FileStore)
        store.set("key", b"v")
        assert store.address == folder.as_uri()
    for url in (folder.as_uri(), folder.as_uri().replace("file://", "file://localhost")):
        with open_store(url) as again:
            assert again.get("key", timeout_seconds=0) == b"v"


def test_the_secret_of_a_tcp_server_comes_from_outside_the_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BRAIDAX_SECRET", raising=False)
    with TcpStoreServer(secret=SECRET) as server:
        with open_store(server.address, secret=SECRET, timeout_seconds=10.0) as store:
            assert isinstance(store, TcpStore)
            assert store.address == server.address
            assert SECRET.hex() not in store.address
        with pytest.raises(
            ArgumentError, match=r"^secret=None, and the environment variable BRAIDAX_SECRET is not set"
        ):
            open_store(server.address)
        monkeypatch.setenv("BRAIDAX_SECRET", "no hex")
        with pytest.raises(ArgumentError, match="BRAIDAX_SECRET is not hexadecimal; expected what secrets") as caught:
            open_store(server.address)
        assert "no hex" not in str(caught.value)
        monkeypatch.setenv("BRAIDAX_SECRET", SECRET.hex())
        open_store(server.address).close()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("file://host/path", "url='file://host/path': expected file:///path, with three slashes"),
        ("file:path", "url='file:path': expected file:///path"),
        ("tcp://host", "url='tcp://host': expected tcp://host:port"),
        ("tcp://host:http", "url='tcp://host:http': expected tcp://host:port"),
        ("tcp://host:70000", "url='tcp://host:70000': expected tcp://host:port"),
        ("tcp://host:1/path", "url='tcp://host:1/path': expected tcp://host:port"),
        ("tcp://:s3cret@host:1", "url='tcp://…@…': a secret has no place in a URL; pass it as secret="),
        ("relative/path", "url='relative/path': expected file:///path, tcp://host:port, redis://host:port, rediss://"),
        ("etcd://host:1", "url='etcd://host:1': expected file:///path, tcp://host:port"),
        ("http://me:s3cret@host:1", "url='http://…@host:1': expected file:///path"),
        ("http://me:s3?cr#s3cret@host:1?token=s3cret", "url='http://…@host:1?…': expected file:///path"),
        ("http//me:s3cret@host:1", "url='http//me:…@host:1': expected file:///path"),
        ("http://me:s3cret@[host:1", "url='http://…@[host:1': expected file:///path"),
        ("tcp://host:1?secret=s3cret", "url='tcp://host:1?…': expected tcp://host:port"),
        ("tcp://host:1#s3cret@", "url='tcp://…@': expected tcp://host:port"),
        ("file://me:s3cret@host/path", "url='file://…@host/path': expected file:///path"),
        ("redis://:s3#s3cret@host:1", "url='redis://…@host:1': expected redis://host:port, with any of @/?#[] in a"),
        ("redis://:s3/s3cret@host:1", "url='redis://…@host:1': expected redis://host:port, with any of @/?#[] in a"),
        ("redis://:s3cret@[host:1", "url='redis://…@[host:1': expected file:///path"),
        ("", "url='': expected file:///path"),
    ],
)
def test_what_opens_nothing_is_told(url: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)) as caught:
        open_store(url, secret=SECRET)
    assert "s3cret" not in str(caught.value)


def shared(url: str) -> object:
    """An entry point, as another package has one."""
    return SHARED if url == "mem://all" else url


SHARED = MemoryStore()


def test_other_packages_add_schemes(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = metadata.EntryPoint("mem", f"{__name__}:shared", "braidax.stores")
    monkeypatch.setattr(metadata.EntryPoint, "load", lambda self: shared)
    monkeypatch.setattr(urls, "entry_points", lambda *, group: [entry] if group == "braidax.stores" else [])
    assert open_store("mem://all") is SHARED
    with pytest.raises(ArgumentError, match=r"the entry point '.*:shared' returned str, expected a Store; tell the"):
        open_store("mem://other")
    with pytest.raises(ArgumentError, match=r"url='etcd://x': expected .*, mem:// or an absolute path"):
        open_store("etcd://x")


def test_the_limit_is_passed_on() -> None:
    with pytest.raises(CommError, match=r"^tcp://127.0.0.1:1: unreachable within 0.2 s"):
        open_store("tcp://127.0.0.1:1", secret=SECRET, timeout_seconds=0.2)
    with pytest.raises(CommError, match=r"^redis://127.0.0.1:1: unreachable, asked for up to 0.2 s"):
        open_store("redis://127.0.0.1:1", timeout_seconds=0.2)
