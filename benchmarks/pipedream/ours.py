"""Our step in a process of a group: stages along the processes, samples divided among them, or one process alone."""

import itertools
import time
from dataclasses import replace
from typing import Any, Literal

import jax
import optax
from jax.sharding import AxisType

import braidax as bx
from benchmarks.harness.gpt2 import Shape
from benchmarks.pipedream import gpt
from benchmarks.pipedream.group import Place, Taken
from braidax.parallel.stages.schedules import Costs, Timed
from braidax.spans import Trace

SAMPLES = "samples"
"""In place of a schedule: processes divide the samples."""


class Ours:
    """A step of ours, and its state."""

    def __init__(self, step: Any, shape: Shape) -> None:
        self._step = step
        self._batches = itertools.cycle([_placed(shape, step, seed) for seed in range(2)])
        self._state = step.init(jax.random.key(0))

    def step(self) -> Taken:
        """Takes the next step."""
        batch = next(self._batches)
        start = time.perf_counter()
        self._state, metrics = self._step.update(self._state, batch)
        jax.block_until_ready((self._state, metrics))
        seconds, loss = time.perf_counter() - start, metrics["loss"]
        return Taken(seconds, float(loss.addressable_data(0)) if loss.addressable_shards else None)

    def operations(self) -> list[Timed]:
        """Returns when this process's operations of a step began and ended, in `time.perf_counter` seconds."""
        trace = Trace()
        found = self._step.measure(self._state, next(self._batches), trace=trace)
        own = [each for timed in found.timed for each in timed]
        begun = trace.spans[0].start - own[0].start
        return [replace(each, start=begun + each.start, end=begun + each.end) for each in own]

    def planned(self) -> Costs:
        """Returns what the plan says that stages take."""
        return self._step.plan.pipeline.costs

    def cut(self) -> str:
        """Tells where the loss is cut, in one line."""
        return ", ".join(map(str, self._step.cut.borders))


def begin(
    place: Place, shape: Shape, way: str, microbatches: int, clock: Literal["measured", "counted"] = "measured"
) -> Ours:
    """Makes the step. **Arguments:** `way`: a schedule's name, or `SAMPLES`. `clock`: of stages, to cut by."""
    jax.config.update("jax_num_cpu_devices", 1)
    if place.size > 1:
        address = f"127.0.0.1:{place.port}"
        jax.distributed.initialize(address, place.size, place.rank, cluster_detection_method="deactivate")
    axis = "data" if way == SAMPLES else "stage"
    mesh = jax.make_mesh((place.size,), (axis,), axis_types=(AxisType.Auto,))
    strategy = bx.DataParallel() if way == SAMPLES else bx.parallel.Pipeline(way, clock=clock)
    step = bx.parallelize(
        gpt.loss(shape),
        optax.sgd(gpt.RATE),
        mesh,
        {axis: strategy},
        init=gpt.init(shape),
        batch=gpt.spec(shape),
        microbatches=microbatches,
    )
    return Ours(step, shape)


def _placed(shape: Shape, step: Any, seed: int) -> Any:
    return jax.tree.map(
        lambda leaf, on: jax.make_array_from_callback(leaf.shape, on, lambda at: leaf[at], dtype=leaf.dtype),
        gpt.samples(shape, seed),
        step.batch_shardings,
    )
