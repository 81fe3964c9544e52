"""A whole training step that a user wrote, and the one device that says what is right."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import optax

import braidax.parallel as bx
from tests.support.parallel.dense.models import Model
from tests.support.parallel.models import assert_close, copied

# No smaller eps: what is rounded otherwise would move a weight whose gradient is next to nothing by the whole rate.
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, eps=1e-4))


def whole_step(model: Model, optimizer: optax.GradientTransformation = OPTIMIZER) -> Callable[[Any, Any], Any]:
    """Clipping, Adam, a moving average of weights, a key that changes."""

    def train_step(state: Any, batch: Any) -> Any:
        key, sub = jax.random.split(state["key"])
        loss, gradients = bx.value_and_grad(model.loss)(state["params"], batch, sub)
        updates, opt_state = optimizer.update(gradients, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        average = optax.incremental_update(params, state["average"], 0.1)
        norm = optax.tree.norm(gradients)
        return {"params": params, "average": average, "opt_state": opt_state, "key": key}, {"loss": loss, "norm": norm}

    return train_step


def begin(model: Model, optimizer: optax.GradientTransformation = OPTIMIZER) -> Any:
    """Returns the state before the first step."""
    return _begun(model.init, optimizer)(jax.random.key(3), jax.random.key(4))


@functools.cache
def _begun(init: Callable[[jax.Array], Any], optimizer: optax.GradientTransformation) -> Any:
    """One program: operation by operation it would be dozens."""

    @jax.jit
    def begun(first: jax.Array, key: jax.Array) -> Any:
        params = init(first)
        return {"params": params, "average": params, "opt_state": optimizer.init(params), "key": key}

    return begun


def assert_as_on_one_device(step: Any, train_step: Any, state: Any, batches: list[Any], *, atol: float = 1e-5) -> Any:
    """Fails unless every number is that of one device. **Returns:** the last state."""
    alone, on_one = state, jax.jit(train_step)
    for batch in batches:
        state, found = step(state, batch)
        alone, expected = on_one(alone, batch)
        assert_close(copied(found), copied(expected), atol=atol)
    assert_close(copied(state), copied(alone), atol=atol)
    return state
