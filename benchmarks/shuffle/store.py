"""An object store on loopback: ranges of files of a folder, each answered after a delay, now and then a long one."""

import asyncio
import itertools
import os
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def serve(
    folder: Path, *, delay_seconds: float, late_seconds: float = 0.0, late_every: int = 0
) -> Generator[str, None, None]:
    """Serves a folder by a process of its own inside the `with` block; yields the address of its root.

    **Arguments:** `late_every`: of so many requests one is answered after `late_seconds`; 0 for none.
    """
    numbers = (delay_seconds, late_seconds, late_every)
    command = [sys.executable, "-m", "benchmarks.shuffle.store", str(folder), *map(str, numbers)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        yield f"http://127.0.0.1:{int(server.stdout.readline())}"
    finally:
        server.kill()
        server.wait(10)


class _File:
    """An open file, and what a reply says of it."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY)
        state = os.fstat(self.descriptor)
        self.size = state.st_size
        self.headers = (
            f'ETag: "{state.st_mtime_ns:x}"\r\nLast-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\nAccept-Ranges: bytes\r\n'
        )


class _Connection(asyncio.Protocol):
    """One connection: a request after the other, each answered after the delay."""

    def __init__(self, folder: Path, delays: Iterator[float], files: dict[str, _File]) -> None:
        self._folder = folder
        self._delays = delays
        self._files = files
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            request, self._received = self._received[:end].decode("latin1"), self._received[end + 4 :]
            asyncio.get_running_loop().call_later(next(self._delays), self._answer, request)

    def _answer(self, request: str) -> None:
        first, *lines = request.split("\r\n")
        method, target, _ = first.split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        path = self._folder / target.lstrip("/")
        if target not in self._files and not path.is_file():
            self._transport.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            return
        file = self._files.get(target) or self._files.setdefault(target, _File(path))
        if "if-match" in headers and headers["if-match"] not in file.headers:
            self._transport.write(b"HTTP/1.1 412 Precondition Failed\r\nContent-Length: 0\r\n\r\n")
            return
        start, stop, status, extra = 0, file.size, "200 OK", ""
        if wanted := headers.get("range"):
            low, _, high = wanted.removeprefix("bytes=").partition("-")
            start = int(low) if low else file.size - int(high)
            stop = min(int(high) + 1, file.size) if low and high else file.size
            status, extra = "206 Partial Content", f"Content-Range: bytes {start}-{stop - 1}/{file.size}\r\n"
        head = f"HTTP/1.1 {status}\r\nContent-Length: {stop - start}\r\n{extra}{file.headers}\r\n".encode()
        self._transport.write(head + (os.pread(file.descriptor, stop - start, start) if method == "GET" else b""))


def late_now_and_then(seconds: float, late_seconds: float, every: int) -> Iterator[float]:
    """Yields delays, of which one of so many is long; of `every=0` none."""
    for number in itertools.count(1):
        yield late_seconds if every and number % every == 0 else seconds


async def _main(folder: Path, delays: Iterator[float]) -> None:
    files: dict[str, _File] = {}
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Connection(folder, delays, files), "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    usual, late, every = sys.argv[2:]
    asyncio.run(_main(Path(sys.argv[1]), late_now_and_then(float(usual), float(late), int(every))))
