"""What `braidax launch` does: a program in many processes, here, over ssh, on a gang, or where Slurm put this one."""

import os
import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Literal, NoReturn

import typer

from braidax.comm.environment import Place, rank_from_environment
from braidax.comm.transports.named import check_transport
from braidax.errors import ArgumentError
from braidax.gang.hosts import read_hosts
from braidax.gang.launch import GRACE_SECONDS, find_gpus, launch_here
from braidax.gang.meeting import environment_of
from braidax.gang.over_ssh import Remote, launch_over_ssh
from braidax.gang.program import DEVICES, Program, shares_of_gpus


@dataclass(frozen=True)
class Where:
    """Where to run.

    **Arguments:** `processes`: how many, here or on a gang. `servers`: how many processes besides have tables, here; a
    file of hosts has its own. `hosts`: such a file, see `read_hosts`. `gang`: whose ranks run it. `scheduler`: the
    address of Dask's. `remote`: how to reach hosts.
    """

    processes: int | None = None
    servers: int = 0
    hosts: Path | None = None
    gang: Literal["ray", "dask"] | None = None
    scheduler: str | None = None
    remote: Remote = field(default_factory=Remote)


def launch(
    program: Program,
    where: Where,
    *,
    restarts: int = 0,
    transport: str = "tcp",
    grace_seconds: float | None = None,
) -> NoReturn:
    """Runs a program where it is said, and exits as the rank that failed first did.

    Without anything said, this process becomes the rank that Slurm or mpirun started it as.

    **Arguments:** `restarts`, `transport`, `grace_seconds`: as of `launch_here`; what starts or ends ranks by itself
    takes no `restarts` or `grace_seconds`.

    **Raises:** `ArgumentError` for places that do not go together; any error of braidax.
    """
    _check_where(where)
    place = rank_from_environment(os.environ)
    started = place if place is not None and place.origin != "braidax" else None
    check_transport(transport, "--transport")
    if where.hosts is None and where.gang is None:
        _check_here(program)
    if started is not None and started.size > 1 and (where.processes or where.hosts or where.gang):
        raise ArgumentError(
            f"{started.origin} has started {started.size} processes already, and each would start its own; leave out "
            "--processes, --hosts and --gang"
        )
    if where.hosts is None and where.gang is None and where.processes is None:
        if started is not None:
            _become(started, program, restarts, grace_seconds)
        raise ArgumentError(_without_processes(program))
    if where.gang is not None and grace_seconds is not None:
        raise ArgumentError(
            f"--grace-seconds {grace_seconds:g}: --gang {where.gang} ends its ranks at once; leave it out, and take "
            "checkpoints as often as lost work is to be bounded"
        )
    grace = GRACE_SECONDS if grace_seconds is None else grace_seconds
    with _terminating():
        if where.hosts is not None:
            hosts, remote = read_hosts(where.hosts), where.remote
            code = launch_over_ssh(
                program, hosts, remote=remote, restarts=restarts, transport=transport, grace_seconds=grace
            )
        elif where.gang is not None:
            code = _launch_on_gang(program, where, restarts, transport)
        else:
            assert where.processes is not None
            code = launch_here(
                program,
                where.processes,
                servers=where.servers,
                restarts=restarts,
                transport=transport,
                grace_seconds=grace,
            )
    raise typer.Exit(code)


def _check_where(where: Where) -> None:
    """Raises `ArgumentError` for places that do not go together, and servers where they cannot be started yet."""
    if where.hosts is not None and (where.processes is not None or where.gang is not None):
        raise ArgumentError(
            f"--hosts {where.hosts} says how many processes there are; leave out --processes and --gang"
        )
    if where.servers and where.hosts is not None:
        raise ArgumentError(
            f"--servers {where.servers} with --hosts {where.hosts}: the file says where servers are; name them there, "
            f"such as `node1: 0,1,server`"
        )
    if where.servers and (where.processes is None or where.gang is not None):
        there = "no --processes" if where.gang is None else f"--gang {where.gang}"
        raise ArgumentError(
            f"--servers {where.servers} with {there}: servers are started beside --processes on this machine, or on "
            f"--hosts whose file names some; elsewhere give no --servers, and in the program a gang of its own, "
            f"parallelize(…, servers=gang)"
        )


def _check_here(program: Program) -> None:
    """Raises `ArgumentError` for a program that is not on this machine, before any process is started."""
    target = program.target
    if program.kind == "module":
        package = target.partition(".")[0]
        if PathFinder.find_spec(package, [str(Path.cwd())]) is None and find_spec(package) is None:
            raise ArgumentError(
                f"there is no module {target} (seen from {Path.cwd()}); expected a name as behind `python -m`"
            )
    elif not Path(target).exists():
        raise ArgumentError(
            f"there is no program {target} (seen from {Path.cwd()}); expected the path of a Python file"
        )
    elif Path(target).is_dir() and not (Path(target) / "__main__.py").exists():
        raise ArgumentError(f"{target} is a folder without __main__.py; expected a Python program")


def _without_processes(program: Program) -> str:
    told = "--processes is not given: say how many processes to start, or on which --hosts; or let srun or mpirun "
    told += f"start `braidax launch`; such as `braidax launch -n 2 {program.target}`"
    if {"-n", "--processes", "--hosts", "--gang"} & set(program.arguments):
        told += ": what stands behind SCRIPT is its own"
    return told


def _launch_on_gang(program: Program, where: Where, restarts: int, transport: str) -> int:
    from braidax.gang.on_gang import launch_on

    if where.gang == "ray":
        from braidax.gang.ray import RayGang

        if where.processes is None:
            raise ArgumentError("--gang ray needs --processes: say how many ranks to start")
        return launch_on(RayGang(where.processes, transport=transport), program, restarts=restarts, transport=transport)
    from braidax.gang.dask import DaskGang
    from braidax.gang.dask_store import open_client

    with open_client(where.scheduler) as client:
        gang = DaskGang(client, where.processes, transport=transport)
        return launch_on(gang, program, restarts=restarts, transport=transport)


def _become(place: Place, program: Program, restarts: int, grace_seconds: float | None) -> NoReturn:
    """Replaces this process by the rank that it was started as."""
    if restarts:
        raise ArgumentError(
            f"--restarts {restarts}: {place.origin} has started this process, and starts it again or not"
        )
    if grace_seconds is not None:
        raise ArgumentError(
            f"--grace-seconds {grace_seconds:g}: {place.origin} has started this process, and ends it by its own rules "
            "(Slurm: KillWait, --signal); leave it out"
        )
    os.environ.update({"PYTHONUNBUFFERED": "1", **environment_of(place, os.environ)})
    if DEVICES not in os.environ and place.local_rank is not None and place.local_size is not None:
        share = shares_of_gpus(os.environ, find_gpus(), place.local_size, program.devices_per_process)[place.local_rank]
        os.environ.update({} if share is None else {DEVICES: share})
    os.execv(sys.executable, [sys.executable, *program.command])


@contextmanager
def _terminating() -> Generator[None]:
    """Has SIGTERM and SIGHUP stop all ranks as Ctrl-C does, rather than leave them to be killed at once."""
    before = {number: signal.signal(number, _terminated) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    for ignored in (signal.SIGTERM, signal.SIGHUP):  # which platforms send more than once
        signal.signal(ignored, signal.SIG_IGN)
    raise typer.Exit(128 + number)
