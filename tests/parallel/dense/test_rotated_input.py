"""What rings are given that is no plain weight: it works, with the numbers of one device, or is an exact error."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braidax.parallel as bx
from braidax.errors import ArgumentError
from tests.support.parallel.models import assert_close, copied, on_one_device, refused

WIDTH, HIDDEN = 16, 64
OPTIMIZER = optax.sgd(0.1, momentum=0.9)
TRAINED = ("up", "down", "summed")


def ring(**overrides: bx.Placement) -> bx.RotatedTensorParallel:
    return bx.RotatedTensorParallel({f"*/{name}": one for name, one in overrides.items()}, min_bytes=0)


FULLY = bx.FullySharded(min_bytes=0)


def init(key: jax.Array) -> Any:
    """Weights in int8 that stay as they are, ids, and a weight that no product uses as it is."""
    first, second, third, fourth = jax.random.split(key, 4)
    return {
        "base": (20 * jax.random.normal(first, (WIDTH, HIDDEN))).astype(jnp.int8),
        "up": jax.random.normal(second, (WIDTH, HIDDEN)) / 4,
        "down": jax.random.normal(third, (HIDDEN, WIDTH)) / 8,
        "summed": jax.random.normal(fourth, (WIDTH, WIDTH)) / 8,
        "ids": jnp.arange(WIDTH, dtype=jnp.int32)[::-1],
    }


def loss(params: Any, batch: Any) -> jax.Array:
    x = batch["x"] @ jnp.cumsum(params["summed"], 0)
    x = jnp.tanh(x @ (params["up"] + params["base"].astype(jnp.float32) / 100)) @ params["down"]
    return ((x[:, params["ids"]] - params["ids"] / 16) ** 2).mean()


def samples(seed: int) -> Any:
    return {"x": np.random.default_rng(seed).normal(size=(16, WIDTH)).astype(np.float32)}


def make(shape: tuple[int, ...], strategies: Any, **options: Any) -> bx.Step:
    mesh = jax.make_mesh(shape, ("data", "model")[: len(shape)], devices=jax.devices()[: int(np.prod(shape))])
    options = {"trainable": [f"params/{name}" for name in TRAINED], **options}
    batch = {"x": jax.ShapeDtypeStruct((16, WIDTH), jnp.float32)}
    return bx.parallelize(loss, OPTIMIZER, mesh, strategies, init=init, batch=batch, **options)


@pytest.mark.parametrize(
    ("shape", "strategies", "placed"),
    [
        (
            (8,),
            {"data": ring()},
            {"up": bx.Rotated(1), "down": bx.Rotated(0), "base": bx.Rotated(1), "summed": bx.Gathered(0)},
        ),
        ((8, 1), {"data": FULLY, "model": ring(up=bx.Rotated(1))}, {"up": bx.Rotated(1), "down": bx.Replicated()}),
        pytest.param(
            (8,),
            {"data": ring(up=bx.Split(1), base=bx.Rotated(0), ids=bx.Rotated(0), summed=bx.Rotated(0))},
            {"up": bx.Split(1), "base": bx.Rotated(0), "ids": bx.Rotated(0), "summed": bx.Rotated(0)},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            (4, 2),
            {"data": ring(), "model": bx.TensorParallel(min_bytes=0)},
            {"up": bx.Split(1), "down": bx.Split(0), "base": bx.Split(1)},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["integers and sums", "one device by hand", "split on the axis of the ring", "split on another axis"],
)
def test_what_is_no_plain_weight(shape: tuple[int, ...], strategies: Any, placed: dict[str, bx.Placement]) -> None:
    step = make(shape, strategies)
    found = {one.path.removeprefix("params/"): one for one in step.plan.variables}
    assert {name: found[name].placements[-1] for name in placed} == placed
    if placed.get("summed") == bx.Gathered(0):
        assert re.search(
            r"no product uses it at test_rotated_input\.py:\d+, but cumsum: gathered where it is", found["summed"].why
        )
    state = step.init(jax.random.key(0))
    params: Any = on_one_device(step.to_dense(state).params)
    fixed = {name: params.pop(name) for name in ("base", "ids")}
    kept = OPTIMIZER.init(params)

    @jax.jit
    def update(params: Any, kept: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(lambda some: loss({**some, **fixed}, batch))(params)
        updates, kept = OPTIMIZER.update(gradients, kept)
        return optax.apply_updates(params, updates), kept, value

    for seed in range(3):
        state, metrics = step.update(state, samples(seed))
        params, kept, value = update(params, kept, samples(seed))
        np.testing.assert_allclose(metrics["loss"], value, rtol=2e-5)
    assert_close(copied(step.to_dense(state).params), copied({**params, **fixed}), atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "strategies", "options", "words"),
    [
        (
            (8,),
            {"data": ring()},
            {"trainable": None},
            "params/base is int8, expected floating point, .*out of trainable=",
        ),
        (
            (4, 2),
            {"data": ring(up=bx.Rotated(1)), "model": bx.TensorParallel({"*/up": bx.Split(1)}, min_bytes=0)},
            {},
            r"up cannot be placed by Rotated\(dim=1.*by rows, split, or goes around .*: give it Gathered\(dim\) on one",
        ),
        (
            (8,),
            {"data": bx.Hybrid({"*/summed": bx.Rows()}, dense=ring())},
            {},
            "asks for the rows of params/summed, and these cannot be exchanged: used whole by cumsum",
        ),
        ((8,), {"data": ring(nothing=bx.Rotated(0))}, {}, r"overrides\['\*/nothing'\] names no variable"),
    ],
)
def test_what_cannot_be(shape: tuple[int, ...], strategies: Any, options: Any, words: str) -> None:
    with refused(ArgumentError, words):
        make(shape, strategies, **options)
