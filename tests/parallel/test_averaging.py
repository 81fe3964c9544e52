"""Averages of parameters: of every strategy those of one device, sharded, saved, evaluated."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braidax.parallel as bx
from braidax.checkpoint import Checkpointer, Every, load_params
from braidax.errors import ArgumentError
from tests.support.parallel.models import make_mesh

DECAY = 0.75
ROWS = 2001
NUM_UPDATES = 4


def init(key: jax.Array) -> Any:
    first, second = jax.random.split(key)
    table = jax.random.normal(first, (ROWS, 16))
    return {"table": table, "kernel": jax.random.normal(second, (16, 256)), "scale": jnp.ones((), jnp.bfloat16)}


def loss(params: Any, batch: Any) -> jax.Array:
    hidden = jnp.tanh(params["table"][batch["ids"]].mean(1) @ params["kernel"]).mean(-1) * params["scale"]
    return ((hidden - batch["target"]) ** 2).mean()


def samples(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    ids = random.integers(0, ROWS, (16, 3)).astype(np.int32)
    return {"ids": ids, "target": random.normal(size=16).astype(np.float32)}


def make(strategies: Any, **options: Any) -> Any:
    axes = make_mesh("8 explicit") if "data" in strategies else jax.make_mesh((2,), ("pipe",))
    optimizer = bx.averaging(options.pop("optimizer", optax.sgd(0.5)), decay=DECAY)
    return bx.parallelize(loss, optimizer, axes, strategies, init=init, batch=samples(0), **options)


STRATEGIES: dict[str, Any] = {
    "whole": bx.DataParallel(),
    "sharded": bx.FullySharded(min_bytes=0),
    "rows": bx.Hybrid(tables="rows"),
}


@functools.cache
def made(strategy: str) -> Any:
    """A step that several tests train by: it keeps no state."""
    return make({"data": STRATEGIES[strategy]})


def whole(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: np.array(leaf, np.float64), tree)


def updated(step: Any, num: int = NUM_UPDATES) -> Any:
    state = step.init(jax.random.key(0))
    for seed in range(num):
        state, _ = step.update(state, samples(seed))
    return state


def on_one_device() -> tuple[Any, Any]:
    """Returns the parameters, and their average, by a loop that knows no optimizer that averages."""
    params = jax.jit(init)(jax.random.split(jax.random.key(0))[0])
    average = whole(params)
    gradients = jax.jit(jax.grad(loss))
    moved = jax.jit(lambda params, moves: optax.apply_updates(params, jax.tree.map(lambda leaf: -0.5 * leaf, moves)))
    for seed in range(NUM_UPDATES):
        params = moved(params, gradients(params, samples(seed)))
        average = jax.tree.map(lambda old, new: DECAY * old + (1 - DECAY) * new, average, whole(params))
    return whole(params), average


@pytest.fixture(scope="module")
def expected() -> tuple[Any, Any]:
    return on_one_device()


def assert_near(found: Any, wanted: Any) -> None:
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5), found, wanted)


@pytest.mark.parametrize(
    "strategy", [pytest.param(one, marks=pytest.mark.slow) if one == "whole" else one for one in STRATEGIES]
)
def test_the_average_is_that_of_one_device(strategy: str, expected: tuple[Any, Any]) -> None:
    step = made(strategy)
    state = updated(step)
    dense = step.to_dense(state)
    assert_near(whole(dense.params), expected[0])
    average = dense.opt_state.average
    assert average["scale"].dtype == jnp.float32
    assert_near(whole(average), expected[1])
    assert np.abs(expected[0]["kernel"] - expected[1]["kernel"]).max() > 1e-3


def test_it_lies_as_the_parameters_do_and_is_in_checkpoints(tmp_path: Path, expected: tuple[Any, Any]) -> None:
    step = made("sharded")
    state = updated(step)
    assert state.opt_state.average["kernel"].sharding == state.params["kernel"].sharding
    assert not state.params["kernel"].sharding.is_fully_replicated
    with Checkpointer(tmp_path, Every(1)) as saver:
        saver.save((state, 0))
    assert_near(load_params(tmp_path, at="0/opt_state/average"), expected[1])


def test_a_state_with_the_average_is_evaluated_and_the_one_given_is_trained_on(expected: tuple[Any, Any]) -> None:
    step = make({"data": bx.FullySharded(min_bytes=0)}, trainable=["params/kernel", "params/scale"])
    state = updated(step)
    ours = bx.averaged(state)
    assert ours.params["scale"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(ours.params["kernel"], state.opt_state.average["kernel"])
    np.testing.assert_array_equal(ours.params["table"], state.params["table"])  # it is frozen
    wanted = jax.jit(loss)(whole(jax.device_get(ours.params)), samples(9))
    assert float(step.evaluate(ours, samples(9))["loss"]) == pytest.approx(float(wanted), rel=1e-3)
    state, _ = step.update(state, samples(9))
    assert int(state.step) == NUM_UPDATES + 1


def test_tables_by_rows_are_averaged_in_the_form_of_one_device(expected: tuple[Any, Any]) -> None:
    step = made("rows")
    state = updated(step)
    with pytest.raises(ArgumentError, match=r"tables by rows, \['table'\], .* step\.to_dense\(state\)"):
        bx.averaged(state)
    ours = step.from_dense(bx.averaged(step.to_dense(state)))
    assert_near(whole(step.to_dense(ours).params)["table"], expected[1]["table"])


def test_integers_are_not_averaged_and_extra_arguments_go_on() -> None:
    def update(gradients: Any, state: Any, params: Any = None, *, value: Any, **more: Any) -> Any:
        return jax.tree.map(lambda leaf: -value * leaf, gradients), state

    scaled = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    optimizer = bx.averaging(scaled, decay=0.5)
    params = {"w": jnp.array(2.0), "count": jnp.array(3)}
    state = optimizer.init(params)
    gradients = {"w": jnp.array(0.5), "count": jnp.array(0)}
    _, state = optimizer.update(gradients, state, params, value=2)
    assert (float(state.average["w"]), int(state.average["count"])) == (1.5, 3)
    assert state.average["count"].dtype == jnp.int32


def test_wrong_use_is_named() -> None:
    with pytest.raises(ArgumentError, match=r"decay=1\.0 must be at least 0 and less than 1"):
        bx.averaging(optax.sgd(1.0), decay=1.0)
    with pytest.raises(ArgumentError, match=r"optimizer is 0\.1, expected one from optax"):
        bx.averaging(0.1, decay=0.5)
    step = bx.parallelize(
        loss, optax.sgd(0.1), make_mesh("8 explicit"), {"data": bx.DataParallel()}, init=init, batch=samples(0)
    )
    with pytest.raises(ArgumentError, match="state has 0 averages of parameters, expected one"):
        bx.averaged(step.init(jax.random.key(0)))
