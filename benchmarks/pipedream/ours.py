"""Our step in a process of a group: stages along the processes, samples divided among them, or one process alone."""

import itertools
import time
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import AxisType

import braidax as bx
from benchmarks.harness.gpt2 import Shape
from benchmarks.pipedream import gpt
from benchmarks.pipedream.group import Place, Taken
from braidax.parallel.stages.segments import Seconds, measured
from braidax.program import bytes_of

SAMPLES = "samples"
"""In place of a schedule: processes divide the samples."""


class Costs(NamedTuple):
    """What one process has measured of its stage. **Fields:** `transfer`: seconds, of what goes to the other one."""

    stage: Seconds
    transfer: float


class Ours:
    """A step of ours, and its state."""

    def __init__(self, step: Any, shape: Shape, rank: int) -> None:
        self._step, self._rank = step, rank
        self._batches = itertools.cycle([_placed(shape, step, seed) for seed in range(2)])
        self._state = step.init(jax.random.key(0))

    def step(self) -> Taken:
        """Takes the next step."""
        batch = next(self._batches)
        start, begun = time.perf_counter(), time.process_time()
        self._state, metrics = self._step.update(self._state, batch)
        jax.block_until_ready((self._state, metrics))
        busy, seconds, loss = time.process_time() - begun, time.perf_counter() - start, metrics["loss"]
        return Taken(seconds, float(loss.addressable_data(0)) if loss.addressable_shards else None, busy)

    def costs(self) -> Costs:
        """Measures this process's stage, while the other one measures its own, and the link between them."""
        cut = self._step.cut
        link = bx.parallel.measure_machine(self._step.mesh, num_runs=5).permutes["stage"]
        num_bytes = sum(map(bytes_of, cut.stages[1].incoming))
        stage = measured(num_runs=10)(cut.stages[self._rank], 0)
        return Costs(stage, link.seconds(num_bytes, 1))

    def cut(self) -> str:
        """Tells where the loss is cut, in one line."""
        return ", ".join(map(str, self._step.cut.borders))


def begin(place: Place, shape: Shape, way: str, microbatches: int) -> Ours:
    """Makes the step. **Arguments:** `way`: a schedule's name, or `SAMPLES`."""
    jax.config.update("jax_num_cpu_devices", 1)
    if place.size > 1:
        address = f"127.0.0.1:{place.port}"
        jax.distributed.initialize(address, place.size, place.rank, cluster_detection_method="deactivate")
    axis = "data" if way == SAMPLES else "stage"
    mesh = jax.make_mesh((place.size,), (axis,), axis_types=(AxisType.Auto,))
    strategy = bx.DataParallel() if way == SAMPLES else bx.parallel.Pipeline(way)
    step = bx.parallelize(
        gpt.loss(shape),
        optax.sgd(gpt.RATE),
        mesh,
        {axis: strategy},
        init=gpt.init(shape),
        batch=gpt.spec(shape),
        microbatches=microbatches,
    )
    return Ours(step, shape, place.rank)


def _placed(shape: Shape, step: Any, seed: int) -> Any:
    return jax.tree.map(
        lambda leaf, on: jax.make_array_from_callback(leaf.shape, on, lambda at: leaf[at], dtype=leaf.dtype),
        gpt.samples(shape, seed),
        step.batch_shardings,
    )
