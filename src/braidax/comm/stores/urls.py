"""Stores by URL: all that another process needs to be told."""

import os
import ssl
from importlib.metadata import entry_points
from typing import Any
from urllib.parse import unquote, urlsplit

from braidax.comm.stores.file import FileStore
from braidax.comm.stores.redis import RedisStore
from braidax.comm.stores.store import Store, shown_url
from braidax.comm.stores.tcp import TcpStore
from braidax.errors import ArgumentError

SECRET_VARIABLE = "BRAIDAX_SECRET"
ENTRY_POINTS = "braidax.stores"

_OURS = ("file:///path", "tcp://host:port", "redis://host:port", "rediss://host:port")


def open_store(
    url: str, *, secret: bytes | None = None, timeout_seconds: float = 60.0, tls: ssl.SSLContext | None = None
) -> Store:
    """Opens a store.

    **Arguments:** `url`: `file:///path` of a folder (or the absolute path itself), `tcp://host:port` of a
    `TcpStoreServer`, `redis://` or `rediss://` as `RedisStore` takes it, or one of another package, which registers its
    scheme as an entry point of the group `braidax.stores`: a function of the URL that returns a `Store`. `secret`: of
    the TCP server; by default what the environment variable `BRAIDAX_SECRET` says in hexadecimal. `timeout_seconds`:
    how long to wait for a server that is not there yet, and later for answers. `tls`: for a TCP server that has one.

    **Returns:** the store, to be closed by the caller. **Raises:** `ArgumentError` for a URL or a secret that says
    nothing; what the store raises when it cannot be reached.
    """
    if url.startswith("/"):
        return FileStore(url)
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ArgumentError(f"url={shown_url(url)}: expected {', '.join(_OURS)} or an absolute path") from None
    match parts.scheme:
        case "file":
            if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
                raise ArgumentError(
                    f"url={shown_url(url)}: expected file:///path, with three slashes and an absolute path"
                )
            return FileStore(unquote(url.partition("://")[2].removeprefix("localhost")))
        case "tcp":
            host, port = _host_and_port(url)
            return TcpStore(host, port, secret=_secret(secret), timeout_seconds=timeout_seconds, tls=tls)
        case "redis" | "rediss":
            return RedisStore(url, timeout_seconds=timeout_seconds)
        case _:
            return _foreign(url, parts.scheme)


def _host_and_port(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    if "@" in parts.netloc:
        raise ArgumentError("url='tcp://…@…': a secret has no place in a URL; pass it as secret=")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or not port or parts.path not in ("", "/") or parts.query or parts.fragment:
        raise ArgumentError(f"url={shown_url(url)}: expected tcp://host:port, or tcp://[address]:port for IPv6")
    return host, port


def _secret(secret: bytes | None) -> bytes:
    if secret is not None:
        return secret
    text = os.environ.get(SECRET_VARIABLE)
    if not text:
        raise ArgumentError(
            f"secret=None, and the environment variable {SECRET_VARIABLE} is not set; expected the secret of the "
            "TcpStoreServer in one of them"
        )
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise ArgumentError(
            f"the environment variable {SECRET_VARIABLE} is not hexadecimal; expected what secrets.token_hex(32) gives"
        ) from None


def _foreign(url: str, scheme: str) -> Store:
    found = {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}
    if scheme not in found:
        others = sorted(f"{name}://" for name in found)
        raise ArgumentError(
            f"url={shown_url(url)}: expected {', '.join((*_OURS, *others))} or an absolute path; packages add schemes "
            f"by entry points of the group {ENTRY_POINTS!r}: is the package installed?"
        )
    store: Any = found[scheme].load()(url)
    if not isinstance(store, Store):
        raise ArgumentError(
            f"url={shown_url(url)}: the entry point {found[scheme].value!r} returned {type(store).__name__}, expected "
            "a Store; tell the authors of the package"
        )
    return store
