"""What a process of the job does: joins the others, then takes the steps that the benchmark asks for."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType, Mesh

import braidax as bx
from benchmarks.harness import systems
from benchmarks.harness.gpt2 import Shape
from benchmarks.harness.sockets import Sent
from benchmarks.harness.systems import BY_HAND, HELD, OURS, XLA


class Taken(NamedTuple):
    """A step of one process. **Fields:** its `seconds`. `num_bytes`: sent to other processes meanwhile."""

    seconds: float
    num_bytes: int


def join(comm: Any, port: int, num_devices: int) -> None:
    """Makes the ranks the processes of one `jax.distributed`, whose service is at a port.

    **Arguments:** `num_devices`: of each process.
    """
    jax.config.update("jax_num_cpu_devices", num_devices)
    jax.distributed.initialize(f"127.0.0.1:{port}", comm.size, comm.rank, cluster_detection_method="deactivate")


def take_step(comm: Any, port: int, shape: Shape, system: str) -> Taken:
    """Takes the next step of a system, which is compiled when it is first asked for.

    **Arguments:** `port`: as in `join`.
    """
    if system not in _RUNNING:
        _RUNNING[system] = _begun(shape, system)
    comm.barrier()
    before = Sent.now(port)
    comm.barrier()
    seconds = _RUNNING[system]()
    comm.barrier()
    data, _ = Sent.now(port).since(before)
    return Taken(seconds, data)


def _begun(shape: Shape, system: str) -> Callable[[], float]:
    mesh, step, own = _ours(shape)
    make = {XLA: systems.xla, HELD: systems.held, BY_HAND: systems.by_hand}
    chosen = own if system == OURS else make[system](shape, mesh, step)
    return chosen.steps([systems.place(shape, step, seed) for seed in range(2)])


@functools.cache
def _ours(shape: Shape) -> tuple[Mesh, bx.Step, systems.System]:
    mesh = jax.make_mesh((len(jax.devices()),), ("data",), axis_types=(AxisType.Auto,))
    return mesh, *systems.ours(shape, mesh, {"data": bx.FullySharded()})


_RUNNING: dict[str, Callable[[], float]] = {}
