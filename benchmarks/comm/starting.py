"""From nothing to behind the first barrier of four ranks: our gangs, mpirun and torchrun."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

from benchmarks.comm.objects import dask_cluster
from benchmarks.comm.worlds import environment_of, mpirun
from benchmarks.harness.clusters import ray_cluster

SIZE = 4
LOCAL = f"LocalGang({SIZE})"
_LIMIT_SECONDS = 60.0
_READY = "past the first barrier"


@contextmanager
def starts() -> Generator[Mapping[str, Callable[[], float]]]:
    """Yields what starts each system, and returns the seconds until all ranks were past their first barrier.

    The clusters of Ray and Dask run already; what counts is the gang on them.
    """
    from braidax.gang import LocalGang
    from braidax.gang.dask import DaskGang
    from braidax.gang.ray import RayGang

    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={SIZE}"]
    with ray_cluster(SIZE), dask_cluster(SIZE) as client:
        yield {
            LOCAL: lambda: _gang(lambda: LocalGang(SIZE)),
            f"{LOCAL}, ucx": lambda: _gang(lambda: LocalGang(SIZE, transport="ucx")),
            f"RayGang({SIZE})": lambda: _gang(lambda: RayGang(SIZE)),
            f"DaskGang({SIZE})": lambda: _gang(lambda: DaskGang(client, SIZE)),
            f"mpirun -n {SIZE}": lambda: _launched([*mpirun(SIZE), sys.executable], "mpi4py"),
            "torchrun, gloo": lambda: _launched(torchrun, "gloo"),
        }


def _gang(make: Callable[[], Any]) -> float:
    start = time.perf_counter()
    with make() as gang:
        gang.run(_meet)
        return time.perf_counter() - start


def _meet(comm: Any) -> None:
    comm.barrier()


def _launched(launcher: list[str], kind: str) -> float:
    command = [*launcher, "-m", "benchmarks.comm.starting", kind]
    start = time.perf_counter()
    with subprocess.Popen(
        command, env=environment_of(kind), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    ) as process:
        limit = threading.Timer(_LIMIT_SECONDS, process.terminate)  # launchers end their ranks then
        limit.start()
        try:
            assert process.stdout is not None
            missing = SIZE
            while missing:
                line = process.stdout.readline()
                if not line:
                    raise RuntimeError(f"{kind}: a rank ended before the first barrier; see what it wrote")
                missing -= line.count(_READY)  # gloo writes lines of its own, and into ours
            seconds = time.perf_counter() - start
            process.stdout.read()
            process.wait()
            return seconds
        finally:
            limit.cancel()
            process.terminate()


def _rank(kind: str) -> None:
    if kind == "mpi4py":
        from mpi4py import MPI

        comm: Any = MPI.COMM_WORLD
        comm.Barrier()
        print(_READY, flush=True)
        return
    import torch.distributed as dist

    process_group: Any = dist
    process_group.init_process_group("gloo")
    process_group.barrier()
    print(_READY, flush=True)
    process_group.destroy_process_group()


if __name__ == "__main__":
    _rank(sys.argv[1])
