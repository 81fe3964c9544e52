"""UCX: exact messages between processes, sleep, dead peers, and what is said when something is missing."""

import contextlib
import hashlib
import multiprocessing
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from braidax.comm.transports import ucx
from braidax.comm.transports.transport import Operation, World
from braidax.comm.transports.ucx import UcxTransport
from braidax.errors import ArgumentError, CommError, HandshakeError, MissingExtra, PeerLost, WaitTimeout

LIMIT_SECONDS = 60
MIB = 1 << 20
BINDING = "braidax.comm.transports.ucx_binding"
WAYS = {"default": {}, "tcp": {"UCX_TLS": "tcp"}, "copies": {"UCX_TLS": "posix"}}


class Rank:
    """A rank in a process of its own: a connected transport, and a pipe to the test."""

    def __init__(self, transport: UcxTransport, rank: int, pipe: Connection) -> None:
        self.transport, self.rank, self.pipe = transport, rank, pipe

    def send(self, peer: int, tag: int, *buffers: bytes) -> Operation:
        operation = Operation(peer)
        self.transport.send(peer, tag, tuple(map(memoryview, buffers)), operation)
        return operation

    def receive(self, peer: int, tag: int, buffer: bytearray) -> Operation:
        operation = Operation(peer)
        self.transport.receive(peer, tag, memoryview(buffer), operation)
        return operation

    def wait(self, *operations: Operation, seconds: float = LIMIT_SECONDS) -> bool:
        deadline = time.monotonic() + seconds
        while not all(operation.done for operation in operations) and time.monotonic() < deadline:
            self.transport.poll(0.0001)
            if not all(operation.done for operation in operations) and self.transport.arm():
                select.select([self.transport.fileno()], [], [], 0.1)
        return all(operation.done for operation in operations)

    def ask(self) -> Any:
        assert self.pipe.poll(LIMIT_SECONDS), "the test is silent"
        return self.pipe.recv()


