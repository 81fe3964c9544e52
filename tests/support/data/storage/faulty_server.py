"""An HTTP server of its own thread that answers range requests as an object store does, late or wrongly if told so.

One thread serves some ten thousand requests a second, thousands of them at once: a delay costs a timer, not a thread.
"""

import asyncio
import functools
import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

_SECONDS = 10.0
_REASONS = {
    200: "OK",
    206: "Partial Content",
    302: "Found",
    403: "Forbidden",
    404: "Not Found",
    412: "Precondition Failed",
}
_REASONS |= {416: "Range Not Satisfiable", 500: "Internal Server Error", 503: "Service Unavailable"}


@dataclass(frozen=True)
class Request:
    """One request: `start` and `stop` are the bytes asked for, None for all of the object."""

    number: int
    method: str
    path: str
    headers: dict[str, str]
    start: int | None = None
    stop: int | None = None
    query: str = ""


@dataclass(frozen=True)
class Reply:
    """What is done with a request.

    `location`: where the client is sent instead.

    `status`: instead of what is right; None for that. `delay_seconds`: before the reply, besides the server's own.
    `keep`: the part of the body that is sent before the connection is closed. `shorter`: bytes that the reply leaves
    out, and says so in its own headers. `missing`: bytes that it leaves out without saying so. `ignore_range`, `hang`:
    sends all of the object; never answers.
    """

    status: int | None = None
    location: str | None = None
    delay_seconds: float = 0.0
    keep: float = 1.0
    shorter: int = 0
    missing: int = 0
    ignore_range: bool = False
    hang: bool = False


RIGHT = Reply()


@dataclass
class Server:
    """The server's objects and manners, all of which may be changed while it runs."""

    objects: dict[str, bytes]
    delay_seconds: float = 0.0
    answer: Callable[[Request], Reply] = lambda request: RIGHT
    etags: dict[str, str] = field(default_factory=dict[str, str])  # where another than the hash, or none: ""
    honors_if_match: bool = True
    port: int = 0
    requests: list[Request] = field(default_factory=list[Request])
    open_requests: int = 0
    most_open_requests: int = 0
    connections: set[asyncio.Transport] = field(default_factory=set[asyncio.Transport])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def etag(self, path: str) -> str:
        return self.etags[path] if path in self.etags else _etag(self.objects[path])


@functools.lru_cache
def _etag(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'


class _Connection(asyncio.Protocol):
    def __init__(self, server: Server) -> None:
        self._server = server
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._server.connections.add(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(self._transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        while b"\r\n\r\n" in self._received:
            head, _, self._received = self._received.partition(b"\r\n\r\n")
            request = self._request(head.decode("latin-1"))
            server = self._server
            server.requests.append(request)
            server.open_requests += 1
            server.most_open_requests = max(server.most_open_requests, server.open_requests)
            reply = server.answer(request)
            if not reply.hang:
                delay = server.delay_seconds + reply.delay_seconds
                asyncio.get_running_loop().call_later(delay, self._send, request, reply)

    def _request(self, head: str) -> Request:
        first, *lines = head.split("\r\n")
        method, target, _ = first.split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        start, stop = None, None
        if "range" in headers:
            low, _, high = headers["range"].removeprefix("bytes=").partition("-")
            start, stop = int(low), int(high) + 1
        path, _, query = target.partition("?")
        path = unquote(path).removeprefix("/")
        return Request(len(self._server.requests), method, path, headers, start, stop, query)

    def _send(self, request: Request, reply: Reply) -> None:
        self._server.open_requests -= 1
        if self._transport.is_closing():
            return
        status, headers, body = self._answer(request, reply)
        body = body[: len(body) - reply.missing]
        headers["Content-Length"] = str(len(body))
        lines = [f"HTTP/1.1 {status} {_REASONS[status]}", *(f"{name}: {value}" for name, value in headers.items())]
        sent = b"" if request.method == "HEAD" else body[: int(len(body) * reply.keep)]
        self._transport.write("\r\n".join([*lines, "", ""]).encode("latin-1") + sent)
        if reply.keep < 1:
            self._transport.close()

    def _answer(self, request: Request, reply: Reply) -> tuple[int, dict[str, str], bytes]:
        server = self._server
        if reply.location is not None:
            return 302, {"Location": reply.location}, b""
        if reply.status is not None:
            return reply.status, {}, b"the server was told to fail"
        if request.path not in server.objects:
            return 404, {}, b"no such object"
        data, etag = server.objects[request.path], server.etag(request.path)
        headers = {"ETag": etag} if etag else {}
        if server.honors_if_match and request.headers.get("if-match", etag) != etag:
            return 412, headers, b""
        if request.start is None or request.stop is None or reply.ignore_range:
            return 200, headers, data
        if request.start >= len(data):
            return 416, {"Content-Range": f"bytes */{len(data)}"}, b""
        body = data[request.start : request.stop][: request.stop - request.start - reply.shorter]
        headers["Content-Range"] = f"bytes {request.start}-{request.start + len(body) - 1}/{len(data)}"
        return 206, headers, body


@contextmanager
def serving(objects: dict[str, bytes], *, delay_seconds: float = 0.0) -> Iterator[Server]:
    """Serves objects, by their paths, on a free port of this host inside a `with` block."""
    server = Server(objects, delay_seconds)
    started, stop = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        listening = await loop.create_server(lambda: _Connection(server), "127.0.0.1", 0, backlog=4096)
        server.port = listening.sockets[0].getsockname()[1]
        started.set()
        await stop.wait()
        listening.close()
        for connection in list(server.connections):
            connection.abort()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), name="faulty-server", daemon=True)
    thread.start()
    try:
        assert started.wait(_SECONDS), f"the server did not start within {_SECONDS:g} s"
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(_SECONDS)
        assert not thread.is_alive(), f"the server did not end within {_SECONDS:g} s"
        loop.close()


def serve_folder(folder: Path) -> dict[str, bytes]:
    """Returns the files of a folder as objects to serve."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
