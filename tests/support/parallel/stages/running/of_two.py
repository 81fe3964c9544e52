"""What stages of two processes train: `launch` prints what each of them reads of losses and norms."""

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import braidax as bx

SAMPLES, WIDTH = 16, 8


def init(key: Any) -> Any:
    first, second, third = jax.random.split(key, 3)
    return {
        "layers": jax.random.normal(first, (6, WIDTH, WIDTH)) / 3,
        "tied": jax.random.normal(second, (WIDTH, WIDTH)) / 3,
        "head": jax.random.normal(third, (WIDTH, 1)),
    }


def loss_fn(params: Any, batch: Any, key: Any) -> Any:
    """Tied weights, a value that goes past the layers, a leaf of the batch that the first and the last stage read."""
    first = batch["x"] @ params["tied"]
    x, _ = jax.lax.scan(lambda x, weights: (jnp.tanh(x @ weights), None), first, params["layers"])
    x = x * jax.random.bernoulli(key, 0.9, x.shape)
    x = (x @ params["tied"].T + 0.1 * first) * batch["mask"][:, None]
    return (((x @ params["head"])[:, 0] + batch["x"][:, 0] - batch["y"]) ** 2).mean(), {"scale": jnp.abs(x).mean()}


def with_table(key: Any) -> Any:
    return {**init(key), "table": jax.random.normal(jax.random.fold_in(key, 7), (12, WIDTH)) / 3}


def looked_up(params: Any, batch: Any, key: Any) -> Any:
    """The same behind rows of a table."""
    return loss_fn(params, {**batch, "x": batch["x"] + params["table"][batch["ids"]]}, key)


def untied(params: Any, batch: Any, key: Any) -> Any:
    """No weights that two stages read."""
    x, _ = jax.lax.scan(lambda x, weights: (jnp.tanh(x @ weights), None), batch["x"] @ params["tied"], params["layers"])
    x = x * jax.random.bernoulli(key, 0.9, x.shape) * batch["mask"][:, None]
    return (((x @ params["head"])[:, 0] - batch["y"]) ** 2).mean(), {"scale": jnp.abs(x).mean()}


def numbers(mesh_of: str, schedule: str) -> list[float]:
    """Trains on host arrays, then on those of a loader; "none": on one device, with no stages; "1,3": in stages of so
    many devices. "none, table" and "hybrid, …" have a table.

    By a schedule that does not flush there are no weights that two stages read, and no norm of all gradients.
    """
    batch = {
        "x": np.random.default_rng(0).normal(size=(SAMPLES, WIDTH)).astype(np.float32),
        "mask": (np.arange(SAMPLES) % 3 != 0).astype(np.float32),
        "y": np.ones(SAMPLES, np.float32),
    }
    has_table = mesh_of == "none, table" or mesh_of.startswith("hybrid")
    if has_table:
        batch["ids"] = np.arange(SAMPLES, dtype=np.int32) * 5 % 12
    flushes = schedule not in ("PipeDream", "PipeDream, vertical sync", "2BW")
    clip = [optax.clip_by_global_norm(0.1)] * flushes
    source, tx = bx.open(batch), optax.chain(*clip, optax.adamw(1e-2))
    replicas = tuple(map(int, mesh_of.split(","))) if mesh_of[0].isdigit() else None
    stages: Any = bx.DataParallel()
    if not mesh_of.startswith("none"):
        stages = bx.parallel.Pipeline(schedule, stages=replicas, clock="counted")
    mesh, strategies = {
        "none": lambda: (jax.make_mesh((1,), ("data",), devices=jax.local_devices()[:1]), {"data": stages}),
        "stages here": lambda: (jax.make_mesh((4,), ("stage",), devices=jax.local_devices()[:4]), {"stage": stages}),
        "stages": lambda: (jax.make_mesh((4,), ("stage",)), {"stage": stages}),
        "samples apart": lambda: (jax.make_mesh((2, 2), ("data", "stage")), _beside(stages)),
        "stages apart": lambda: (jax.make_mesh((2, 2), ("stage", "data")), _beside(stages)),
        "sharded, samples apart": lambda: (jax.make_mesh((2, 2), ("data", "stage")), _sharded(stages)),
        "hybrid, samples apart": lambda: (jax.make_mesh((2, 2), ("data", "stage")), _hybrid(stages)),
        "hybrid, stages apart": lambda: (jax.make_mesh((2, 2), ("stage", "data")), _hybrid(stages)),
        "sharded, stages apart": lambda: (jax.make_mesh((2, 2), ("stage", "data")), _sharded(stages)),
    }["stages" if replicas else mesh_of.removesuffix(", table")]()
    loss = looked_up if has_table else loss_fn if flushes else untied
    step = bx.parallelize(
        loss, tx, mesh, strategies, init=with_table if has_table else init, batch=source.batch_spec(SAMPLES),
        microbatches=4, metrics=["grad_norm"] * flushes,
    )  # fmt: skip
    state, found = step.init(jax.random.key(0)), list[float]()
    loader = bx.DataLoader(source, mesh, step.batch_shardings, batch_size=SAMPLES, seed=0, epochs=1)
    for given in (batch, batch, *loader):
        state, metrics = step.update(state, given)
        found += [float(metrics[name]) for name in ("loss", *["grad_norm"] * flushes, "scale")]
    metrics = step.evaluate(state, {name: leaf[: SAMPLES // 2] for name, leaf in batch.items()})
    mean = step.wrap(lambda params, batch: jnp.tanh(batch["x"] @ params["layers"][-1] @ params["head"]).mean())
    return [*found, float(metrics["loss"]), float(metrics["scale"]), float(mean(state, batch))]


def _beside(stages: Any) -> dict[str, Any]:
    return {"stage": stages, "data": bx.DataParallel()}


def _sharded(stages: Any) -> dict[str, Any]:
    return {"stage": stages, "data": bx.FullySharded(min_bytes=0)}


def _hybrid(stages: Any) -> dict[str, Any]:
    return {"stage": stages, "data": bx.Hybrid({"params/table": bx.parallel.Rows()})}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(numbers(*sys.argv[1:])) + "\n")
