"""Worlds under test: ranks that are threads of one process, or processes of an MPI launcher, and what drives them."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import final

from braidax.comm.transports.transport import MAX_TAG, Operation, Transport
from braidax.connections.world import World
from braidax.errors import PeerLost
from tests.support.readable import is_readable
from tests.support.tree import ROOT

SECRET = bytes(range(32))
LIMIT_SECONDS = 60.0
NAP_SECONDS = 5.0  # after which a driver looks whether another rank has failed
SPIN_SECONDS = 0.0001

# What a launcher needs where there are fewer cores than ranks, and no user but root.
MPI_SETTINGS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
# Annotations are checked there too; not by jaxtyping, which would import JAX in every rank.
MPI_CODE = """
from beartype import BeartypeConf
from beartype.claw import beartype_package
beartype_package("braidax.comm.transports", conf=BeartypeConf(is_pep484_tower=True))
from tests.support.comm.transports.mpi_ranks import main
main()
"""


@final
class FixedTransport(Transport):
    """Moves nothing, and cannot lose one rank: a transport that has nothing beyond the contract."""

    name = "fixed"
    address = b""

    def connect(self, world: object, *, timeout_seconds: float) -> None: ...
    def send(self, peer: int, tag: int, buffers: object, operation: Operation) -> None: ...
    def receive(self, peer: int, tag: int, buffer: object, operation: Operation) -> None: ...
    def poll(self, spin_seconds: float) -> None: ...
    def arm(self) -> bool:
        return True

    def fileno(self) -> int:
        return 0

    def close(self, *, timeout_seconds: float) -> None: ...


class OtherFailed(Exception):
    """Another rank has failed: what this one waits for never comes."""


def wait(
    transport: Transport,
    operations: Sequence[Operation],
    *,
    limit_seconds: float,
    failed: threading.Event | None = None,
) -> None:
    """Drives a transport, as its owner does, until all operations have ended.

    **Raises:** `TimeoutError` when they do not in time.
    """
    deadline = time.monotonic() + limit_seconds
    waiting = list(operations)
    while True:
        waiting = [operation for operation in waiting if not operation.done]
        if not waiting:
            return
        transport.poll(SPIN_SECONDS)
        if any(operation.done for operation in waiting):
            continue
        if failed is not None and failed.is_set():
            raise OtherFailed
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"{len(waiting)} of {len(operations)} operations have not ended")
        if transport.arm():
            is_readable(transport, min(left, NAP_SECONDS, transport.nap_seconds or left))


class Rank:
    """One rank of a world: its transport, and its driver."""

    def __init__(
        self,
        transport: Transport,
        world: World,
        failed: threading.Event | None = None,
        gate: threading.Barrier | None = None,
    ) -> None:
        self._gate = gate
        self.transport = transport
        self.world = world
        self.rank = world.rank
        self.size = world.size
        self.right = (self.rank + 1) % self.size
        self.left = (self.rank - 1) % self.size
        self.closed = False
        self._failed = failed

    def connect(self, *, timeout_seconds: float = 30.0) -> None:
        self.transport.connect(self.world, timeout_seconds=timeout_seconds)

    def send(self, peer: int, tag: int, *buffers: bytes | bytearray | memoryview) -> Operation:
        operation = Operation(peer)
        self.transport.send(peer, tag, [memoryview(buffer) for buffer in buffers], operation)
        return operation

    def receive(self, peer: int, tag: int, buffer: bytearray | memoryview) -> Operation:
        operation = Operation(peer)
        self.transport.receive(peer, tag, memoryview(buffer), operation)
        return operation

    def wait(self, *operations: Operation, seconds: float = LIMIT_SECONDS) -> None:
        """Waits for operations, and raises the error of the first that has one."""
        wait(self.transport, operations, limit_seconds=seconds, failed=self._failed)
        for operation in operations:
            if operation.error is not None:
                raise operation.error

    def idle(self, seconds: float) -> None:
        """Drives the transport for a while, with nothing to wait for."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self.transport.poll(0.0)
            if self.transport.arm():
                is_readable(self.transport, min(left, self.transport.nap_seconds or left))

    def barrier(self) -> None:
        """Returns when all ranks have come here."""
        peers = range(self.size)
        sends = [self.send(peer, MAX_TAG, b"!") for peer in peers]
        self.wait(*sends, *(self.receive(peer, MAX_TAG, bytearray(1)) for peer in peers))

    def meet(self) -> None:
        """Returns when all ranks of this process have come here, without a message."""
        if self._gate is not None:
            try:
                self._gate.wait(LIMIT_SECONDS)
            except threading.BrokenBarrierError:
                raise OtherFailed from None

    def close(self, *, timeout_seconds: float = 5.0) -> None:
        self.closed = True
        self.transport.close(timeout_seconds=timeout_seconds)


Check = Callable[[Rank], None]
Make = Callable[[int], Sequence[Transport]]


def hosts(size: int) -> tuple[str, ...]:
    return tuple(f"host-{rank}" for rank in range(size))


def run(rank: Rank, check: Check, *, connects: bool) -> None:
    """Runs what one rank has to do, and closes its transport."""
    try:
        if connects:
            rank.connect()
        check(rank)
        if connects and not rank.closed:
            rank.barrier()
    finally:
        rank.transport.close(timeout_seconds=5.0)


def run_threads(make: Make, size: int, check: Check, *, connects: bool = True) -> None:
    """Runs a check in ranks that are threads of this process, and raises what the first of them raised."""
    transports = make(size)
    addresses = [transport.address for transport in transports]
    failed, gate = threading.Event(), threading.Barrier(size)
    errors: dict[int, BaseException] = {}

    def work(number: int) -> None:
        rank = Rank(transports[number], World(number, addresses, hosts(size), SECRET), failed, gate)
        try:
            run(rank, check, connects=connects)
        except BaseException as error:  # noqa: BLE001
            errors[number] = error
            failed.set()
            gate.abort()

    threads = [
        threading.Thread(target=work, args=(number,), name=f"rank-{number}", daemon=True) for number in range(size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(4 * LIMIT_SECONDS)
    assert not any(thread.is_alive() for thread in threads)
    for error in sorted(errors.values(), key=lambda error: isinstance(error, (OtherFailed, PeerLost))):
        raise error  # who lost another one did so because that one failed


def run_mpi(
    size: int, *arguments: str, environment: dict[str, str] | None = None, limit_seconds: float = 120.0
) -> subprocess.CompletedProcess[str]:
    """Runs `tests.support.comm.transports.mpi_ranks` under the MPI launcher of this environment."""
    launcher = Path(sys.executable).with_name("mpiexec")
    command = [launcher, "--timeout", f"{limit_seconds:.0f}", "-n", str(size), sys.executable, "-c", MPI_CODE]
    return subprocess.run(
        [*command, *arguments],
        cwd=ROOT,
        env={**os.environ, **MPI_SETTINGS, **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=limit_seconds + 30,
    )
