"""Launching: a program in many processes that live and die together, here on one machine."""

import contextlib
import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from io import TextIOBase
from pathlib import Path

from braidax.comm import TcpStoreServer
from braidax.comm.environment import without_place
from braidax.errors import ArgumentError, GangError, WaitTimeout
from braidax.gang.processes import Command, Ending, Processes, Writer, print_lines
from braidax.gang.program import Program, Seat, shares_of_gpus
from braidax.gang.runner import CONSEQUENCE, FIRST_FAILED, scoped_store

LOOK_SECONDS = 2.0
"""How long the rank that failed first may take to end, when another one ended because of it."""


@dataclass(frozen=True)
class Failed:
    """The rank, or the host, that failed first.

    **Fields:** `where`, `how`: in words. `log`: its last lines. `exit_code`: as a shell tells it.
    """

    where: str
    how: str
    log: tuple[str, ...]
    exit_code: int

    def __str__(self) -> str:
        told = f"{self.where} failed first: it {self.how}"
        return "\n".join([f"{told}; the last lines that it wrote:", *self.log] if self.log else [told])


@dataclass(frozen=True)
class Job:
    """What all ranks of all epochs are told.

    **Fields:** `secret`: of the store. `transport`: of `braidax.comm.from_environment`. `name`: a name of its own.
    """

    secret: bytes
    transport: str
    name: str

    @staticmethod
    def new(transport: str) -> "Job":
        """Returns a job with a name and a secret that no other one has."""
        return Job(secrets.token_bytes(32), transport, f"launch-{secrets.token_hex(8)}")

    def environment(self, store: str, epoch: int) -> dict[str, str]:
        """Returns the variables that say so, for ranks that reach the store at a URL."""
        return {
            "BRAIDAX_STORE": store,
            "BRAIDAX_SECRET": self.secret.hex(),
            "BRAIDAX_JOB": self.name,
            "BRAIDAX_EPOCH": str(epoch),
            "BRAIDAX_TRANSPORT": self.transport,
        }


def launch_here(
    program: Program, num_processes: int, *, restarts: int = 0, transport: str = "tcp", log: TextIOBase | None = None
) -> int:
    """Runs a program in processes of this machine.

    **Arguments:** `restarts`: how often all are started again, as the next epoch, after one has failed. `transport`: of
    `braidax.comm.from_environment`. `log`: where lines go; None is `sys.stdout` and `sys.stderr`.

    **Returns:** the exit code of the process that failed first in the last epoch, as a shell tells it; 0 if none did.
    **Raises:** `ArgumentError`, `GangError` when it cannot be started.
    """
    if num_processes < 1:
        raise ArgumentError(f"{num_processes=}: expected at least 1")
    outside = {"PYTHONUNBUFFERED": "1", **without_place(os.environ)}
    shares = shares_of_gpus(outside, find_gpus(), num_processes, program.devices_per_process)
    seats = [Seat(rank, num_processes, rank, num_processes, share) for rank, share in enumerate(shares)]
    job = Job.new(transport)

    def run(epoch: int) -> Failed | None:
        told = job.environment(server.address, epoch)
        commands = [
            Command((sys.executable, *program.command), {**outside, **told, **seat.environment}, str(Path.cwd()))
            for seat in seats
        ]
        with started(commands, print_lines([f"[{seat.rank}] " for seat in seats], log)) as processes:
            endings: dict[int, Ending] = {}

            def look(seconds: float | None) -> None:
                endings.update({ending.number: ending for ending in processes.wait(timeout_seconds=seconds)})

            while len(endings) < num_processes and not any(ending.status for ending in endings.values()):
                look(None)
            failed = next((ending for ending in endings.values() if ending.status), None)
            if failed is None:
                return None
            first = first_failed(failed.number, failed.status, told)
            deadline = time.monotonic() + LOOK_SECONDS
            while first not in endings and (left := deadline - time.monotonic()) > 0:
                look(left)
            ending = endings.get(first, failed)
            return Failed(f"rank {ending.number} (pid {ending.pid})", ending.how, ending.log, ending.exit_code)

    with TcpStoreServer(secret=job.secret) as server:
        return repeated(run, restarts, log)


def repeated(run: Callable[[int], Failed | None], restarts: int, log: TextIOBase | None) -> int:
    """Runs epochs until one does not fail or there are enough, tells of each failure, and returns the exit code.

    **Arguments:** `run`: runs the epoch of this number. `restarts`: how many may follow the first.
    """
    if restarts < 0:
        raise ArgumentError(f"{restarts=}: expected 0 or more")
    epoch = 0
    while (failed := run(epoch)) is not None:
        sys.stdout.flush()
        (log or sys.stderr).write(f"braidax launch: {failed}\n")
        if epoch == restarts:
            return failed.exit_code
        epoch += 1
        (log or sys.stderr).write(
            f"braidax launch: starts all again as epoch {epoch} (restart {epoch} of {restarts})\n"
        )
    return 0


@contextlib.contextmanager
def started(
    commands: Sequence[Command], write: Writer, *, leave_seconds: float = 0.0
) -> Generator[Processes, None, None]:
    """Starts processes, and ends them all behind the block.

    **Raises:** `GangError` when they cannot be started.
    """
    try:
        processes = Processes(commands, write=write)
    except OSError as error:
        raise GangError(
            f"the system started no {len(commands)} processes ({error}); take fewer, or allow more processes and "
            "descriptors (ulimit -u, ulimit -n)"
        ) from error
    try:
        yield processes
    finally:
        processes.end(leave_seconds=leave_seconds)


def first_failed(rank: int, status: int, told: dict[str, str]) -> int:
    """Returns the rank that failed first, given the one that was seen to end first.

    **Arguments:** `status`: how that one ended. `told`: the variables of its epoch.
    """
    if status < 0:  # by a signal, which is no consequence
        return rank
    with scoped_store(told) as store:
        seconds = 0.0
        with contextlib.suppress(WaitTimeout):
            store.get(f"{CONSEQUENCE}/{rank}", timeout_seconds=0.0)
            seconds = LOOK_SECONDS
        with contextlib.suppress(WaitTimeout):
            return int(store.get(FIRST_FAILED, timeout_seconds=seconds))
    return rank


def find_gpus() -> list[str]:
    """Returns the numbers by which CUDA knows the GPUs of this machine or container."""
    num_gpus = sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in Path("/dev").iterdir())
    return [str(number) for number in range(num_gpus)]
