"""What the ranks of ours do for streams and requests; beside them a pair of plain sockets."""

import gc
import re
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.comm.ours import Ours

_sockets: dict[str, socket.socket] = {}  # of this rank to its neighbor


def stream(endpoint: Ours, num_bytes: int, count: int, window_bytes: int) -> float:
    """Even ranks send items to the next one, all pairs at once. **Returns:** seconds an item."""
    comm = endpoint.comm
    item = np.full(num_bytes, 7, np.uint8)
    mine = count if comm.rank % 2 == 0 else 0
    chunk_bytes = max(1 << 20, num_bytes) if num_bytes * 8 * comm.size <= window_bytes else 1 << 20
    comm.barrier()
    start = time.perf_counter()
    found = 0
    parts = ((comm.rank ^ 1, [item]) for _ in range(mine))
    for _, buffers in comm.exchange(parts, chunk_bytes=chunk_bytes, window_bytes=window_bytes):
        found += len(buffers[0])
    comm.barrier()
    seconds = time.perf_counter() - start
    if found != num_bytes * (count - mine):
        raise AssertionError(f"{found:,} bytes came of {num_bytes * count:,}")
    return seconds / count


def plain(endpoint: Ours, num_bytes: int, count: int, family: str) -> float:
    """The same by a loop over a socket, into one buffer. **Arguments:** `family`: `unix` or `tcp`."""
    connection = _sockets.get(family) or _sockets.setdefault(family, _connected(endpoint, family))
    item = np.full(num_bytes, 7, np.uint8)
    endpoint.barrier()
    start = time.perf_counter()
    for _ in range(count):
        if endpoint.rank % 2 == 0:
            connection.sendall(item.data)
        else:
            _receive(connection, item)
    endpoint.barrier()
    return (time.perf_counter() - start) / count


def growth(endpoint: Ours, num_bytes: int, count: int, window_bytes: int) -> float:
    """All send to all, new memory for each item. **Returns:** by how many bytes this process has grown meanwhile."""
    comm = endpoint.comm

    def parts() -> Iterator[tuple[int, list[NDArray[np.uint8]]]]:
        for index in range(count):
            yield (comm.rank + index) % comm.size, [np.full(num_bytes, index % 251, np.uint8)]

    gc.collect()
    comm.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the highest size is that of now
    before = _kilobytes("VmRSS")
    for _, buffers in comm.exchange(parts(), window_bytes=window_bytes):
        if len(set(buffers[0][:: max(1, num_bytes // 7)])) != 1:
            raise AssertionError("what was sent came as something else")
    grown = _kilobytes("VmHWM") - before
    comm.barrier()
    return 1024.0 * grown


def ask(endpoint: Ours, num_bytes: int, count: int) -> float:
    """Rank 0 gives back what all others ask with. **Returns:** seconds a request; 0 where it serves."""
    comm = endpoint.comm
    value = np.full(num_bytes, comm.rank, np.uint8)
    comm.barrier()
    if comm.rank == 0:
        with comm.serve(lambda source, asked: asked) as server:
            server.wait()
        comm.barrier()
        return 0.0
    found = comm.ask(0, value)
    start = time.perf_counter()
    for _ in range(count):
        found = comm.ask(0, value)
    seconds = time.perf_counter() - start
    comm.end_asking(0)
    comm.barrier()
    if found[-1] != comm.rank:
        raise AssertionError("an answer came as something else")
    return seconds / count


STREAM_LOOPS: Mapping[str, Any] = {loop.__name__: loop for loop in (stream, plain, growth, ask)}


def _connected(endpoint: Ours, family: str) -> socket.socket:
    """Returns the socket to the neighbor."""
    comm, peer = endpoint.comm, endpoint.rank ^ 1
    kind = socket.AF_UNIX if family == "unix" else socket.AF_INET
    if endpoint.rank % 2 == 0:
        with socket.socket(kind) as listener:
            listener.bind("" if family == "unix" else ("127.0.0.1", 0))  # an abstract name that the kernel chooses
            listener.listen(1)
            name = listener.getsockname()
            comm.send(name if family == "unix" else str(name[1]).encode(), peer)
            return listener.accept()[0]
    name = bytes(comm.recv(peer))
    connection = socket.socket(kind)
    connection.connect(name if family == "unix" else ("127.0.0.1", int(name)))
    return connection


def _receive(connection: socket.socket, place: NDArray[np.uint8]) -> None:
    missing = place.data
    while missing:
        missing = missing[connection.recv_into(missing) :]


def _kilobytes(name: str) -> int:
    found = re.search(rf"{name}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])
