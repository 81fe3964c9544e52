"""What two processes train together: `braidax launch --module tests.support.parallel.one_of_two` tells."""

import json
import sys
from typing import Any

import jax
import optax

import braidax.parallel as bx
from tests.support.parallel.models import init, make_batch, make_mesh, masked_loss, specs

DATA = {"data": bx.DataParallel()}


def losses() -> list[float]:
    """Trains in both forms, on host arrays and on global ones."""
    mesh = make_mesh()
    found: list[float] = []
    form = specs(make_batch())
    step = bx.parallelize(masked_loss, optax.adamw(1e-2), mesh, DATA, init=init, batch=form, microbatches=2)
    state = step.init(jax.random.key(0))
    for seed in range(2):
        state, metrics = step.update(state, make_batch(seed))
        found.append(float(metrics["loss"]))
    batch = jax.tree.map(
        lambda leaf, sharding: jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index]),
        make_batch(2),
        step.batch_shardings,
    )
    found.append(float(step.update(state, batch)[1]["loss"]))

    @bx.parallelize(mesh, DATA)
    def train_step(params: Any, batch: Any) -> Any:
        (loss, _), gradients = bx.value_and_grad(masked_loss, has_aux=True)(params, batch, jax.random.key(0))
        return jax.tree.map(lambda leaf, gradient: leaf - 0.1 * gradient, params, gradients), loss

    params: Any = jax.jit(init)(jax.random.key(0))
    for seed in range(2):
        params, loss = train_step(params, make_batch(seed))
        found.append(float(loss))
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(losses()) + "\n")
