"""What processes train by rows: `braidax launch --module tests.support.parallel.hybrid_of_two CASE` tells."""

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax

import braidax.parallel as bx
from braidax.parallel.given.arrays import place
from tests.support.parallel.hybrid import init, make_batch, pooled, sampled
from tests.support.parallel.models import specs

BOTH = {"data": bx.Hybrid(), "model": bx.Hybrid()}
CASES: dict[str, tuple[Any, tuple[int, ...], Any, optax.GradientTransformation]] = {
    "one axis": (pooled, (8,), {"data": bx.Hybrid()}, optax.adam(3e-2)),
    "two axes": (pooled, (2, 4), BOTH, optax.adagrad(0.3)),
    "two axes, several widths": (sampled, (2, 4), BOTH, optax.adagrad(0.3)),
}


def numbers(case: str) -> list[float]:
    """Trains over one axis, or over two of which the first joins processes, where there are several."""
    loss, shape, strategies, optimizer = CASES[case]
    mesh = jax.make_mesh(shape, ("data", "model")[: len(shape)])
    step = bx.parallelize(loss, optimizer, mesh, strategies, init=init, batch=specs(make_batch()))
    reading: Any = step._work._reading  # pyright: ignore[reportPrivateUsage]
    groups = reading.packing.groups
    hops = 2 if len(shape) > 1 and jax.process_count() > 1 else 1
    assert {len(group.exchange.hops) for group in groups} == {hops}
    state, found = step.init(jax.random.key(0)), list[float]()
    batches = [place(make_batch(seed), step.batch_shardings) for seed in range(3)]
    for batch, coming in zip(batches, [*batches[1:], batches[0]], strict=True):
        # Of several processes each update knows what comes: which changes no number.
        state, metrics = step.update(state, batch, coming=coming if jax.process_count() > 1 else None)
        found.append(float(metrics["loss"]))
    found.append(float(step.evaluate(state, make_batch(3))["loss"]))
    sums = jax.jit(lambda params: [jnp.abs(leaf).sum() for leaf in jax.tree.leaves(params)])
    return found + [float(one) for one in sums(step.settled(state).params)]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(numbers(sys.argv[1])) + "\n")
