"""Ten updates by exchanged rows are ten updates by dense gradients on one device."""

import numpy as np
import optax
import pytest

from braidax.parallel import rows
from tests.support.parallel.rows.training import Case, on_mesh, on_one_device

NUM_STEPS = 10
EPS = 1e-4  # above what the order of a sum changes; test_catch_up has the usual one
SCHEDULE = optax.linear_schedule(0.3, 0.1, 8)
OPTIMIZERS: dict[str, optax.GradientTransformation] = {
    "sgd": optax.sgd(0.3),
    "adagrad": optax.adagrad(SCHEDULE),
    "nesterov": optax.sgd(SCHEDULE, 0.9, nesterov=True),
    "adam": optax.adam(SCHEDULE, eps=EPS),
    "adamw": optax.adamw(0.1, eps=EPS, weight_decay=0.1),
    "one by one": optax.adamw(SCHEDULE, eps=EPS, weight_decay=0.1),
}
SOME = ("adagrad", "nesterov", "adamw")
CASES: dict[str, tuple[tuple[str, ...], Case]] = {
    "one axis": (SOME, Case("8 auto", num_rows=(37,) * 3, id_shapes=((16, 3),) * 3)),
    "overflow": (
        tuple(OPTIMIZERS),
        Case("8 explicit", num_rows=(37, 5, 1, 8, 90, 41), id_shapes=((16, 3),) * 6, slack=0.3),
    ),
    "overflow of three": (SOME, Case("8 explicit", num_rows=(37, 1, 90), id_shapes=((16, 3),) * 3, slack=0.3)),
    "another axis": (SOME, Case("4x2 explicit", ("data",), (37,) * 3, (2, 3), ((8, 2),) * 3)),
    "aggregated": (
        tuple(OPTIMIZERS),
        Case("4x2 auto", ("data", "model"), (37,) * 6, (6,), ((16, 3),) * 6, aggregate="inner"),
    ),
    "aggregated, overflow": (
        SOME,
        Case("4x2 explicit", ("data", "model"), (37, 1, 90), (6,), ((16, 4),) * 3, 0.2, "inner"),
    ),
}


@pytest.mark.slow  # test_hybrid.py has ten updates of a step, test_exchange.py overflow, test_catch_up.py optimizers
@pytest.mark.parametrize("name", CASES)
def test_updates_equal_one_device(name: str) -> None:
    """A table for each optimizer, all of them in one exchange."""
    names, case = CASES[name]
    expected, _ = on_one_device(case, [OPTIMIZERS[each] for each in names], num_steps=NUM_STEPS)
    got, _, num_rounds = on_mesh(case, [rows.row_optimizer(OPTIMIZERS[each]) for each in names], num_steps=NUM_STEPS)
    for each, one, other in zip(names, got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=4e-6, err_msg=each)
    assert (max(num_rounds) > 1) == ("overflow" in name)


@pytest.mark.slow  # test_hybrid_optimizers.py compares states, too
def test_states_equal_one_device_when_settled() -> None:
    case = Case()
    _, (dense,) = on_one_device(case, [optax.adam(0.1)], num_steps=5)
    _, (state,), _ = on_mesh(case, [rows.row_optimizer(optax.adam(0.1))], num_steps=5)
    size = case.num_rows[0]
    np.testing.assert_allclose(np.asarray(state.rows["mu"]).reshape(-1, 6)[:size], dense[0].mu, rtol=2e-5, atol=1e-7)
    np.testing.assert_allclose(np.asarray(state.rows["nu"]).reshape(-1, 6)[:size], dense[0].nu, rtol=2e-5, atol=1e-7)
    assert (np.asarray(state.rows["last"]) == 5).all()
    assert int(state.shared.clock) == 5
