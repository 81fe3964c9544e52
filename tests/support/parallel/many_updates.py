"""Loops that read nothing: `python -m tests.support.parallel.many_updates whole` tells the last loss."""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import braidax.parallel as bx

NUM_UPDATES, SIZE, RATE = 200, 64, 0.5
DATA = {"data": bx.DataParallel()}


def loss(params: Any, batch: Any) -> jax.Array:
    hidden = batch
    for _ in range(3):
        hidden = jnp.tanh(hidden @ params)
    return jnp.mean(hidden**2)


def first() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(SIZE, SIZE)).astype(np.float32) / 8


def samples() -> np.ndarray:
    return np.random.default_rng(1).normal(size=(8 * SIZE, SIZE)).astype(np.float32)


def last_loss(form: str) -> float:
    """Takes all updates, and only then looks. **Arguments:** `form`: "whole", "decorated" or "evaluations"."""
    mesh = jax.make_mesh((8,), ("data",))
    if form == "decorated":

        @bx.parallelize(mesh, DATA)
        def train_step(params: Any, batch: Any) -> Any:
            value, gradient = bx.value_and_grad(loss)(params, batch)
            return params - RATE * gradient, value

        params, metric = jnp.asarray(first()), jnp.zeros(())
        batch = jax.device_put(samples(), train_step.batch_shardings(samples()))
        for _ in range(NUM_UPDATES):
            params, metric = train_step(params, batch)
        return float(metric)
    spec = jax.ShapeDtypeStruct((8 * SIZE, SIZE), jnp.float32)
    step = bx.parallelize(loss, optax.sgd(RATE), mesh, DATA, init=lambda key: jnp.asarray(first()), batch=spec)
    state, metrics = step.init(jax.random.key(0)), dict[str, Any]()
    batch = jax.device_put(samples(), step.batch_shardings)
    for _ in range(NUM_UPDATES):
        if form == "evaluations":
            metrics = step.evaluate(state, batch)
        else:
            state, metrics = step.update(state, batch)
    return float(metrics["loss"])


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    for each in sys.argv[1:]:
        sys.stdout.write(f"{last_loss(each)}\n")
