"""Which optimizers may be applied to rows alone, and what the others are told."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from braidax.errors import ArgumentError
from braidax.parallel import rows
from tests.support.parallel.rows.training import Case, on_mesh

SCHEDULE = optax.cosine_decay_schedule(0.1, 10)
ELEMENTWISE = {
    "sgd": optax.sgd(SCHEDULE, 0.9, nesterov=True),
    "adam": optax.adam(1e-3),
    "adamw": optax.adamw(SCHEDULE),
    "nadam": optax.nadam(1e-3),
    "amsgrad": optax.amsgrad(1e-3),
    "adagrad": optax.adagrad(0.1),
    "rmsprop": optax.rmsprop(1e-3, centered=True, momentum=0.9),
    "lion": optax.lion(1e-3),
    "adamax": optax.adamax(1e-3),
    "clipped": optax.chain(optax.clip(1.0), optax.scale_by_adam(), optax.scale(-0.1)),
    "injected": optax.inject_hyperparams(optax.adam)(learning_rate=SCHEDULE),
    "finite": optax.chain(optax.zero_nans(), optax.sgd(0.1)),
}
MIXING = {
    "global norm": (optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)), "reduce_sum over all rows"),
    "lamb": (optax.lamb(1e-3), "reduce_sum over all rows, of more than their gradients"),
    "adafactor": (optax.adafactor(1e-3), "over all rows"),
    "block norm": (optax.chain(optax.clip_by_block_rms(1.0), optax.sgd(0.1)), "reduce_sum over all rows"),
    "noise": (optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.sgd(0.1)), "an array whose rows differ"),
    "centralized": (optax.chain(optax.centralize(), optax.sgd(0.1)), "within rows, so it is not elementwise"),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_ones_are_taken(name: str) -> None:
    rows.row_optimizer(ELEMENTWISE[name])


@pytest.mark.parametrize("name", MIXING)
def test_those_that_mix_rows_are_refused(name: str) -> None:
    optimizer, words = MIXING[name]
    with pytest.raises(ArgumentError, match=words):
        rows.row_optimizer(optimizer)


def test_a_scalar_made_of_all_gradients_is_refused() -> None:
    def update(gradients: Any, state: Any, params: Any) -> Any:
        return gradients, gradients[0, 0]

    with pytest.raises(ArgumentError, match=r"its update has (dynamic_)?slice"):
        rows.row_optimizer(optax.GradientTransformation(lambda params: jnp.zeros(()), update))


def test_an_optimizer_for_another_structure_is_refused() -> None:
    with pytest.raises(ArgumentError, match="cannot be applied to one array of rows"):
        rows.row_optimizer(optax.multi_transform({"a": optax.sgd(0.1)}, {"x": "a", "y": "a"}))


@pytest.mark.parametrize(
    ("optimizer", "rests"),
    [(optax.sgd(0.1), True), (optax.adagrad(0.1), True), (optax.sgd(0.1, 0.9), False), (optax.adam(1e-3), False)],
)
def test_missed_steps_are_counted_only_where_rows_move(optimizer: Any, rests: bool) -> None:
    assert (rows.row_optimizer(optimizer).settle is None) == rests


def test_row_wise_adagrad() -> None:
    """Against NumPy: touched rows only, and one accumulator a row."""
    case = Case(num_rows=(37,), width=(6,), id_shapes=((16, 3),))
    got, states, _ = on_mesh(case, [rows.row_adagrad(0.1, initial=0.2)], num_steps=4)
    table, accumulator = case.tables()[0].copy(), np.full(37, 0.2, np.float32)
    for seed in range(4):
        ids = case.batch(seed)[0][0]
        at = np.unique(ids[ids >= 0])
        gradient = _dense_gradient(case, [table], seed, 0)[at]
        accumulator[at] += (gradient**2).mean(1)
        table[at] -= 0.1 * gradient / np.sqrt(accumulator[at] + 1e-7)[:, None]
    np.testing.assert_allclose(got[0], table, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(np.asarray(states[0].rows).reshape(-1)[:37], accumulator, rtol=1e-5)


def _dense_gradient(case: Case, tables: list[np.ndarray], seed: int, which: int) -> np.ndarray:
    ids, targets = (each[which] for each in case.batch(seed))
    known = (ids >= 0)[..., None]
    distance = np.tanh(tables[which][np.maximum(ids, 0)] * known - targets)
    gradient = 3 * 2 * distance * (1 - distance**2) * known / distance.size
    dense = np.zeros_like(tables[which])
    np.add.at(dense, ids[ids >= 0], gradient[ids >= 0])
    return dense
