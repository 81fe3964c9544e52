"""Decorated steps with sharded weights: the numbers of one device, and no more bytes than a loss and an optimizer."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import braidax.parallel as bx
from braidax.errors import ArgumentError
from braidax.program import collectives_of, total_sent
from tests.parallel.dense.models import MODELS, Model
from tests.parallel.models import assert_close, copied, make_mesh, specs

ALL = bx.FullySharded(min_bytes=0)
SLOW = pytest.mark.slow
STRATEGIES: dict[str, Any] = {
    "data parallel": {"data": bx.DataParallel()},
    "hybrid": {"data": bx.Hybrid()},
    "one axis": {"data": ALL},
    "hybrid sharding": {"data": bx.DataParallel(), "model": ALL},
    "two axes": {"data": ALL, "model": ALL},
    "beside hybrid": {"data": bx.Hybrid(dense=ALL)},
}
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))


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
    params = model.init(jax.random.key(3))
    return {"params": params, "average": params, "opt_state": optimizer.init(params), "key": jax.random.key(4)}


def assert_as_on_one_device(step: Any, train_step: Any, state: Any, batches: list[Any], *, atol: float = 1e-5) -> Any:
    alone, on_one = state, jax.jit(train_step)
    for batch in batches:
        state, found = step(state, batch)
        alone, expected = on_one(alone, jax.tree.map(jnp.asarray, batch))
        assert_close(copied(found), copied(expected), atol=atol)
    assert_close(copied(state), copied(alone), atol=atol)
    return state


@pytest.mark.parametrize(
    ("model", "mesh", "strategies"),
    [
        ("mlp", "8 explicit", "data parallel"),
        ("mlp", "8 auto", "beside hybrid"),
        ("mlp", "4x2 explicit", "hybrid sharding"),
        pytest.param("gpt", "8 explicit", "data parallel", marks=SLOW),
        pytest.param("gpt", "8 explicit", "hybrid", marks=SLOW),
        ("gpt", "8 explicit", "one axis"),
        pytest.param("gpt", "4x2 auto", "hybrid sharding", marks=SLOW),
        pytest.param("gpt", "4x2 explicit", "two axes", marks=SLOW),
        pytest.param("lstm", "8 explicit", "data parallel", marks=SLOW),
        pytest.param("lstm", "8 explicit", "hybrid", marks=SLOW),
        ("lstm", "8 explicit", "one axis"),
        pytest.param("lstm", "4x2 explicit", "hybrid sharding", marks=SLOW),
    ],
)
def test_it_trains_as_on_one_device(model: str, mesh: str, strategies: str) -> None:
    train_step = whole_step(MODELS[model])
    step = bx.parallelize(make_mesh(mesh), STRATEGIES[strategies])(train_step)
    batches = [MODELS[model].batch(seed) for seed in range(4)]
    assert_as_on_one_device(step, train_step, begin(MODELS[model]), batches)


def _sent(step: Any) -> float:
    """The bytes that a device sends in an update."""
    return sum(sum(total_sent(collectives_of(one.compile().as_text() or "")).values()) for one in step.lower())


@pytest.mark.parametrize("name", ["gpt", pytest.param("lstm", marks=SLOW), pytest.param("mlp", marks=SLOW)])
def test_it_sends_what_a_loss_and_an_optimizer_send(name: str) -> None:
    model, mesh = MODELS[name], make_mesh("8 auto")
    batch = specs(model.batch(0))
    given = bx.parallelize(model.loss, OPTIMIZER, mesh, {"data": ALL}, init=model.init, batch=batch)
    step = bx.parallelize(mesh, {"data": ALL})(whole_step(model))
    step.prepare(jax.eval_shape(lambda: begin(model)), batch)
    assert 10_000 < _sent(step) <= 1.02 * _sent(given)


def test_a_device_has_its_part_of_weights_and_of_all_that_follows_them() -> None:
    step = bx.parallelize(make_mesh("8 auto"), {"data": ALL})(whole_step(MODELS["gpt"]))
    state, _ = step(begin(MODELS["gpt"]), MODELS["gpt"].batch(0))
    for leaf in jax.tree.leaves((state["params"], state["average"], state["opt_state"][1][0][1:])):
        (shard, *_) = leaf.addressable_shards
        assert shard.data.size * 8 == leaf.size, leaf.shape
    why = {one.path: one.why for one in step.plan.variables}
    assert why["state/opt_state/1/0/mu/layers/up"] == "follows state/params/layers/up"
    assert why["state/average/embedding"] == "follows state/params/embedding"
    assert why["state/key"] == "no gradient is taken by it as it stands in the state"
    assert why["state/opt_state/1/0/count"] == "no gradient uses it"
    assert step.state_shardings["params"]["embedding"] == state["params"]["embedding"].sharding


def test_a_dim_that_no_axis_divides_cannot_be_asked_for() -> None:
    path = "state/params/dense/1/b"
    step = bx.parallelize(make_mesh("8 auto"), {"data": bx.FullySharded({path: bx.Gathered(0)})})(
        whole_step(MODELS["mlp"])
    )
    with pytest.raises(ArgumentError, match=r"dense/1/b \[33\] would be padded, and the state of a decorated"):
        step(begin(MODELS["mlp"]), MODELS["mlp"].batch(0))
