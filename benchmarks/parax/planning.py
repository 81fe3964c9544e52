"""How long planning takes for many devices, which are not there."""

import time

import jax
import numpy as np
from jax.sharding import PartitionSpec

from braidax.data import simulated_mesh
from braidax.data.sharding.explain import explain
from braidax.data.sharding.load_plan import plan_load

NUM_DEVICES, NUM_PROCESSES = 4096, 512
_BATCH = {
    "image": jax.ShapeDtypeStruct((4096, 224, 224, 3), np.uint8),
    "input_ids": jax.ShapeDtypeStruct((4096, 512), np.int32),
    "label": jax.ShapeDtypeStruct((4096,), np.int32),
}


def plan_seconds(number: int) -> float:
    """Returns the seconds to plan and explain a batch over 4,096 devices, replicated and cut across processes.

    **Arguments:** `number`: names the axes, so that nothing is remembered of a mesh that was planned for before.
    """
    data, seq, model = (f"{name}{number}" for name in ("data", "seq", "model"))
    mesh = simulated_mesh({data: 64, seq: 4, model: 16}, num_processes=NUM_PROCESSES)
    specs = {"image": PartitionSpec(data), "input_ids": PartitionSpec(data, seq), "label": PartitionSpec(data)}
    start = time.perf_counter()
    found = explain(plan_load(_BATCH, mesh, specs, reads="once", cut_dims=[0, 1, 0]))
    seconds = time.perf_counter() - start
    assert found.redundancy == 1, found
    return seconds
