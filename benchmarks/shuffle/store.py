"""An object store on loopback that answers each request after a fixed delay: ranges of the files of a folder."""

import asyncio
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def serve(folder: Path, *, delay_seconds: float) -> Generator[str, None, None]:
    """Serves a folder by a process of its own inside the `with` block; yields the address of its root."""
    command = [sys.executable, "-m", "benchmarks.shuffle.store", str(folder), str(delay_seconds)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        yield f"http://127.0.0.1:{int(server.stdout.readline())}"
    finally:
        server.kill()
        server.wait(10)


async def _answer(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, folder: Path, delay_seconds: float
) -> None:
    files: dict[str, bytes] = {}
    try:
        while request := await reader.readuntil(b"\r\n\r\n"):
            first, *rest = request.decode("latin1").split("\r\n")
            method, target, _ = first.split(" ")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in rest)}
            await asyncio.sleep(delay_seconds)
            path = folder / target.lstrip("/")
            if not path.is_file():
                writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
                continue
            size = path.stat().st_size
            start, stop = 0, size
            status = "200 OK"
            if span := headers.get("range"):
                low, _, high = span.removeprefix("bytes=").partition("-")
                start, stop = (size - int(high), size) if not low else (int(low), min(int(high or size - 1) + 1, size))
                status = "206 Partial Content"
            lines = [
                f"HTTP/1.1 {status}",
                f"Content-Length: {stop - start}",
                f"Content-Range: bytes {start}-{stop - 1}/{size}",
                "Accept-Ranges: bytes",
                f'ETag: "{path.stat().st_mtime_ns:x}"',
                "Last-Modified: Thu, 01 Jan 2026 00:00:00 GMT",
                "Content-Type: application/octet-stream",
            ]
            writer.write("\r\n".join([*lines, "", ""]).encode())
            if method == "GET":
                data = files.setdefault(target, path.read_bytes())
                writer.write(memoryview(data)[start:stop])
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


async def _main(folder: Path, delay_seconds: float) -> None:
    server = await asyncio.start_server(
        lambda reader, writer: _answer(reader, writer, folder, delay_seconds), "127.0.0.1", 0, backlog=1024
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main(Path(sys.argv[1]), float(sys.argv[2])))
