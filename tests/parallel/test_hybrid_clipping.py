"""Clipping by the global norm in hybrid steps: rows count in the norm as dense gradients do."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braidax.parallel as bx
from tests.support.parallel.hybrid import (
    HYBRID,
    LOSSES,
    as_dense,
    assert_as_on_one_device,
    make_batch,
    make_step,
    placed,
    pooled,
    pooled_by,
)
from tests.support.parallel.models import assert_close, copied, on_one_device

SCHEDULE = optax.linear_schedule(0.1, 0.02, 8)
OPTIMIZERS: dict[str, optax.GradientTransformation] = {
    "sgd": optax.sgd(SCHEDULE),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adagrad": optax.adagrad(SCHEDULE),
    "adam": optax.adam(1e-2),
    "adamw": optax.adamw(SCHEDULE, weight_decay=0.1),
}
BOTH = {"data": bx.Hybrid(), "model": bx.Hybrid()}
SLOW = pytest.mark.slow
LIMIT = 3.0  # some gradients are longer, some are not


def clipped(name: str, limit: float = LIMIT) -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(limit), OPTIMIZERS[name])


@pytest.mark.parametrize(
    ("name", "mesh", "strategies", "limit"),
    [
        pytest.param("adam", "8 explicit", HYBRID, 0.5, marks=SLOW),
        pytest.param("sgd", "8 auto", HYBRID, LIMIT, marks=SLOW),
        pytest.param("momentum", "4x2 explicit", BOTH, LIMIT, marks=SLOW),  # test_asked.py has norms over two axes
        pytest.param("adagrad", "4x2 auto", {"data": bx.Hybrid(), "model": bx.DataParallel()}, LIMIT, marks=SLOW),
        pytest.param("adamw", "8 explicit", HYBRID, LIMIT, marks=SLOW),
    ],
)
def test_ten_updates_equal_one_device(name: str, mesh: str, strategies: Any, limit: float) -> None:
    optimizer = clipped(name, limit)
    step = make_step(pooled, optimizer, mesh, strategies=strategies)
    assert placed(step)["params/table"] >= {"rows"}
    assert placed(step)["params/other"] >= {"rows"}
    assert placed(step)["params/kernel"] == {"replicated"}
    assert_as_on_one_device(step, pooled, optimizer)


def test_some_gradients_are_longer_than_the_limit_and_some_are_not() -> None:
    """In the training of the test above; and the rows alone are not, so that it matters that all count."""
    step, norms = pooled_by("sgd"), list[tuple[float, float]]()
    state = step.init(jax.random.key(3))
    params, key = on_one_device((as_dense(step, state.params), state.key))
    opt_state = clipped("sgd").init(params)

    @jax.jit
    def update(params: Any, opt_state: Any, batch: Any, number: int) -> Any:
        gradients = jax.grad(lambda params: pooled(params, batch, jax.random.fold_in(key, number))[0])(params)
        updates, opt_state = clipped("sgd").update(gradients, opt_state, params)
        both = optax.tree.norm(gradients), optax.tree.norm(gradients["kernel"])
        return optax.apply_updates(params, updates), opt_state, both

    for number in range(10):
        params, opt_state, (of_all, of_kernel) = update(params, opt_state, make_batch(number), number)
        norms.append((float(of_all), float(of_kernel)))
    assert min(of_all for of_all, _ in norms) < 0.9 * LIMIT
    assert max(of_all for of_all, _ in norms) > 1.5 * LIMIT
    assert any(of_kernel < LIMIT < 0.95 * of_all for of_all, of_kernel in norms)


def test_the_state_of_dense_variables_is_that_of_the_optimizer() -> None:
    step = make_step(pooled, clipped("adagrad"))
    state = step.init(jax.random.key(3))
    dense = {**as_dense(step, state.params), "table": None, "other": None}
    expected = jax.eval_shape(clipped("adagrad").init, dense)
    assert jax.tree.structure(state.opt_state["dense"]) == jax.tree.structure(expected)


def test_microbatches() -> None:
    def accumulated(params: Any, batch: Any, key: jax.Array) -> Any:
        parts = [
            LOSSES["sampled"](params, jax.tree.map(lambda leaf, at=at: leaf[at::2], batch), jax.random.fold_in(key, at))
            for at in range(2)
        ]
        return jax.tree.map(lambda *values: sum(values) / 2, *parts)

    @jax.jit
    def gradients(params: Any, number: int, batch: Any) -> Any:
        return jax.grad(lambda params: accumulated(params, batch, jax.random.fold_in(key, number))[0])(params)

    def trained(optimizer: optax.GradientTransformation) -> Any:
        @jax.jit
        def moved(params: Any, opt_state: Any, gradients: Any) -> Any:
            updates, opt_state = optimizer.update(gradients, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        params = jax.tree.map(jnp.asarray, first)
        opt_state = jax.jit(optimizer.init)(params)
        for number, batch in enumerate(batches):
            params, opt_state = moved(params, opt_state, gradients(params, number, batch))
        return copied(params)

    step = make_step(LOSSES["sampled"], clipped("adagrad", 0.1), microbatches=2)
    state, batches = step.init(jax.random.key(3)), [make_batch(seed) for seed in range(3)]
    first, key = copied(as_dense(step, state.params)), on_one_device(state.key)
    for batch in batches:
        state, _ = step.update(state, batch)
    expected = trained(clipped("adagrad", 0.1))
    assert_close(as_dense(step, state.params), expected, atol=1e-5)
    assert np.abs(trained(OPTIMIZERS["adagrad"])["kernel"] - expected["kernel"]).max() > 1e-3


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (optax.chain(optax.adam(1e-2), optax.clip_by_global_norm(1.0)), "reduce_sum over all rows, of more than their"),
        (optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(0.1)), "does not move its rows one by one"),
    ],
)
def test_what_clips_in_another_way_keeps_tables_dense(optimizer: Any, words: str) -> None:
    step = make_step(pooled, optimizer)
    assert all(placements == {"replicated"} for placements in placed(step).values())
    (why,) = {variable.why for variable in step.plan.variables if variable.path == "params/table"}
    assert re.search(words, why)
