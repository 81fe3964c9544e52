"""Ranks of UCX, each in a process of its own that a test tells what to do.

It is a fork of a process that has imported what they need, which takes longer than most of what they do, and that has
started nothing of UCX.
"""

import contextlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any, final

from braidax.comm.transports.transport import Operation
from braidax.comm.transports.ucx import UcxTransport
from braidax.connections.world import World
from tests.support.readable import is_readable

LIMIT_SECONDS = 60
WAYS = {"default": {}, "tcp": {"UCX_TLS": "tcp"}, "copies": {"UCX_TLS": "posix"}}


@final
class Output:
    """The standard streams of this process, as another one gets them: what ranks say is the test's to read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _take_over, (reduction.DupFd(1), reduction.DupFd(2))


def _take_over(*streams: Any) -> None:
    for number, stream in enumerate(streams, 1):
        descriptor = stream.detach()
        os.dup2(descriptor, number)
        os.close(descriptor)


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
                is_readable(self.transport, 0.1)
        return all(operation.done for operation in operations)

    def ask(self) -> Any:
        assert self.pipe.poll(LIMIT_SECONDS), "the test is silent"
        return self.pipe.recv()


class Ranks:
    """Processes, one a function; killed when the test ends."""

    def __init__(self, *functions: Callable[[Rank], object], environment: dict[str, str] | None = None) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([function.__module__ for function in functions])
        self.pipes, self.processes = list[Connection](), list[Any]()
        for rank, function in enumerate(functions):
            ours, theirs = context.Pipe()
            args = rank, theirs, function, environment or {}, Output()
            process = context.Process(target=_live, args=args, daemon=True)
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
        with contextlib.suppress(BrokenPipeError):  # one that asks for nothing may have ended
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


def _live(
    rank: int, pipe: Connection, function: Callable[[Rank], object], environment: dict[str, str], output: None
) -> None:
    del output  # which it has taken over
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
