"""Launching on a gang: a program in the ranks of Ray or Dask."""

import contextlib
import os
import sys
import threading
from collections.abc import Generator
from io import TextIOBase
from pathlib import Path

from braidax.comm import Communicator, TcpStoreServer
from braidax.comm.stores.tcp_frames import url
from braidax.connections.hosts import host_addresses
from braidax.errors import CallFailed, GangError, PeerLost
from braidax.gang.gang import Gang
from braidax.gang.launch import Failed, Job, repeated
from braidax.gang.program import Program, Seat
from braidax.gang.runner import initialize_jax, run

_PROGRAM = threading.Lock()  # of the process, as are its environment and its folder


def launch_on(
    gang: Gang, program: Program, *, restarts: int = 0, transport: str = "tcp", log: TextIOBase | None = None
) -> int:
    """Runs a program in the ranks of a gang, which is started for it and stopped afterwards.

    The program must be there on all hosts, in the folder of the same name. The lines of the ranks go where those of the
    gang go. How long ranks have to save and end when this is interrupted is the gang's: those of a `LocalGang` have its
    `grace_seconds`; Ray and Dask end theirs at once.

    **Arguments:** `restarts`, `transport`: as `launch_here` takes them. `log`: where it is told what failed; None is
    `sys.stderr`.

    **Returns:** the exit code of the rank that failed first in the last generation: 1 unless it called `sys.exit` with
    another; 0 if none failed. **Raises:** `GangError` when the gang cannot be started.
    """
    name = Job.new(transport).name

    def run_generation(generation: int) -> Failed | None:
        if generation:
            gang.restart()
        try:
            gang.run(_run, program, name, transport, generation, str(Path.cwd()))
        except (CallFailed, PeerLost) as failed:
            # Where Dask is loaded its tblib pickles errors, and `SystemExit.code` is lost: its arguments are not.
            said = failed.__cause__.args if isinstance(failed.__cause__, SystemExit) else ()
            code = said[0] if said and isinstance(said[0], int) else 1
            notes = getattr(failed, "__notes__", [])
            return Failed(f"rank {failed.rank}", f"is reported so: {failed}", tuple(notes), code)
        return None

    with gang:
        return repeated(run_generation, restarts, log)


def _run(comm: Communicator, program: Program, name: str, transport: str, generation: int, folder: str) -> None:
    """Runs the program as one rank, with what it would have been told by `braidax launch` in its environment.

    The secret of its store is derived: whoever sees this call, on its way through a scheduler, does not learn it.
    """
    job = Job(comm.derive_secret(f"launch {name} {generation}"), transport, name)
    if not _PROGRAM.acquire(blocking=False):
        raise GangError(
            f"{program.target}: another program runs in this process (pid {os.getpid()}), and a process has one "
            "environment, one folder and one sys.argv; give each rank of each gang a Dask worker that is a process of "
            "its own: workers=, or a cluster with processes=True"
        )
    try:
        comm.barrier()  # nobody begins a program that another rank has refused: it would wait there for that rank
        with _restored():
            os.chdir(folder)
            _run_there(comm, program, job, generation)
    finally:
        _PROGRAM.release()


@contextlib.contextmanager
def _restored() -> Generator[None, None, None]:
    """Leaves variables, folder, `sys.argv` and `sys.path` as they were: a worker of Dask goes on after the job."""
    folder = os.open(".", os.O_RDONLY)
    variables, arguments, path, places = dict(os.environ), sys.argv, sys.path, list(sys.path)
    try:
        yield
    finally:
        os.fchdir(folder)
        os.close(folder)
        for name in os.environ.keys() - variables.keys():
            del os.environ[name]
        os.environ.update(variables)
        sys.argv, sys.path = arguments, path
        sys.path[:] = places


def _run_there(comm: Communicator, program: Program, job: Job, generation: int) -> None:
    server = TcpStoreServer(host="", secret=job.secret) if comm.rank == 0 else None
    try:
        store = ""
        if server is not None:
            address = "127.0.0.1" if len(set(comm.hosts)) == 1 else host_addresses()[0]
            store = url(address, int(server.address.rpartition(":")[2]))
        os.environ.update(job.environment(bytes(comm.broadcast(store.encode())).decode(), generation))
        local = [rank for rank in range(comm.size) if comm.hosts[rank] == comm.hosts[comm.rank]]
        os.environ.update(Seat(comm.rank, comm.size, local.index(comm.rank), len(local)).environment)
        if program.initialize == "jax":
            initialize_jax(os.environ, program.devices_per_process)
        run(program)
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise
    finally:
        if server is not None:
            server.close()
