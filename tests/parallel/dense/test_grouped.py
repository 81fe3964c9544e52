"""Convolutions: by groups of channels with the gradient of one device, and split along their channels."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braidax.parallel as bx
from braidax.parallel.plan.strategy import in_words
from braidax.program import collectives_of
from tests.support.parallel.dense.models import BATCH, Model
from tests.support.parallel.dense.steps import ALL
from tests.support.parallel.models import assert_close, copied, make_mesh, on_one_device, specs

SIZE, CHANNELS, HIDDEN = 8, 16, 32


def convolved(x: jax.Array, kernel: jax.Array) -> jax.Array:
    numbers, groups = ("NHWC", "HWIO", "NHWC"), x.shape[-1] // kernel.shape[2]
    made = jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=groups
    )
    return (made - made.mean((0, 1, 2))) * jax.lax.rsqrt(made.var((0, 1, 2)) + 1e-3)


def _by_depth(params: Any, batch: Any) -> jax.Array:
    """Blocks of MobileNet, in a loop and behind it."""

    def block(x: jax.Array, w: Any) -> Any:
        hidden = jax.nn.relu(convolved(jax.nn.relu(convolved(x, w["up"])), w["depth"]))
        return x + convolved(hidden, w["down"]), None

    x, _ = jax.lax.scan(jax.checkpoint(block), convolved(batch["image"], params["stem"]), params["blocks"])
    x, _ = block(x, jax.tree.map(lambda leaf: leaf[0], params["blocks"]))
    return (x * jnp.arange(CHANNELS)).mean() + (x**3).mean()


def _basic(params: Any, batch: Any) -> jax.Array:
    """A block of ResNet, and of it with statistics by groups of channels; pooling."""
    x = convolved(batch["image"], params["stem"])
    for w in params["blocks"]:
        hidden = convolved(x, w["up"]).reshape(*x.shape[:3], 8, -1)
        hidden = hidden * jax.lax.rsqrt(1e-3 + (hidden**2).mean((1, 2, 4), keepdims=True))
        hidden = jax.nn.relu(hidden.reshape(*x.shape[:3], -1) * w["scale"])
        window = ((1, 3, 3, 1), (1, 1, 1, 1), "SAME")
        hidden = jax.lax.reduce_window(hidden, -jnp.inf, jax.lax.max, *window)
        hidden = jax.lax.reduce_window(hidden, 0.0, jax.lax.add, *window)
        x = jax.nn.relu(x + convolved(hidden, w["down"]))
    return (x * jnp.arange(CHANNELS)).mean() + (x**3).mean()


def _init_by_depth(key: jax.Array) -> Any:
    shapes = {"up": (1, 1, CHANNELS, HIDDEN), "depth": (3, 3, 1, HIDDEN), "down": (1, 1, HIDDEN, CHANNELS)}
    blocks = {name: jax.random.normal(key, (2, *shape)) for name, shape in shapes.items()}
    return {"stem": jax.random.normal(key, (3, 3, 3, CHANNELS)), "blocks": blocks}


def _init_basic(key: jax.Array) -> Any:
    up, down = (jax.random.normal(key, shape) for shape in ((3, 3, CHANNELS, HIDDEN), (3, 3, HIDDEN, CHANNELS)))
    blocks = [
        {"up": up, "scale": jnp.ones(HIDDEN), "down": down},
        {"up": up + 1, "scale": jnp.ones(HIDDEN), "down": down},
    ]
    return {"stem": jax.random.normal(key, (3, 3, 3, CHANNELS)), "blocks": blocks}


def _images(seed: int) -> Any:
    return {"image": np.random.default_rng(seed).normal(size=(BATCH, SIZE, SIZE, 3)).astype(np.float32)}


def make_step(model: Model, strategies: Any) -> bx.Step:
    batch = specs(model.batch(0))
    return bx.parallelize(model.loss, optax.sgd(1.0), make_mesh("4x2 auto"), strategies, init=model.init, batch=batch)


def assert_right(step: bx.Step, model: Model) -> None:
    """One update is the gradient of one device."""
    state = step.init(jax.random.key(0))
    before, batch = on_one_device(step.to_dense(state).params), model.batch(0)
    expected = jax.tree.map(jnp.subtract, before, jax.jit(jax.grad(model.loss))(before, batch))
    state, _ = step.update(state, batch)
    assert_close(copied(step.to_dense(state).params), copied(expected), atol=5e-5)


@pytest.mark.parametrize(
    "strategies",
    [
        {"data": bx.DataParallel()},
        pytest.param({"data": ALL, "model": bx.TensorParallel(min_bytes=0)}, marks=pytest.mark.slow),
        pytest.param({"model": ALL}, marks=pytest.mark.slow),
        pytest.param({"data": ALL, "model": bx.DataParallel()}, marks=pytest.mark.slow),
    ],
)
def test_kernels_of_groups_have_the_gradient_of_one_device(strategies: Any) -> None:
    """XLA alone gives one that is as many times too large as devices have the same samples."""
    model = Model(_by_depth, _init_by_depth, _images)
    assert_right(make_step(model, strategies), model)


def test_convolutions_are_split_along_their_hidden_channels() -> None:
    """Devices sum the images behind a block and their gradients before it, and nothing else."""
    model = Model(_basic, _init_basic, _images)
    step = make_step(model, {"data": bx.DataParallel(), "model": bx.TensorParallel(min_bytes=0)})
    placed = {one.path.removeprefix("params/blocks/0/"): str(one.placements[1]) for one in step.plan.variables}
    assert (placed["up"], placed["scale"], placed["down"]) == ("split, dim 3", "split, dim 0", "split, dim 2")
    image = BATCH // 4 * SIZE**2 * CHANNELS * 4
    (why,) = (one.why for one in step.plan.variables if one.path == "params/blocks/0/up")
    assert f"dim 3 split; a device sends {in_words(2 * image * 2 * 1 / 2)} a step for 3 of them" in why
    found = collectives_of(step.lower().gradients.compile().as_text() or "")
    assert [(one.kind, one.result_bytes) for one in found if one.group_size == 2] == [("all-reduce", image)] * 4
    assert_right(step, model)