class Ranks:
    """Processes, one a function; killed when the test ends."""

    def __init__(self, *functions: Callable[[Rank], object], environment: dict[str, str] | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes = list[Connection](), list[Any]()
        for rank, function in enumerate(functions):
            ours, theirs = context.Pipe()
            process = context.Process(target=_live, args=(rank, theirs, function, environment or {}), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        addresses = [self.hear(rank) for rank in range(len(functions))]
        for pipe in self.pipes:
            pipe.send(addresses)

    def hear(self, rank: int) -> Any:
        assert self.pipes[rank].poll(LIMIT_SECONDS), f"rank {rank} is silent"
        kind, value = self.pipes[rank].recv()
        assert kind != "raised", value
        return value

    def tell(self, rank: int, value: object = None) -> None:
        self.pipes[rank].send(value)

    def kill(self, rank: int) -> None:
        os.kill(self.processes[rank].pid, signal.SIGKILL)
        self.processes[rank].join(LIMIT_SECONDS)

    def results(self) -> list[Any]:
        found = [self.hear(rank) for rank in range(len(self.pipes))]
        for process in self.processes:
            process.join(LIMIT_SECONDS)
        assert [process.exitcode for process in self.processes] == [0] * len(found)
        return found

    def end(self) -> None:
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            process.kill()
            process.join(LIMIT_SECONDS)
            process.close()
            pipe.close()


def _live(rank: int, pipe: Connection, function: Callable[[Rank], object], environment: dict[str, str]) -> None:
    os.environ.update(environment)
    try:
        transport = UcxTransport()
        pipe.send(("address", transport.address))
        assert pipe.poll(LIMIT_SECONDS)
        addresses = pipe.recv()
        world = World(rank, addresses, [f"host-{rank}" for rank in range(len(addresses))], b"s" * 32)
        transport.connect(world, timeout_seconds=LIMIT_SECONDS)
        result = function(Rank(transport, rank, pipe))
        transport.close(timeout_seconds=LIMIT_SECONDS)
        pipe.send(("result", result))
    except BaseException:  # noqa: BLE001 - the test shows it
        pipe.send(("raised", traceback.format_exc()))


@pytest.fixture
def together() -> Iterator[Callable[..., Ranks]]:
    with contextlib.ExitStack() as stack:

        def start(*functions: Callable[[Rank], object], environment: dict[str, str] | None = None) -> Ranks:
            ranks = Ranks(*functions, environment=environment)
            stack.callback(ranks.end)
            return ranks

        yield start


def content(num_bytes: int, seed: int) -> bytes:
    return np.random.default_rng([num_bytes, seed]).bytes(num_bytes)


def digest(data: bytes | bytearray) -> str:
    return hashlib.blake2b(data).hexdigest()


SIZES = (0, 1, 8, 4096, MIB, 64 * MIB)


def parts(data: bytes) -> list[bytes]:
    """Returns a message in scattered buffers, empty ones among them."""
    cuts = sorted({0, len(data) // 7, len(data) // 2, len(data)})
    return [b"", *(data[begin:end] for begin, end in zip(cuts, cuts[1:], strict=False)), b""]


def exchange(rank: Rank) -> list[tuple[int, str]]:
    peer, found = 1 - rank.rank, []
    for num_bytes in SIZES:
        data = content(num_bytes, rank.rank)
        for buffers in ([data], parts(data)):
            place = bytearray(num_bytes + 3)
            received = rank.receive(peer, 7, place)
            sent = rank.send(peer, 7, *buffers)
            assert rank.wait(sent, received)
            assert sent.error is None
            assert received.error is None
            assert place[received.num_bytes :] == bytes(3)
            found.append((received.num_bytes, digest(place[: received.num_bytes])))
    return found


@pytest.mark.parametrize("way", ["default", "tcp"])
def test_messages_of_any_size_arrive_exactly(way: str, together: Callable[..., Ranks]) -> None:
    results = together(exchange, exchange, environment=WAYS[way]).results()
    for rank, result in enumerate(results):
        assert result == [(size, digest(content(size, 1 - rank))) for size in SIZES for _ in range(2)]


# A peer that dies


def send_much(rank: Rank) -> None:
    rank.send(0, 1, content(64 * MIB, 0))
    rank.pipe.send(("sending", None))
    rank.wait(Operation(0))


def receive_from_dead(rank: Rank) -> tuple[str, float]:
    rank.ask()
    return survive(rank, [rank.receive(1, 1, bytearray(64 * MIB))])


def be_silent(rank: Rank) -> None:
    rank.pipe.send(("silent", None))
    rank.ask()


def send_much_to_dead(rank: Rank) -> tuple[str, float]:
    sent = rank.send(1, 1, content(64 * MIB, 0))
    rank.ask()
    return survive(rank, [sent])


def flood_dead(rank: Rank) -> tuple[str, float]:
    rank.ask()
    return survive(rank, [rank.send(1, 1, content(4096, number)) for number in range(2000)])


def receive_much(rank: Rank) -> tuple[str, float]:
    received = rank.receive(1, 1, bytearray(64 * MIB))
    rank.wait(received, seconds=0.001)
    return survive(rank, [received])


def survive(rank: Rank, operations: list[Operation]) -> tuple[str, float]:
    """Returns what became of the operations, and how long it took to close."""
    rank.wait(*operations, seconds=0.5)
    kinds = {str(operation.error) if operation.done else "pending" for operation in operations}
    begin = time.monotonic()
    rank.transport.close(timeout_seconds=0)
    return " ".join(sorted(kinds)), time.monotonic() - begin


DEATHS = {
    "received": (receive_from_dead, send_much),
    "receiving": (receive_much, send_much),
    "sent": (send_much_to_dead, be_silent),
    "flooded": (flood_dead, be_silent),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("death", DEATHS)
def test_the_death_of_a_peer_is_survived(
    death: str, way: str, together: Callable[..., Ranks], capfd: pytest.CaptureFixture[str]
) -> None:
    ranks = together(*DEATHS[death], environment=WAYS[way])
    ranks.hear(1)
    ranks.kill(1)
    ranks.tell(0)
    kinds, seconds = ranks.hear(0)

    ranks.processes[0].join(LIMIT_SECONDS)
    assert ranks.processes[0].exitcode == 0
    assert set(kinds.split()) <= {"PeerLost", "pending", "NoneType"}
    assert seconds < 2
    assert capfd.readouterr() == ("", "")
