"""The worlds: for each system as many ranks as asked for, which sleep until they are told to measure something."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, final

_START_SECONDS = 120.0
_LEAVE_SECONDS = 10.0
_LIMIT_SECONDS = 180.0  # of one measurement

_OVER_TCP = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "tcp,self", "OMPI_MCA_btl_tcp_if_include": "lo"}
_ENVIRONMENTS: Mapping[str, Mapping[str, str]] = {
    "mpi4py": {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"},
    "gloo": {"GLOO_SOCKET_IFNAME": "lo"},
}


@dataclass(frozen=True)
class System:
    """What the ranks run.

    **Fields:** `kind`: as `rank.py` knows it. `bound`: each rank to a core of its own where these suffice, as `mpirun`
    binds its own; without it the kernel may leave two ranks on one core. `environment`: besides `environment_of` that.
    """

    kind: str
    bound: bool = False
    environment: Mapping[str, str] = field(default_factory=dict[str, str])


TCP, UCX, UCX_TCP = "ours tcp", "ours ucx", "ours ucx, tcp"
MPI, MPI_TCP, GLOO = "mpi4py", "mpi4py, tcp", "gloo"
DEFAULT = "ours default"  # the transport "tcp", which inside a host uses the kernel's own sockets
TAKING_TURNS = (TCP, UCX, UCX_TCP, DEFAULT, MPI, MPI_TCP, GLOO)
NO_LAUNCHER = "no mpirun beside Python or on PATH"
NEEDS = {UCX: "libucx", UCX_TCP: "libucx", MPI: "mpi4py", MPI_TCP: "mpi4py", GLOO: "torch"}
"""What a system imports, of those that need more than the core."""

SYSTEMS: Mapping[str, System] = {
    TCP: System("tcp", environment={"BRAIDAX_ADDRESS": "127.0.0.1"}),  # TCP, even inside the host
    DEFAULT: System("tcp"),
    UCX: System("ucx", bound=True),
    UCX_TCP: System("ucx", environment={"UCX_TLS": "tcp,self"}),
    MPI: System("mpi4py"),  # shared memory, inside a host
    MPI_TCP: System("mpi4py", environment=_OVER_TCP),
    GLOO: System("gloo"),
}


@final
class World:
    """The ranks of one system; a context manager.

    **Arguments:** `name`: in `SYSTEMS`. `size`: the number of ranks.
    """

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        self._folder = Path(tempfile.mkdtemp())  # that only this user may enter
        self._controls: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            self._listener.bind(str(self._folder / "control"))
            self._listener.listen(size)
            system = SYSTEMS[name]
            environment = {**environment_of(system.kind), **system.environment}
            for command in _commands(system, self._folder, size):
                self._processes.append(subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL))
        except BaseException:
            self.close()
            raise

    def join(self) -> None:
        """Waits until all ranks are there."""
        deadline = time.monotonic() + _START_SECONDS
        found: dict[int, Connection] = {}
        while len(found) < self.size:
            control = self._accepted(deadline)
            self._controls.append(control)
            found[control.recv()] = control
        self._controls = [found[rank] for rank in range(self.size)]

    def ask(self, loop: str, *args: Any) -> list[Any]:
        """Lets every rank run a loop of `loops.py`, and returns what each returned, by rank."""
        for control in self._controls:
            control.send((loop, args))
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + _LIMIT_SECONDS
        while missing := [rank for rank in range(self.size) if rank not in answers]:
            ready = wait([self._controls[rank] for rank in missing], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"{self.name}: ranks {missing} of {self.size} do not answer {loop}{args}")
            for rank in missing:
                if self._controls[rank] in ready:
                    answers[rank] = self._answer(rank, loop)
        return [answers[rank] for rank in range(self.size)]

    def close(self) -> None:
        """Ends all ranks."""
        for control in self._controls:
            with contextlib.suppress(OSError):
                control.send(None)
        deadline = time.monotonic() + _LEAVE_SECONDS
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        for control in self._controls:
            control.close()
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)  # a launcher ends its ranks
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_LEAVE_SECONDS)
                process.kill()
                process.wait()
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _accepted(self, deadline: float) -> Connection:
        self._listener.settimeout(0.5)
        while time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):
                return Connection(self._listener.accept()[0].detach())
            if any(process.poll() is not None for process in self._processes):
                raise RuntimeError(f"{self.name}: a rank ended before it joined; see what it wrote")
        raise TimeoutError(f"{self.name}: {len(self._controls)} of {self.size} ranks joined in {_START_SECONDS:g} s")

    def _answer(self, rank: int, loop: str) -> Any:
        try:
            return self._controls[rank].recv()
        except EOFError:
            raise RuntimeError(f"{self.name}: rank {rank} ended in {loop}; see what it wrote") from None


@final
class Worlds:
    """The worlds of one size, each begun when it is first asked for; a context manager."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._worlds: dict[str, World] = {}

    def __getitem__(self, name: str) -> World:
        return self.of([name])[name]

    def of(self, names: Sequence[str]) -> Mapping[str, World]:
        """Returns some worlds, all ranks of which have joined."""
        new = [name for name in names if name not in self._worlds]
        for name in new:
            self._worlds[name] = World(name, self.size)
        for name in new:
            self._worlds[name].join()
        return {name: self._worlds[name] for name in names}

    def __enter__(self) -> "Worlds":
        return self

    def __exit__(self, *_: object) -> None:
        for world in self._worlds.values():
            world.close()


def environment_of(kind: str) -> dict[str, str]:
    """Returns the environment of processes that run a kind of system, torchrun's number of threads included."""
    return {**os.environ, "OMP_NUM_THREADS": "1", **_ENVIRONMENTS.get(kind, {})}


def launcher() -> str | None:
    """Returns `mpirun`, the one beside Python first, None if there is none."""
    beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return shutil.which("mpirun", path=beside)


def mpirun(size: int) -> list[str]:
    """Returns the launcher with what it needs where ranks are more than cores; it binds to cores where they suffice."""
    found = launcher()
    if found is None:
        raise RuntimeError('mpirun is missing: pip install "braidax[bench]"')
    few = size <= len(os.sched_getaffinity(0))
    return [found, "-n", str(size), *([] if few else ["--oversubscribe", "--bind-to", "none"])]


def _commands(system: System, folder: Path, size: int) -> list[list[str]]:
    rank = [sys.executable, "-m", "benchmarks.comm.rank", system.kind, str(folder)]
    if system.kind == "mpi4py":
        return [[*mpirun(size), *rank]]
    cores = sorted(os.sched_getaffinity(0))
    bound = system.bound and size <= len(cores)
    return [[*rank, str(number), str(size), *([str(cores[number])] if bound else [])] for number in range(size)]
