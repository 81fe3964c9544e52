"""Processes of one system, each on a core of its own, that do what they are asked."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
_LIMIT_SECONDS = 240.0
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
    "OMP_NUM_THREADS": "1",
}


class Place(NamedTuple):
    """Which process one is. **Fields:** `port`: free, for who has to meet the others."""

    rank: int
    size: int
    port: int


class Taken(NamedTuple):
    """A step of one process. **Fields:** `loss`: where it is known."""

    seconds: float
    loss: float | None


class Failed(Exception):
    """A process could not do what it was asked; says why."""


class Group:
    """The processes of one system."""

    def __init__(self, running: Sequence[tuple[subprocess.Popen[bytes], Connection]]) -> None:
        self._running = running

    def ask(self, name: str, *args: Any) -> list[Any]:
        """Lets all processes call a method of their systems at once. **Raises:** `Failed`."""
        return self._answers([(name, args)] * len(self._running))

    def begin(self, port: int, args: tuple[Any, ...]) -> None:
        """Makes the systems. **Raises:** `Failed`."""
        size = len(self._running)
        self._answers([(Place(rank, size, port), args) for rank in range(size)])

    def _answers(self, asked: Sequence[Any]) -> list[Any]:
        for (_, control), one in zip(self._running, asked, strict=True):
            with contextlib.suppress(ConnectionError):  # of one that has ended, which is told below
                control.send(one)
        found: list[Any] = []
        for process, control in self._running:
            if not control.poll(_LIMIT_SECONDS):
                raise Failed(f"no answer within {_LIMIT_SECONDS:.0f} s")
            try:
                answer, why = control.recv()
            except (EOFError, ConnectionError):
                raise Failed(f"a process ended with {process.wait()}") from None
            if why:
                raise Failed(why)
            found.append(answer)
        return found


@contextmanager
def group(module: str, args: tuple[Any, ...], cores: Sequence[set[int]], *, python: str = "") -> Generator[Group]:
    """Starts processes, and ends them; yields their group.

    **Arguments:** `module`: with `begin(place, *args)`, which makes the system of a process. `cores`: of each process.
    `python`: of the environment in which they run, by default this one.

    **Raises:** `Failed`.
    """
    running: list[tuple[subprocess.Popen[bytes], Connection]] = []
    try:
        for own in cores:
            running.append(_started(module, own, python or sys.executable, _ENVIRONMENT))
        made = Group(running)
        made.begin(_free_port(), args)
        yield made
    finally:
        for _, control in running:
            control.close()
        for process, _ in running:
            process.kill()
            process.wait()


def _started(
    module: str, cores: set[int], python: str, environment: Mapping[str, str]
) -> tuple[subprocess.Popen[bytes], Connection]:
    ours, its = socket.socketpair()
    command = [python, "-W", "ignore", "-m", "benchmarks.pipedream.rank", module, str(its.fileno())]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    process = subprocess.Popen(
        [*command, ",".join(map(str, sorted(cores)))],
        cwd=ROOT,
        env={**os.environ, **environment, "PYTHONPATH": path},
        pass_fds=[its.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    its.close()
    return process, Connection(ours.detach())


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
