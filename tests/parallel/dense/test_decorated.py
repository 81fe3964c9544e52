"""Decorated steps with sharded weights: the numbers of one device, and no more bytes than a loss and an optimizer."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braidax.parallel as bx
from braidax.errors import ArgumentError
from braidax.program import collectives_of, total_sent
from tests.support.parallel.dense.decorated import OPTIMIZER, assert_as_on_one_device, begin, whole_step
from tests.support.parallel.dense.models import MODELS
from tests.support.parallel.models import make_mesh, specs

ALL = bx.FullySharded(min_bytes=0)
SLOW = pytest.mark.slow
STRATEGIES: dict[str, Any] = {
    "data parallel": {"data": bx.DataParallel()},
    "hybrid": {"data": bx.Hybrid()},
    "one axis": {"data": ALL},
    "hybrid sharding": {"data": bx.DataParallel(), "model": ALL},
    "two axes": {"data": ALL, "model": ALL},
    "tensor": {"data": bx.DataParallel(), "model": bx.TensorParallel(min_bytes=0)},
    "tensor, sharded": {"data": ALL, "model": bx.TensorParallel(min_bytes=0)},
    "beside hybrid": {"data": bx.Hybrid(dense=ALL)},
}


@functools.cache
def made(model: str, mesh: str, strategies: str) -> Any:
    """A step that several tests train by: it keeps no state."""
    return bx.parallelize(make_mesh(mesh), STRATEGIES[strategies])(whole_step(MODELS[model]))


def test_what_vjp_pulls_back_is_a_gradient() -> None:
    model = MODELS["mlp"]

    def train_step(state: Any, batch: Any) -> Any:
        loss, pull = jax.vjp(lambda params: model.loss(params, batch, state["key"]), state["params"])
        (gradients,) = pull(jnp.ones_like(loss))
        params = jax.tree.map(lambda leaf, one: leaf - 0.1 * one, state["params"], gradients)
        return {"params": params, "key": state["key"]}, {"loss": loss}

    step = bx.parallelize(make_mesh("8 auto"), {"data": ALL})(train_step)
    state = {"params": jax.jit(model.init)(jax.random.key(3)), "key": jax.random.key(4)}
    assert_as_on_one_device(step, train_step, state, [model.batch(0), model.batch(1)])
    assert {one.path: str(one.placements[0]) for one in step.plan.variables}[
        "state/params/dense/0/w"
    ] == "gathered, dim 0"


@pytest.mark.parametrize(
    ("model", "mesh", "strategies"),
    [
        pytest.param("mlp", "8 explicit", "data parallel", marks=SLOW),
        pytest.param("mlp", "8 auto", "beside hybrid", marks=SLOW),
        pytest.param("mlp", "4x2 explicit", "hybrid sharding", marks=SLOW),  # test_decorated_wrap.py has two axes
        pytest.param("gpt", "8 explicit", "data parallel", marks=SLOW),
        pytest.param("gpt", "8 explicit", "hybrid", marks=SLOW),
        pytest.param("gpt", "8 auto", "one axis", marks=SLOW),  # test_rotated.py has its layers on a ring
        pytest.param("gpt", "8 explicit", "one axis", marks=SLOW),
        pytest.param("gpt", "4x2 auto", "hybrid sharding", marks=SLOW),
        pytest.param("gpt", "4x2 explicit", "two axes", marks=SLOW),
        pytest.param("gpt", "4x2 explicit", "tensor", marks=SLOW),
        pytest.param("gpt", "4x2 auto", "tensor, sharded", marks=SLOW),
        pytest.param("lstm", "8 explicit", "data parallel", marks=SLOW),
        pytest.param("lstm", "8 explicit", "hybrid", marks=SLOW),
        pytest.param("lstm", "8 explicit", "one axis", marks=SLOW),
        pytest.param("lstm", "4x2 explicit", "hybrid sharding", marks=SLOW),
    ],
)
def test_it_trains_as_on_one_device(model: str, mesh: str, strategies: str) -> None:
    train_step = whole_step(MODELS[model])
    step = made(model, mesh, strategies)
    batches = [MODELS[model].batch(seed) for seed in range(4)]
    assert_as_on_one_device(step, train_step, begin(MODELS[model]), batches)


def _sent(step: Any) -> float:
    """The bytes that a device sends in an update."""
    return sum(sum(total_sent(collectives_of(one.compile().as_text() or "")).values()) for one in step.lower())


@pytest.mark.parametrize(
    ("name", "strategies"),
    [
        ("gpt", "one axis"),
        pytest.param("gpt", "tensor", marks=SLOW),
        pytest.param("gpt", "tensor, sharded", marks=SLOW),
        pytest.param("lstm", "one axis", marks=SLOW),
        pytest.param("mlp", "hybrid sharding", marks=SLOW),
    ],
)
def test_it_sends_what_a_loss_and_an_optimizer_send(name: str, strategies: str) -> None:
    model, told = MODELS[name], STRATEGIES[strategies]
    mesh, batch = "8 auto" if len(told) == 1 else "4x2 auto", specs(model.batch(0))
    given = bx.parallelize(model.loss, OPTIMIZER, make_mesh(mesh), told, init=model.init, batch=batch)
    step = made(name, mesh, strategies)
    step.prepare(jax.eval_shape(lambda: begin(model)), batch)
    assert 10_000 < _sent(step) <= 1.02 * _sent(given)


def test_a_device_has_its_part_of_weights_and_of_all_that_follows_them() -> None:
    step = made("gpt", "8 auto", "one axis")
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
    plan = bx.parallelize(make_mesh("8 auto"), {"data": ALL})(whole_step(MODELS["mlp"])).prepare(
        jax.eval_shape(lambda: begin(MODELS["mlp"])), MODELS["mlp"].batch(0)
    )
    known = {one.path: one for one in plan.variables}
    why = "no dim of it is a multiple of 8 in each part (the state of a decorated step keeps its shapes)"
    assert why in known[path].why
    assert str(known["state/params/dense/1/w"].placements[0]) == "gathered, dim 0"  # of [64, 33]


def _adapted(params: Any, base: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ (base + params["a"] @ params["b"]))


def lora_step(state: Any, batch: Any) -> Any:
    def loss(adapter: Any) -> Any:
        hidden = _adapted(adapter, state["base"], batch["x"])
        return (hidden**2).mean() - hidden[:, 0].mean(), {"hidden": hidden}

    (value, aux), gradients = jax.value_and_grad(loss, has_aux=True)(state["adapter"])
    adapter = jax.tree.map(lambda leaf, gradient: leaf - 0.1 * gradient, state["adapter"], gradients)
    return {"adapter": adapter, "base": state["base"]}, {"loss": value, **aux}


def masters_step(state: Any, batch: Any) -> Any:
    """Computed in bfloat16, kept in float32; weights that are used twice; gradients scaled, and dropped if infinite."""
    small = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), state["params"])

    def loss(params: Any) -> jax.Array:
        hidden = jnp.tanh(batch["x"].astype(jnp.bfloat16) @ params["tied"]) @ params["tied"].T
        return state["scale"] * ((hidden - batch["x"]) ** 2).astype(jnp.float32).mean()

    value, gradients = jax.value_and_grad(loss)(small)
    gradients = jax.tree.map(lambda leaf: leaf.astype(jnp.float32) / state["scale"], gradients)
    finite = jnp.isfinite(optax.tree.norm(gradients))
    momentum = jax.tree.map(lambda old, new: jnp.where(finite, 0.9 * old + new, old), state["momentum"], gradients)
    params = jax.tree.map(lambda leaf, move: leaf - 0.1 * move, state["params"], momentum)
    return {"params": params, "momentum": momentum, "scale": state["scale"]}, {"loss": value / state["scale"]}


def two_losses_step(state: Any, batch: Any) -> Any:
    """A generator and a critic, each with its gradient, the second after the first has moved; a teacher that lags."""

    def critic_loss(critic: jax.Array) -> jax.Array:
        return jnp.tanh(batch["x"] @ critic).mean() - jnp.tanh(jnp.tanh(batch["x"] @ state["maker"]) @ critic).mean()

    first, of_critic = jax.value_and_grad(critic_loss)(state["critic"])
    critic = state["critic"] - 0.1 * of_critic

    def maker_loss(maker: jax.Array) -> jax.Array:
        made = jnp.tanh(batch["x"] @ maker)
        return jnp.tanh(made @ critic).mean() + ((made - jnp.tanh(batch["x"] @ state["teacher"])) ** 2).mean()

    of_maker = jax.grad(maker_loss)(state["maker"])
    maker = state["maker"] - 0.1 * of_maker
    teacher = 0.9 * state["teacher"] + 0.1 * maker
    return {"critic": critic, "maker": maker, "teacher": teacher}, {"loss": first}


def ascent_step(params: Any, batch: Any) -> Any:
    """The gradient at a point that a first gradient leads to, in a loop over two parts of the batch."""

    def one(total: Any, part: Any) -> Any:
        def loss(w: jax.Array) -> jax.Array:
            return (jnp.tanh(part @ w) ** 2).mean()

        value, uphill = bx.value_and_grad(loss)(params)
        return total + bx.value_and_grad(loss)(params + 0.05 * uphill / jnp.linalg.norm(uphill))[1], value

    parts = jnp.stack([batch["x"][0::2], batch["x"][1::2]])
    total, values = jax.lax.scan(one, jnp.zeros_like(params), parts)
    return params - 0.1 * total, {"loss": values.mean()}


def per_sample_step(params: Any, batch: Any) -> Any:
    """Each sample's gradient clipped for itself."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return (jnp.tanh(x @ w) ** 2).mean()

    values, gradients = jax.vmap(jax.value_and_grad(loss), (None, 0))(params, batch["x"])
    norms = jnp.linalg.norm(gradients, axis=(1, 2), keepdims=True)
    return params - 0.1 * (gradients / jnp.maximum(1, norms)).mean(0), {"loss": values.mean()}


