"""Losses with tables that are exchanged by rows, and the one device that says what is right."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

import braidax.parallel as bx
from tests.support.parallel.models import assert_close, copied, make_mesh, single_device, specs

BATCH, LENGTH, ROWS, WIDTH = 16, 5, 203, 6  # no mesh divides the rows
OPTIMIZERS: dict[str, optax.GradientTransformation] = {
    "sgd": optax.sgd(0.3),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adagrad": optax.adagrad(0.3),
    "adam": optax.adam(3e-2),
    "adamw": optax.adamw(3e-2, weight_decay=0.1),
    "rmsprop": optax.rmsprop(1e-2),
}
HYBRID = {"data": bx.Hybrid()}


def make_batch(seed: int = 0) -> dict[str, np.ndarray]:
    """Ids that repeat, one that all samples share, and bags of several lengths."""
    random = np.random.default_rng(seed)
    ids = random.integers(0, ROWS, (BATCH, LENGTH)).astype(np.int32)
    ids[:, 0] = 7
    return {
        "ids": ids,
        "length": random.integers(1, LENGTH + 1, BATCH).astype(np.int32),
        "target": random.normal(size=BATCH).astype(np.float32),
    }


def init(key: jax.Array) -> Any:
    """Returns the first parameters of all losses."""
    keys = jax.random.split(key, 4)
    return {
        "table": jax.random.normal(keys[0], (ROWS, WIDTH)),
        "other": jax.random.normal(keys[1], (5 * ROWS, WIDTH)),
        "narrow": jax.random.normal(keys[2], (ROWS,)),
        "kernel": jax.random.normal(keys[3], (WIDTH, WIDTH)) / 3,
    }


def pooled(params: Any, batch: Any, key: jax.Array) -> Any:
    """Two tables of one width, a bag of ragged lengths, dropout."""
    kept = jnp.arange(LENGTH) < batch["length"][:, None]
    bag = jnp.where(kept[..., None], params["table"][batch["ids"]], 0).sum(1) / batch["length"][:, None]
    hidden = jnp.tanh(bag @ params["kernel"]) + jnp.take(params["other"], 3 * batch["ids"][:, 1], axis=0)
    hidden = hidden * jax.random.bernoulli(key, 0.8, hidden.shape)
    losses = (hidden.sum(-1) - batch["target"]) ** 2
    return losses.mean(), {"hidden": hidden.mean()}


def scanned(params: Any, batch: Any, key: jax.Array) -> Any:
    """A recurrent network that looks its table up at each step of a scan, within a checkpoint."""

    @jax.checkpoint
    def step(state: jax.Array, ids: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(state @ params["kernel"] + params["table"][ids]), None

    state, _ = jax.lax.scan(step, jnp.zeros((len(batch["ids"]), WIDTH)), batch["ids"].T)
    return ((state.sum(-1) - batch["target"]) ** 2).mean(), {}


def sampled(params: Any, batch: Any, key: jax.Array) -> Any:
    """Sampled softmax: some rows are drawn by the key, for all samples alike; and a table of numbers."""
    classes = jax.random.randint(key, (21,), 0, 5 * ROWS)  # no mesh divides them
    state = jnp.tanh(params["table"][batch["ids"][:, 1]] @ params["kernel"])
    true = (state * params["other"][batch["ids"][:, 2]]).sum(-1) + params["narrow"][batch["ids"]].mean(1)
    logits = jnp.concatenate([true[:, None], state @ params["other"][classes].T], 1)
    return -jax.nn.log_softmax(logits)[:, 0].mean(), {}


LOSSES: dict[str, Callable[..., Any]] = {"pooled": pooled, "scanned": scanned, "sampled": sampled}


@functools.cache
def as_plain(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a loss as `single_device` asks for it."""

    def plain(params: Any, variables: Any, key: jax.Array, batch: Any) -> Any:
        value, metrics = loss(params, batch, key)
        return value, (metrics, variables)

    return plain


def make_step(loss: Any, optimizer: Any, mesh: Mesh | str = "8 explicit", **options: Any) -> bx.Step:
    """Returns a step; `options` are those of `parallelize`, and `strategies`."""
    options = {"init": init, "batch": specs(make_batch()), "strategies": HYBRID, **options}
    mesh = make_mesh(mesh) if isinstance(mesh, str) else mesh
    return bx.parallelize(loss, optimizer, mesh, options.pop("strategies"), **options)


@functools.cache
def pooled_by(optimizer: str) -> bx.Step:
    """A step that several tests read, and train by: it keeps no state."""
    return make_step(pooled, OPTIMIZERS[optimizer])


def placed(step: bx.Step) -> dict[str, set[str]]:
    """Returns where the variables lie, by path."""
    return {variable.path: {str(placement) for placement in variable.placements} for variable in step.plan.variables}


def as_dense(step: bx.Step, params: Any) -> Any:
    """Parameters in the shapes that the loss has them in, as NumPy arrays."""

    def whole(variable: bx.PlannedVariable, leaf: jax.Array) -> np.ndarray:
        return np.asarray(leaf).reshape(-1, *variable.shape[1:])[: variable.shape[0]]

    leaves, structure = jax.tree.flatten(params)
    return structure.unflatten(map(whole, step.plan.variables, leaves))


def assert_as_on_one_device(step: bx.Step, loss: Any, optimizer: Any, *, num_updates: int = 10) -> None:
    """Fails unless every number of some updates is that of one device."""
    state, batches = step.init(jax.random.key(3)), [make_batch(seed) for seed in range(num_updates)]
    first = copied(bx.State(state.step, as_dense(step, state.params), (), {}, state.key))
    begun = bx.State(0, first.params, optimizer.init(jax.tree.map(jnp.asarray, first.params)), {}, state.key)
    expected, _, (*told, on_one) = single_device(as_plain(loss), optimizer, begun, batches, then=batches[0])
    for batch, expects in zip(batches, told, strict=True):
        state, metrics = step.update(state, batch)
        assert metrics.pop("row_rounds") >= 1
        assert_close(copied(metrics), copied(expects), atol=1e-5)
    # What evaluation reads is what dense training would have by now, also of rows that no batch has touched lately.
    evaluated = step.evaluate(state, batches[0])
    np.testing.assert_allclose(evaluated["loss"], on_one["loss"], rtol=2e-5, atol=1e-5)
    touched = as_dense(step, step.settled(state).params)
    assert_close(touched, copied(expected), atol=1e-5)


def tied(params: Any, batch: Any) -> Any:
    """One table is looked up, and is the last layer too."""
    state = params["table"][batch["ids"][:, 0]] @ params["kernel"]
    return -jax.nn.log_softmax(state @ params["table"].T)[:, 0].mean()


def chained(params: Any, batch: Any) -> Any:
    """The ids of one table depend on rows of another."""
    scores = params["table"][batch["ids"][:, 0]] @ params["kernel"]
    return (params["other"][jnp.argmax(scores, -1)] ** 2).mean()
