"""Steps of the small models, and the one device that says what is right."""

import functools
from typing import Any

import jax
import numpy as np
import optax

import braidax.parallel as bx
from tests.support.parallel.dense.models import MODELS, Model
from tests.support.parallel.models import assert_close, copied, make_mesh, single_device, specs

ALL = bx.FullySharded(min_bytes=0)
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))


def make_step(model: Model, strategies: Any, mesh: str = "8 explicit", **options: Any) -> bx.Step:
    """Returns the step of a model; `options` are those of `parallelize`, and `optimizer`."""
    optimizer = options.pop("optimizer", OPTIMIZER)
    batch = specs(model.batch(0))
    return bx.parallelize(model.loss, optimizer, make_mesh(mesh), strategies, init=model.init, batch=batch, **options)


@functools.cache
def fully_sharded(model: str, mesh: str = "8 explicit") -> bx.Step:
    """A step that several tests read, and train by: it keeps no state."""
    return make_step(MODELS[model], {"data": ALL}, mesh)


@functools.cache
def _plain(loss: Any) -> Any:
    def plain(params: Any, variables: Any, key: Any, batch: Any) -> Any:
        return loss(params, batch, key), ({}, variables)

    return plain


def assert_as_on_one_device(
    step: bx.Step, model: Model, *, optimizer: Any = OPTIMIZER, num_updates: int = 4, atol: float = 1e-5
) -> None:
    """Fails unless every number of some updates is that of one device."""
    state = step.init(jax.random.key(3))
    begun = step.to_dense(state)
    batches = [model.batch(seed) for seed in range(num_updates)]
    expected, _, (*metrics, on_one) = single_device(_plain(model.loss), optimizer, begun, batches, then=batches[0])
    for batch, expects in zip(batches, metrics, strict=True):
        state, found = step.update(state, batch)
        np.testing.assert_allclose(found["loss"], expects["loss"], rtol=2e-5, atol=atol)
    assert_close(copied(step.to_dense(state).params), copied(expected), atol=atol)
    np.testing.assert_allclose(step.evaluate(state, batches[0])["loss"], on_one["loss"], rtol=2e-5, atol=atol)
