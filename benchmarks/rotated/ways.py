"""The ways to train a shape that are compared, each with as many samples a device."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

import braidax as bx
from benchmarks.harness import systems
from benchmarks.harness.gpt2 import Shape
from benchmarks.harness.systems import HELD, OURS, TENSOR, XLA, System

RTP, DDP = "ours, RotatedTensorParallel", "ours, DataParallel"
IN_PLACE = f"{RTP}, in place"
WAYS = (DDP, XLA, HELD, OURS, TENSOR, RTP)
_STRATEGIES: Mapping[str, Callable[[], Any]] = {
    RTP: bx.RotatedTensorParallel,
    IN_PLACE: partial(bx.RotatedTensorParallel, hops="in place"),
    DDP: bx.DataParallel,
    OURS: bx.FullySharded,
}


def strategy(way: str) -> Any:
    """Returns that of a way of ours along one axis."""
    return _STRATEGIES[way]()


def made(way: str, shape: Shape, num_devices: int) -> tuple[bx.Step, System]:
    """Compiles the gradients in one of the ways.

    **Arguments:** `shape`: of which `batch` is the samples of a device.

    **Returns:** the system, and a step of ours whose states are split as its states are.
    """
    shape = replace(shape, batch=shape.batch * num_devices)
    if way == TENSOR:  # all devices have all samples
        split = bx.parallel.TensorParallel(min_bytes=0)
        return systems.ours(shape, mesh((1, num_devices)), {"data": bx.DataParallel(), "model": split})
    along = mesh((num_devices,))
    if way in _STRATEGIES:
        return systems.ours(shape, along, {"data": strategy(way)})
    like = uncompiled(OURS, shape, along)
    return like, (systems.xla if way == XLA else systems.held)(shape, along, like)


def uncompiled(way: str, shape: Shape, along: Mesh) -> bx.Step:
    """Returns a step of ours of which nothing is compiled yet. **Arguments:** `shape`: with all samples."""

    def loss(params: Any, batch: Any) -> jax.Array:
        return shape.loss(params, batch)

    return bx.parallelize(loss, systems.OPTIMIZER, along, {"data": strategy(way)}, init=shape.init, batch=shape.spec())


def mesh(sizes: Sequence[int]) -> Mesh:
    """Returns one of the first devices, with the axis "data", or "data" and "model"."""
    names = ("data", "model")[: len(sizes)]
    found = jax.devices()[: math.prod(sizes)]
    return jax.make_mesh(tuple(sizes), names, axis_types=(AxisType.Auto,) * len(sizes), devices=found)


def num_bytes(step: bx.Step) -> int:
    """Returns bytes of all variables."""
    return sum(variable.num_bytes for variable in step.plan.variables)
