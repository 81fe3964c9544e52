"""Losses and batches that the tests of `parallel` share, and the single-device step that says what is right."""

import contextlib
import functools
from collections.abc import Generator, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh

import braidax.parallel as bx

BATCH = 16
MESHES: dict[str, tuple[tuple[int, ...], AxisType]] = {
    "8 explicit": ((8,), AxisType.Explicit),
    "8 auto": ((8,), AxisType.Auto),
    "4x2 explicit": ((4, 2), AxisType.Explicit),
    "4x2 auto": ((4, 2), AxisType.Auto),
}
# One mesh of each shape and of each kind; dropout is compared on all, and the others train nightly.
ON_MESHES = [
    name if name in ("8 explicit", "4x2 auto") else pytest.param(name, marks=pytest.mark.slow) for name in MESHES
]


def make_mesh(name: str = "4x2 explicit") -> Mesh:
    shape, kind = MESHES[name]
    return jax.make_mesh(shape, ("data", "model")[: len(shape)], axis_types=(kind,) * len(shape))


def make_batch(seed: int = 0, size: int = BATCH) -> dict[str, np.ndarray]:
    """Token ids, targets, and a mask that keeps another number of samples on each device."""
    random = np.random.default_rng(seed)
    return {
        "ids": random.integers(0, 10, (size, 5)).astype(np.int32),
        "target": random.normal(size=size).astype(np.float32),
        "mask": (np.arange(size) % 3 == 0) | (np.arange(size) < 3),
    }


def init(key: jax.Array) -> dict[str, jax.Array]:
    first, second = jax.random.split(key)
    return {"embedding": jax.random.normal(first, (10, 6)), "weight": jax.random.normal(second, (6, 3))}


def masked_loss(params: Any, batch: Any, key: jax.Array) -> Any:
    """Gather, vmap, dropout, a masked mean: what breaks when a loss sees its own device's samples only."""
    hidden = jnp.take(params["embedding"], batch["ids"], axis=0).mean(1)
    hidden = jax.vmap(lambda row: jnp.tanh(row @ params["weight"]))(hidden)
    hidden = hidden * jax.random.bernoulli(key, 0.8, hidden.shape)
    losses = (hidden.sum(-1) - batch["target"]) ** 2
    return (losses * batch["mask"]).sum() / batch["mask"].sum(), {"hidden": hidden.mean(), "kept": batch["mask"].sum()}


def specs(batch: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), batch)


def copied(tree: Any) -> Any:
    """The PyTree as NumPy arrays that alias nothing; keys as their data."""
    return jax.tree.map(lambda leaf: np.array(jax.random.key_data(leaf) if is_key(leaf) else leaf), tree)


def on_one_device(tree: Any) -> Any:
    """The PyTree as new arrays on the first device, aliasing nothing."""

    def move(leaf: Any) -> jax.Array:
        if is_key(leaf):
            return jax.random.wrap_key_data(jax.device_put(np.array(jax.random.key_data(leaf))))
        return jax.device_put(np.array(leaf))

    return jax.tree.map(move, tree)


def is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


@functools.lru_cache(maxsize=32)
def _step(loss: Any, optimizer: optax.GradientTransformation) -> Any:
    """Compiled once for all tests of a loss."""

    @jax.jit
    def step(params: Any, variables: Any, opt_state: Any, key: Any, batch: Any) -> Any:
        (value, (metrics, variables)), gradients = jax.value_and_grad(loss, has_aux=True)(params, variables, key, batch)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), variables, opt_state, {"loss": value, **metrics}

    return step


def single_device(
    loss: Any, optimizer: optax.GradientTransformation, state: bx.State, batches: list[Any], *, then: Any = None
) -> Any:
    """Parameters, variables and metrics after plain JAX on one device; `loss(params, variables, key, batch)`.

    **Arguments:** `then`: a batch whose metrics behind all updates are told as well; it trains nothing.
    """
    step = _step(loss, optimizer)
    key, (params, variables, opt_state) = on_one_device((state.key, (state.params, state.variables, state.opt_state)))
    metrics: list[Any] = []
    for index, batch in enumerate(batches):
        params, variables, opt_state, metric = step(
            params, variables, opt_state, jax.random.fold_in(key, index), jax.tree.map(np.array, batch)
        )
        metrics.append(metric)
    if then is not None:
        own = jax.random.fold_in(key, len(batches))
        metrics.append(step(params, variables, opt_state, own, jax.tree.map(np.array, then))[-1])
    return params, variables, metrics


def assert_close(got: Any, expected: Any, *, atol: float = 2e-6) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=atol, err_msg=jax.tree_util.keystr(path))


@contextlib.contextmanager
def recorded_events() -> Iterator[list[str]]:
    """What JAX reports inside the block: traces and compilations among other things."""
    events: list[str] = []

    def listen(event: str, seconds: float, **_: Any) -> None:
        events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@contextlib.contextmanager
def refused(error: type[Exception], words: str) -> Generator[None]:
    """What is inside the block is refused, in these words, before anything is compiled."""
    with recorded_events() as events, pytest.raises(error, match=words):
        yield
    assert [event for event in events if "backend_compile" in event] == []
