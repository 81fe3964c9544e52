"""From nothing to behind the first barrier of four ranks: our gangs, mpirun and torchrun."""

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

from benchmarks.comm.worlds import NO_LAUNCHER, environment_of, launcher, mpirun
from benchmarks.harness import Report, installed
from benchmarks.harness.clusters import dask_cluster, ray_cluster

SIZE = 4
LOCAL, LOCAL_UCX = f"LocalGang({SIZE})", f"LocalGang({SIZE}), ucx"
RAY, DASK = f"RayGang({SIZE})", f"DaskGang({SIZE})"
MPIRUN, TORCHRUN = f"mpirun -n {SIZE}", "torchrun, gloo"
LAUNCHERS = (MPIRUN, TORCHRUN)
_LIMIT_SECONDS = 60.0
_READY = "past the first barrier"


@contextmanager
def starts(report: Report, case: str) -> Generator[Mapping[str, Callable[[], float]]]:
    """Yields what starts each system, and returns the seconds until all ranks were past their first barrier.

    The clusters of Ray and Dask run already; what counts is the gang on them.
    """
    from braidax.gang import LocalGang

    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={SIZE}"]
    running: dict[str, Callable[[], float]] = {
        LOCAL: lambda: _gang(lambda: LocalGang(SIZE)),
        LOCAL_UCX: lambda: _gang(lambda: LocalGang(SIZE, transport="ucx")),
        MPIRUN: lambda: _launched([*mpirun(SIZE), sys.executable], "mpi4py"),
        TORCHRUN: lambda: _launched(torchrun, "gloo"),
    }
    running = installed(report, case, running, {LOCAL_UCX: "libucx", MPIRUN: "mpi4py", TORCHRUN: "torch"})
    if MPIRUN in running and launcher() is None:
        report.missing(case, MPIRUN, NO_LAUNCHER)
        del running[MPIRUN]
    clusters = installed(report, case, {RAY: _on_ray, DASK: _on_dask}, {RAY: "ray", DASK: "distributed"})
    with contextlib.ExitStack() as stack:
        running |= {name: stack.enter_context(on_cluster()) for name, on_cluster in clusters.items()}
        yield running


@contextmanager
def _on_ray() -> Generator[Callable[[], float]]:
    from braidax.gang.ray import RayGang

    with ray_cluster(SIZE):
        yield lambda: _gang(lambda: RayGang(SIZE))


@contextmanager
def _on_dask() -> Generator[Callable[[], float]]:
    from braidax.gang.dask import DaskGang

    with dask_cluster(SIZE) as client:
        yield lambda: _gang(lambda: DaskGang(client, SIZE))


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