def _weights(*names: str) -> Any:
    keys = jax.random.split(jax.random.key(0), len(names))
    return {name: jax.random.normal(key, (16, 16)) * 0.3 for name, key in zip(names, keys, strict=True)}


CASES: dict[str, tuple[Any, Callable[[], Any], set[str]]] = {
    "frozen": (
        lora_step,
        lambda: {"adapter": {"a": jnp.ones((16, 8)) * 0.1, "b": jnp.zeros((8, 16))}, **_weights("base")},
        {"state/adapter/a", "state/adapter/b", "state/base"},
    ),
    "masters": (
        masters_step,
        lambda: {"params": _weights("tied"), "momentum": {"tied": jnp.zeros((16, 16))}, "scale": jnp.float32(8)},
        {"state/params/tied", "state/momentum/tied"},
    ),
    "two losses": (
        two_losses_step,
        lambda: _weights("critic", "maker", "teacher"),
        {"state/critic", "state/maker", "state/teacher"},
    ),
    "ascent": (ascent_step, lambda: _weights("w")["w"], {"state"}),
    "per sample": (per_sample_step, lambda: _weights("w")["w"], set()),
}


@pytest.mark.parametrize("case", CASES)
def test_what_steps_do_with_gradients(case: str) -> None:
    train_step, make, split = CASES[case]
    random = np.random.default_rng(0)
    batches = [{"x": random.normal(size=(16, 16)).astype(np.float32)} for _ in range(3)]
    step = bx.parallelize(make_mesh("8 explicit"), {"data": ALL})(train_step)
    assert_as_on_one_device(step, train_step, make(), batches, atol=2e-3 if case == "masters" else 1e-5)
    assert {one.path for one in step.plan.variables if "gathered" in str(one.placements[0])} == split


def test_what_has_a_value_for_each_sample_stays_split() -> None:
    step = bx.parallelize(make_mesh("4x2 explicit"), {"data": bx.DataParallel(), "model": ALL})(lora_step)
    state, batch = CASES["frozen"][1](), {"x": np.ones((16, 16), np.float32)}
    _, metrics = step(state, batch)
    (shard, *_) = metrics["hidden"].addressable_shards
    assert (metrics["hidden"].shape, shard.data.shape) == ((16, 16), (2, 16))
    assert metrics["loss"].sharding.is_fully_replicated
