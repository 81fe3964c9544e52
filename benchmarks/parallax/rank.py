"""What a process of the job does: joins the others, then takes the steps that the benchmark asks for."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

import braidax as bx
from benchmarks.harness.models import Model
from benchmarks.harness.sockets import Sent
from benchmarks.parallax.systems import OURS, PLAIN, XLA, Running, make_mesh, ours, plain, split_by_hybrid
from benchmarks.parallax.traffic import FORMULA, Formulas

SYSTEMS = (OURS, PLAIN, XLA)
WARMUP = 2


class Steps(NamedTuple):
    """Of one process. **Fields:** `seconds`, `losses`: of each step. `num_bytes`: sent to other processes, a step."""

    seconds: list[float]
    losses: list[float]
    num_bytes: float


def join(comm: Any, port: int) -> None:
    """Makes the ranks the processes of one `jax.distributed`, of one device each, whose service is at a port."""
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(f"127.0.0.1:{port}", comm.size, comm.rank, cluster_detection_method="deactivate")


def formulas(comm: Any, port: int, make: Callable[[], Model]) -> dict[str, float]:
    """Returns the bytes that a process should send in a step, by system; for what XLA chooses there is no formula."""
    known = Formulas(make(), make_mesh())
    return {system: known.of(system)[FORMULA] for system in (OURS, PLAIN)}


def take_steps(comm: Any, port: int, make: Callable[[], Model], system: str, count: int) -> Steps:
    """Takes steps from the first state on, and counts what the sockets of this process send.

    **Arguments:** `port`: as in `join`. `make`: pickled anew for each call; what it makes first is kept, by system.
    """
    if system not in _RUNNING:
        model, mesh = make(), make_mesh()
        if system == OURS:
            running = ours(model, mesh, bx.Hybrid())
        else:
            running = plain(model, mesh, split_by_hybrid(model, mesh) if system == XLA else ())
        _RUNNING[system] = running, model.batches(WARMUP + count)
    running, batches = _RUNNING[system]
    running.begin()
    warm = running.run(batches[:WARMUP])
    comm.barrier()
    before = Sent.now(port)
    comm.barrier()
    ran = running.run(batches[WARMUP:])
    comm.barrier()
    data, _ = Sent.now(port).since(before)
    running.end()
    return Steps(ran.seconds, warm.losses + ran.losses, data / count)


_RUNNING: dict[str, tuple[Running, list[Any]]] = {}
