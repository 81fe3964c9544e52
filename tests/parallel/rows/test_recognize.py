"""Which missed steps are summed up is read off an optimizer's terms: optax' Adam and what fades, and nothing else."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from braidax.parallel.rows.moving.recognize import MAX_NODES
from braidax.parallel.rows.moving.split import TracedOptimizer
from braidax.parallel.rows.moving.table_update import AdamFading, Fading
from tests.support.parallel.rows.optimizers import IN_ONE, ONE_BY_ONE


def form_of(optimizer: optax.GradientTransformation, dtype: Any = jnp.float32) -> Any:
    split = TracedOptimizer(optimizer, {"t": jax.ShapeDtypeStruct((7, 3), dtype)}).split(["t"])
    assert not split.refused
    catch_up = split.tables["t"].catch_up
    assert catch_up is not None
    return catch_up.form


@pytest.mark.parametrize("name", IN_ONE)
def test_what_is_summed_up(name: str) -> None:
    assert form_of(IN_ONE[name]) is not None


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_what_is_not(name: str) -> None:
    assert form_of(ONE_BY_ONE[name]) is None


def test_adam_is_read_off() -> None:
    found = form_of(optax.adamw(0.25, 0.8, 0.95, 1e-3, weight_decay=0.5))
    assert isinstance(found, AdamFading)
    np.testing.assert_allclose((found.b1, found.b2, found.eps), (0.8, 0.95, 1e-3), rtol=1e-6)
    assert found.grown.equals(-0.125)
    assert found.rate.equals(-0.25)
    assert MAX_NODES == 48


def test_momentum_is_read_off() -> None:
    found = form_of(optax.chain(optax.clip(5.0), optax.sgd(0.5, 0.5, nesterov=True)))
    assert isinstance(found, Fading)
    assert found.factors == (0.5,)
    assert found.rates[0] is not None
    assert found.rates[0].equals(-0.125)  # rate times decay twice


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.nadam(1e-2),
        optax.adamax(1e-2),
        optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
        optax.chain(optax.adam(1e-2), optax.keep_params_nonnegative()),
        optax.chain(optax.adam(1e-2), optax.clip(0.1)),
        optax.sgd(optax.exponential_decay(0.1, 10, 1.5), 0.9),  # the rates have no limit
        optax.adamw(2.0, weight_decay=0.6),  # a row would change its sign
        optax.adam(1e-2, mu_dtype=jnp.bfloat16),
    ],
)
def test_what_differs_anywhere_is_taken_step_by_step(optimizer: Any) -> None:
    assert form_of(optimizer) is None


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_what_is_rounded_in_each_step_is_taken_step_by_step(dtype: Any) -> None:
    assert form_of(optax.adam(1e-2), dtype) is None
    assert form_of(optax.sgd(1e-2, 0.9), dtype) is None


@pytest.mark.parametrize("optimizer", [optax.sgd(0.1), optax.adagrad(0.1), optax.set_to_zero()])
def test_rows_that_rest_need_nothing(optimizer: Any) -> None:
    split = TracedOptimizer(optimizer, {"t": jax.ShapeDtypeStruct((7, 3), jnp.float32)}).split(["t"])
    assert split.tables["t"].catch_up is None
