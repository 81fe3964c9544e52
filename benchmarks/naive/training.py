"""All loaders in front of the same step: the smallest preset of `wide_resnet`."""

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import optax
from jax.sharding import Mesh

import braidax as bx
from benchmarks.harness import Report, installed, take_turns
from benchmarks.naive.scale import Scale
from benchmarks.naive.systems import NEEDS, OURS, PEERS, PILLOW_FLAX, SIZES, Start, mesh_of, systems_of
from braidax.tasks.wide_resnet import wide_resnet

LEAVES = ("image", "label")
_CASE, _METRIC = "training wide_resnet tiny", "throughput"


def training(report: Report, scale: Scale, paths: Mapping[str, Path]) -> None:
    """Samples a second that are trained on, the peers' arrays put where the step wants them."""
    for name, path in paths.items():
        case = f"{name}, {_CASE}"
        running = installed(report, case, systems_of(name, path), NEEDS)
        task = wide_resnet(path, preset="tiny", image_size=SIZES[name][0])
        for batch_size, num_devices, threads in scale.training:
            mesh = mesh_of(num_devices)
            spec = {leaf: task.train.batch_spec(batch_size)[leaf] for leaf in LEAVES}
            strategies = {"data": bx.DataParallel()}
            step = bx.parallelize(task.loss, optax.sgd(0.01), mesh, strategies, init=task.init, batch=spec)
            turns = {
                system: _turn(system, start, step, mesh, batch_size, threads, scale.seconds)
                for system, start in running.items()
            }
            at = f"batch {batch_size}, devices {num_devices}, threads {threads}"
            for system, rates in take_turns(turns, rounds=min(scale.rounds, 3)).items():
                report.add(case, system, _METRIC, "samples/s", rates, at=at)
        report.against(f"{name.partition('@')[0]}_training", case, _METRIC, ours=OURS, peers=PEERS)


def _turn(
    system: str, start: Start, step: bx.Step, mesh: Mesh, batch_size: int, threads: int, seconds: float
) -> Callable[[], float]:
    joined = jax.jit(_join, out_shardings=step.batch_shardings)

    def run() -> float:
        batches = start(mesh, batch_size, threads, step.batch_shardings)
        try:
            fed = ({leaf: batch[leaf] for leaf in LEAVES} for batch in batches)
            return _train(step, map(joined, fed) if system == PILLOW_FLAX else fed, batch_size, seconds)
        finally:
            batches.close()  # pyright: ignore[reportAttributeAccessIssue] (all are generators)

    return run


def _join(batch: Any) -> Any:
    """From `[devices, batch / devices, ...]`, as `pmap` wants it, to global arrays `[batch, ...]`."""
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), batch)


def _train(step: bx.Step, batches: Iterator[Any], batch_size: int, seconds: float) -> float:
    state = step.init(jax.random.key(0))
    for _ in range(4):  # what lies ready before the clock runs; the first compiles
        state, metrics = step.update(state, next(batches))
        jax.block_until_ready(metrics)
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < 3 * seconds or count < 2:
        state, metrics = step.update(state, next(batches))
        jax.block_until_ready(metrics)
        count += 1
    return batch_size * count / (time.perf_counter() - start)
