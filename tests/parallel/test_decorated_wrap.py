"""`TrainStep.wrap`: functions that read the state of a decorated step, as it lies."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import braidax.parallel as bx
from braidax.errors import ArgumentError, StateError
from braidax.program import collectives_of
from tests.support.parallel.models import copied, make_mesh

ROWS, WIDTH, LENGTH = 408, 16, 4
SHARDED = bx.FullySharded(min_bytes=0)
OPTIMIZER = optax.sgd(1e-2, momentum=0.9)  # rows that lag behind are brought up by less of a program than Adam's


def logits_of(params: Any, ids: jax.Array) -> jax.Array:
    x = params["table"][ids]
    x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, params["layers"])
    return x @ params["head"]


def train_step(state: Any, batch: Any) -> Any:
    def loss(params: Any) -> jax.Array:
        logits = logits_of(params, batch["ids"])
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], batch["ids"][:, 1:]).mean()

    value, gradients = jax.value_and_grad(loss)(state["params"])
    updates, opt_state = OPTIMIZER.update(gradients, state["opt_state"])
    params = optax.apply_updates(state["params"], updates)
    average = optax.incremental_update(params, state["average"], 0.5)
    return {"params": params, "average": average, "opt_state": opt_state}, {"loss": value}


def begin() -> Any:
    return _begun(jax.random.key(0))


@jax.jit
def _begun(key: jax.Array) -> Any:
    keys = jax.random.split(key, 3)
    layers = jax.random.normal(keys[1], (3, WIDTH, WIDTH)) / 4
    params = {
        "table": jax.random.normal(keys[0], (ROWS, WIDTH)),
        "layers": layers,
        "head": jax.random.normal(keys[2], (WIDTH, ROWS)),
    }
    return {"params": params, "average": params, "opt_state": OPTIMIZER.init(params)}


def predict(state: Any, batch: Any) -> Any:
    """Of the average, whose leaves follow the weights."""
    logits = logits_of(state["average"], batch["ids"])
    return {"top": logits[:, -1].argmax(-1), "by position": jnp.moveaxis(logits, 0, 1), "mean": logits.mean()}


def generate(state: Any, batch: Any) -> jax.Array:
    """Tokens, of which each depends on those before: ids that are computed from weights."""

    def step(ids: jax.Array, _: Any) -> Any:
        new = logits_of(state["params"], ids)[:, -1].argmax(-1).astype(jnp.int32)
        return jnp.concatenate([ids[:, 1:], new[:, None]], 1), new

    return jax.lax.scan(step, batch["ids"], None, 5)[1].T


def samples(seed: int, size: int = 16) -> dict[str, np.ndarray]:
    return {"ids": np.random.default_rng(seed).integers(0, ROWS, (size, LENGTH)).astype(np.int32)}


@pytest.mark.parametrize(
    "strategies",
    [
        pytest.param({"data": SHARDED, "model": SHARDED}, marks=pytest.mark.slow),
        {"data": bx.Hybrid(dense=SHARDED, overrides={"state/params/table": bx.Rows()}), "model": bx.TensorParallel()},
    ],
    ids=["gathered", "rows"],
)
def test_it_computes_what_one_device_computes_and_makes_nothing_whole(strategies: Any) -> None:
    step = bx.parallelize(make_mesh(), strategies)(train_step)
    state, _ = step(begin(), samples(0))
    whole, wrapped = copied(state), step.wrap(predict)
    found = wrapped(state, samples(3, 32))
    expected = jax.jit(predict)(whole, samples(3, 32))
    for got, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-4, atol=2e-5)
    axes = ("data", "model") if strategies["data"] is SHARDED else ("data",)
    specs = {name: jax.P(*leaf.sharding.spec) for name, leaf in found.items()}
    assert specs == {"top": jax.P(axes), "by position": jax.P(None, axes), "mean": jax.P()}
    text = wrapped.lower(state, samples(3, 32)).compile().as_text() or ""
    gathered = [one for one in collectives_of(text) if one.kind == "all-gather" and one.sent_bytes > ROWS * WIDTH * 4]
    assert not gathered
    np.testing.assert_array_equal(step.wrap(generate)(state, samples(4)), jax.jit(generate)(whole, samples(4)))
    step(state, samples(1))  # the state was not given up
    with pytest.raises(ArgumentError, match=r"state/params/table \[8, 16\] was given to predict, and the state of tr"):
        wrapped({"params": {"table": jnp.ones((8, WIDTH))}}, samples(3))


def test_a_function_of_the_state_alone_is_an_export() -> None:
    step = bx.parallelize(make_mesh("8 auto"), {"data": SHARDED})(train_step)
    state, _ = step(begin(), samples(0))
    found = step.wrap(lambda state: jax.tree.map(lambda x: x.astype(jnp.bfloat16), state["params"]))(state)
    assert found["head"].dtype == jnp.bfloat16
    assert found["head"].sharding.is_fully_replicated


def test_modules_are_read_by_the_names_of_the_step() -> None:
    model = nnx.Sequential(nnx.Linear(16, 32, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1)))
    optimizer = nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)

    @bx.parallelize(make_mesh("8 auto"), {"data": SHARDED})
    def step(model: Any, optimizer: Any, batch: Any) -> Any:
        value, gradients = nnx.value_and_grad(lambda model: (model(batch["x"]) ** 2).mean())(model)
        optimizer.update(model, gradients)
        return value

    batch = {"x": np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)}
    step(model, optimizer, batch)
    wrapped = step.wrap(lambda model, batch: model(batch["x"]))
    with pytest.raises(StateError, match=r"was changed by <lambda>, which reads the state, .* model\.eval"):
        wrapped(model, batch)
    model.eval()
    found = wrapped(model, batch)
    np.testing.assert_allclose(found, model(jnp.asarray(batch["x"])), rtol=1e-5, atol=1e-6)
    assert found.sharding.spec == jax.P(("data",))


def test_named_parameters_are_read_by_their_names() -> None:
    model = eqx.nn.MLP(16, 8, 32, 1, key=jax.random.key(0))
    opt_state = OPTIMIZER.init(eqx.filter(model, eqx.is_array))

    @bx.parallelize(make_mesh("8 auto"), {"data": SHARDED}, batch=("x",))
    def make_step(model: Any, opt_state: Any, x: Any) -> Any:
        value, gradients = eqx.filter_value_and_grad(lambda model: (jax.vmap(model)(x) ** 2).mean())(model)
        updates, opt_state = OPTIMIZER.update(gradients, opt_state, model)
        return eqx.apply_updates(model, updates), opt_state, value

    x = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)
    model, opt_state, _ = make_step(model, opt_state, x)
    found = make_step.wrap(lambda x, model: jax.vmap(model)(x))(x, model)
    np.testing.assert_allclose(found, jax.vmap(model)(x), rtol=1e-5, atol=1e-6)
    with pytest.raises(ArgumentError, match=r"was called with 1 arguments \(y\), none of which is state of make_step"):
        make_step.wrap(lambda y: y)(x)


def test_a_step_that_was_never_called_has_no_state_to_read() -> None:
    step = bx.parallelize(make_mesh("8 auto"), {"data": SHARDED})(train_step)
    with pytest.raises(StateError, match="train_step has no plan before it knows its state"):
        step.wrap(predict)(begin(), samples(0))
