"""`Step.wrap`: functions of parameters and a batch on states as they lie."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braidax.parallel as bx
from braidax.errors import ArgumentError, DataError, SpecError
from braidax.program import collectives_of
from tests.support.parallel.models import copied, make_mesh

ROWS, WIDTH, LENGTH = 403, 16, 4
BATCH = {"ids": jax.ShapeDtypeStruct((16, LENGTH), jnp.int32)}
SHARDED = bx.FullySharded(min_bytes=0)
STRATEGIES: dict[str, Any] = {
    "whole": {"data": bx.DataParallel()},
    "gathered": {"data": SHARDED, "model": SHARDED},
    "rows": {"data": bx.Hybrid(dense=SHARDED, out_of_range="raise")},
}


def init(key: jax.Array) -> Any:
    keys = jax.random.split(key, 3)
    layers = jax.random.normal(keys[1], (3, WIDTH, WIDTH)) / 4
    head = jax.random.normal(keys[2], (WIDTH, ROWS))
    params = {"table": jax.random.normal(keys[0], (ROWS, WIDTH)), "layers": layers, "head": head}
    return params, {"shift": jnp.full((WIDTH,), 0.5)}


def logits_of(params: Any, ids: jax.Array, shift: Any) -> jax.Array:
    x = params["table"][ids] + shift
    x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, params["layers"])
    return x @ params["head"]


def loss(params: Any, batch: Any, variables: Any) -> Any:
    logits = logits_of(params, batch["ids"], variables["shift"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], batch["ids"][:, 1:])
    return losses.mean(), {"variables": variables}


def predict(params: Any, batch: Any, variables: Any, train: bool) -> Any:
    assert not train
    logits = logits_of(params, batch["ids"], variables["shift"])
    top = logits[:, -1].argmax(-1)
    return {"top": (top, logits.max(2)), "by position": jnp.moveaxis(logits, 0, 1), "mean": logits.mean(), "count": 7}


def generate(params: Any, batch: Any, variables: Any) -> jax.Array:
    """Samples tokens, of which each depends on those before."""

    def step(carry: Any, _: Any) -> Any:
        ids, keys = carry
        logits = logits_of(params, ids, variables["shift"])[:, -1]
        keys = jax.vmap(lambda key: jax.random.fold_in(key, 1))(keys)
        new = jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)
        return (jnp.concatenate([ids[:, 1:], new[:, None]], 1), keys), new

    return jax.lax.scan(step, (batch["ids"], batch["key"]), None, 5)[1].T


def samples(seed: int, size: int = 16) -> dict[str, np.ndarray]:
    return {"ids": np.random.default_rng(seed).integers(0, ROWS, (size, LENGTH)).astype(np.int32)}


@functools.cache
def step_by(name: str) -> bx.Step:
    # Rows lag behind: they are caught up with where they are read, by less of a program than Adam's.
    optimizer = optax.sgd(1e-2, momentum=0.9)
    return bx.parallelize(loss, optimizer, make_mesh(), STRATEGIES[name], init=init, batch=BATCH)


def made(name: str) -> tuple[bx.Step, bx.State]:
    step = step_by(name)
    state = step.init(jax.random.key(0))
    return step, step.update(state, samples(0))[0]


@pytest.mark.parametrize("name", ["whole", pytest.param("gathered", marks=pytest.mark.slow), "rows"])
def test_it_computes_what_one_device_computes_and_leaves_it_split(name: str) -> None:
    step, state = made(name)
    whole = copied(step.to_dense(state).params)
    form = {"ids": jax.ShapeDtypeStruct((32, LENGTH), jnp.int32)}
    wrapped = step.wrap(predict, batch=form)
    found = wrapped(state, samples(3, 32))
    on_one = jax.jit(predict, static_argnums=3)
    expected = on_one(whole, samples(3, 32), {"shift": np.full(WIDTH, 0.5, np.float32)}, False)
    for got, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-4, atol=2e-5)
    axes = ("data", "model") if name == "gathered" else ("data",)
    specs = {"top": [jax.P(axes)] * 2, "by position": jax.P(None, axes), "mean": jax.P(), "count": jax.P()}
    shardings = jax.tree.map(lambda leaf: jax.P(*(one if one is None else axes for one in leaf.sharding.spec)), found)
    assert {**shardings, "top": list(shardings["top"])} == specs
    largest = max((one.sent_bytes for one in collectives_of(wrapped.lower().compile().as_text())), default=0)
    assert largest <= (16 if name == "whole" else WIDTH * ROWS * 4)
    assert step.update(state, samples(1))[1]["loss"] > 0  # the state was not given up


@pytest.mark.parametrize("name", [pytest.param("gathered", marks=pytest.mark.slow), "rows"])
def test_it_generates(name: str) -> None:
    step, state = made(name)
    batch = {**samples(2, 8), "key": jax.random.split(jax.random.key(5), 8)}
    found = step.wrap(generate, batch=batch)(state, batch)
    whole = copied(step.to_dense(state).params)
    expected = jax.jit(generate)(whole, batch, {"shift": jnp.full((WIDTH,), 0.5)})
    np.testing.assert_array_equal(found, expected)
    assert not found.sharding.is_fully_replicated


def test_ids_that_no_row_has_are_told() -> None:
    step, state = made("rows")
    wrapped = step.wrap(predict)
    wrong = samples(4)
    wrong["ids"][0, 0] = ROWS + 5
    wrapped(state, wrong)
    with pytest.raises(DataError, match=r"the batch of predict behind update . of this step has ids out of range: 1"):
        for _ in range(4):
            wrapped(state, samples(4))


def test_the_key_is_that_of_the_step() -> None:
    step, state = made("whole")
    wrapped = step.wrap(lambda params, batch, key: jax.random.normal(key, (3,)))
    np.testing.assert_array_equal(wrapped(state, samples(0)), jax.random.normal(jax.random.fold_in(state.key, 1), (3,)))
    other = step.init(jax.random.key(0, impl="rbg"))
    assert wrapped(other, samples(0)).shape == (3,)


def test_what_does_not_fit_is_said() -> None:
    step, state = made("whole")
    with pytest.raises(SpecError, match="batch/ids has 6 samples, which do not divide among the 4 devices"):
        step.wrap(predict, batch={"ids": jax.ShapeDtypeStruct((6, LENGTH), jnp.int32)})
    with pytest.raises(ArgumentError, match=r"batch/ids is int32\[8, 4\], expected int32\[16, 4\]: give Step.wrap"):
        step.wrap(predict)(state, samples(0, 8))
    with pytest.raises(ArgumentError, match="fn <lambda> asks for the parameter 'temperature', expected any of"):
        step.wrap(lambda params, batch, temperature: params)
    with pytest.raises(ArgumentError, match="fn <lambda> returned None, expected a PyTree of arrays"):
        step.wrap(lambda params, batch: None)
    with pytest.raises(ArgumentError, match=r"fn <lambda> returned result/0 = 'a', expected an array"):
        step.wrap(lambda params, batch: ["a"])


def test_parameters_that_go_around_a_ring_are_exported() -> None:
    """What is a result as it stands has no line of code that uses it."""
    batch = {"x": jax.ShapeDtypeStruct((8, 8), jnp.float32)}
    ring: Any = {"data": bx.RotatedTensorParallel(min_bytes=0)}

    def product(params: Any, batch: Any) -> Any:
        return (batch["x"] @ params["w"]).sum()

    step = bx.parallelize(product, optax.sgd(0.1), make_mesh(), ring, init=lambda key: {"w": jnp.eye(8)}, batch=batch)
    found = step.wrap(lambda params, batch: params)(step.init(jax.random.key(0)), {"x": np.ones((8, 8), np.float32)})
    np.testing.assert_array_equal(found["w"], np.eye(8))
