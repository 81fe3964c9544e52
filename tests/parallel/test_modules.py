"""Training steps of Flax NNX and Equinox, as their docs write them, on any mesh: the numbers of one device."""

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
from tests.support.parallel.models import assert_close, copied, make_mesh

ALL = bx.FullySharded(min_bytes=0)
WIDTH = 16


def batches(num: int = 3) -> list[Any]:
    random = np.random.default_rng(0)
    return [{name: random.normal(size=(16, WIDTH)).astype(np.float32) for name in "xy"} for _ in range(num)]


class Net(nnx.Module):
    """Statistics of the batch, and dropout: state that is no weight."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(WIDTH, 32, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.second = nnx.Linear(32, WIDTH, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.second(self.dropout(jax.nn.relu(self.norm(self.first(x)))))


def nnx_loss(model: Net, batch: Any) -> Any:
    out = model(batch["x"])
    return ((out - batch["y"]) ** 2).mean(), out


def nnx_step(model: Net, optimizer: nnx.Optimizer, metrics: nnx.MultiMetric, batch: Any) -> Any:
    (loss, out), gradients = nnx.value_and_grad(nnx_loss, has_aux=True)(model, batch)
    metrics.update(loss=loss)
    optimizer.update(model, gradients)
    return loss, out


nnx_alone = nnx.jit(nnx_step)  # on one device, and compiled once for all tests


def make_nnx() -> Any:
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    return model, optimizer, nnx.MultiMetric(loss=nnx.metrics.Average("loss"))


@pytest.mark.parametrize(
    ("strategy", "wrap"),
    [
        pytest.param(bx.DataParallel(), lambda fn: fn, marks=pytest.mark.slow),  # below it has them in one state
        (ALL, nnx.jit),
        pytest.param(bx.DataParallel(), nnx.jit, marks=pytest.mark.slow),
        pytest.param(ALL, lambda fn: fn, marks=pytest.mark.slow),
    ],
    ids=["data parallel", "fully sharded, nnx.jit", "data parallel, nnx.jit", "fully sharded"],
)
def test_a_step_of_nnx_changes_its_objects(strategy: Any, wrap: Any) -> None:
    alone, ours = make_nnx(), make_nnx()
    train_step = bx.parallelize(make_mesh("4x2 explicit"), {"data": strategy})(wrap(nnx_step))
    for batch in batches():
        expected, found = nnx_alone(*alone, batch), train_step(*ours, batch)
        assert_close(copied(found), copied(expected), atol=1e-5)
    assert_close(copied(nnx.state(ours)), copied(nnx.state(alone)), atol=1e-5)
    (shard, *_) = ours[0].first.kernel[...].addressable_shards
    assert shard.data.size == WIDTH * 32 // (4 if strategy is ALL else 1)
    assert ours[1].opt_state[0].mu["first"]["kernel"][...].sharding == ours[0].first.kernel[...].sharding


def test_objects_in_one_state_come_back_as_themselves() -> None:
    def step(state: Any, batch: Any) -> Any:
        loss, _ = nnx_step(**state, batch=batch)
        return state, {"loss": loss}

    names = ("model", "optimizer", "metrics")
    state, alone = dict(zip(names, make_nnx(), strict=True)), make_nnx()
    train_step = bx.parallelize(make_mesh("8 auto"), {"data": bx.DataParallel()})(step)
    for batch in batches(2):
        new, metrics = train_step(state, batch)
        assert new is state
        np.testing.assert_allclose(metrics["loss"], nnx_alone(*alone, batch)[0], rtol=1e-5)


def test_what_a_module_consists_of_stays() -> None:
    def growing(model: Net, batch: Any) -> Any:
        loss, _ = nnx.value_and_grad(nnx_loss, has_aux=True)(model, batch)
        model.more = nnx.Param(jnp.zeros(3))
        return loss[0]

    with pytest.raises(StateError, match="growing changed more of model than arrays"):
        bx.parallelize(make_mesh(), {"data": ALL})(growing)(make_nnx()[0], batches(1)[0])


class Model(eqx.Module):
    """Leaves that are functions, numbers and bools."""

    layers: list[eqx.nn.Linear]
    dropout: eqx.nn.Dropout
    activation: Any

    def __init__(self, key: Any) -> None:
        first, second = jax.random.split(key)
        self.layers = [eqx.nn.Linear(WIDTH, 32, key=first), eqx.nn.Linear(32, WIDTH, key=second)]
        self.dropout, self.activation = eqx.nn.Dropout(0.3), jnp.tanh

    def __call__(self, x: Any, key: Any) -> Any:
        return self.layers[1](self.dropout(self.activation(self.layers[0](x)), key=key))


@eqx.filter_value_and_grad
def eqx_loss(model: Model, x: Any, y: Any, key: Any) -> Any:
    return ((jax.vmap(model)(x, jax.random.split(key, len(x))) - y) ** 2).mean()


ADAM = optax.adam(1e-2)


def eqx_step(model: Model, opt_state: Any, key: Any, x: Any, y: Any) -> Any:
    key, sub = jax.random.split(key)
    loss, gradients = eqx_loss(model, x, y, sub)
    updates, opt_state = ADAM.update(gradients, opt_state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), opt_state, key, loss


eqx_alone = eqx.filter_jit(eqx_step)


def make_eqx() -> Any:
    model = Model(jax.random.key(0))
    return model, ADAM.init(eqx.filter(model, eqx.is_array)), jax.random.key(1)


def losses_first(*args: Any) -> Any:
    *state, loss = eqx_step(*args)
    return loss, *state


def with_names(model: Any, opt_state: Any, key: Any, x: Any, y: Any) -> Any:
    return losses_first(model, opt_state, key, x, y)


@pytest.mark.parametrize(
    "wrap", [pytest.param(lambda fn: fn, marks=pytest.mark.slow), eqx.filter_jit], ids=["plain", "eqx.filter_jit"]
)
def test_a_step_of_equinox(wrap: Any) -> None:
    alone, ours = make_eqx(), make_eqx()
    train_step = bx.parallelize(make_mesh("8 explicit"), {"data": ALL}, batch=("x", "y"))(wrap(eqx_step))
    for batch in batches():
        *alone, expected = eqx_alone(*alone, **batch)
        *ours, found = train_step(*ours, batch["x"], batch["y"])
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    arrays = [copied(eqx.filter(state, eqx.is_array)) for state in (ours, alone)]
    assert_close(*arrays, atol=1e-5)
    assert (ours[0].activation, ours[0].dropout.p, ours[0].dropout.inference) == (jnp.tanh, 0.3, False)
    assert len(ours[0].layers[0].weight.addressable_shards[0].data) == 4


def test_the_state_comes_back_first_or_last_and_in_its_order() -> None:
    batch = batches(1)[0]
    mesh, names = make_mesh("8 auto"), ("x", "y")
    first = bx.parallelize(mesh, {"data": ALL}, batch=names)(eqx_step)(*make_eqx(), batch["x"], batch["y"])
    last = bx.parallelize(mesh, {"data": ALL}, batch=names)(with_names)(*make_eqx(), batch["x"], batch["y"])
    assert_close(copied(last[0]), copied(first[-1]), atol=0)
    assert_close(copied(last[2:]), copied(first[1:-1]), atol=0)

    @bx.parallelize(mesh, {"data": ALL}, batch=names)
    def swapped(model: Any, opt_state: Any, key: Any, x: Any, y: Any) -> Any:
        model, opt_state, key, loss = eqx_step(model, opt_state, key, x, y)
        return opt_state, model, key, loss

    with pytest.raises(StateError, match=r"swapped returned 4 results, and neither the first 3 nor the last are its "):
        swapped(*make_eqx(), batch["x"], batch["y"])


def test_who_has_many_arguments_says_which_are_samples() -> None:
    batch = batches(1)[0]
    with pytest.raises(ArgumentError, match=r"eqx_step was called with 5 arguments.*batch=\('y',\)"):
        bx.parallelize(make_mesh(), {"data": ALL})(eqx_step)(*make_eqx(), batch["x"], batch["y"])
    with pytest.raises(ArgumentError, match="batch names 'z', and eqx_step has the parameters model, opt_state"):
        bx.parallelize(make_mesh(), {"data": ALL}, batch=("z",))(eqx_step)
