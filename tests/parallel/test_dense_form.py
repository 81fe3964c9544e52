"""States with tables by rows, as single-device training has them, and back."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import braidax.parallel as bx
from braidax.errors import ArgumentError
from braidax.parallel.rows import row_adagrad
from tests.support.parallel.hybrid import HYBRID, ROWS, make_batch, make_step, placed, pooled
from tests.support.parallel.models import assert_close, copied

SCHEDULE = optax.linear_schedule(5e-2, 1e-2, 9)
OPTIMIZERS: dict[str, optax.GradientTransformation] = {
    "adagrad": optax.adagrad(0.3),
    "momentum": optax.sgd(SCHEDULE, momentum=0.9),
    "adam": optax.adam(SCHEDULE),
    "adamw": optax.adamw(SCHEDULE, weight_decay=0.1),  # its missed steps are taken one by one
}


def kept(state: bx.State) -> bx.State:
    """A copy that may be given up."""
    return jax.tree.map(jnp.copy, state)


def updated(step: bx.Step, state: bx.State, seeds: range) -> bx.State:
    for seed in seeds:
        state, _ = step.update(state, make_batch(seed))
    return state


@pytest.mark.parametrize(
    ("optimizer", "strategies"),
    [
        ("momentum", HYBRID),
        pytest.param("adam", HYBRID, marks=pytest.mark.slow),
        pytest.param("adagrad", HYBRID, marks=pytest.mark.slow),
        pytest.param("adamw", HYBRID, marks=pytest.mark.slow),
    ],
)
def test_training_goes_on_in_the_other_form(optimizer: str, strategies: Any) -> None:
    rows = make_step(pooled, OPTIMIZERS[optimizer], strategies=strategies)
    dense = make_step(pooled, OPTIMIZERS[optimizer], strategies={"data": bx.DataParallel()})
    assert "rows" in str(placed(rows)["params/table"])
    begun = dense.init(jax.random.key(3))
    expected = copied(updated(dense, kept(begun), range(4)))
    # By rows, on as a dense one, and back: the same as dense all the time.
    by_rows = updated(rows, rows.from_dense(begun), range(2))
    assert jax.tree.structure(by_rows) == jax.tree.structure(rows.state_shardings)
    whole = rows.to_dense(by_rows)
    assert jax.tree.structure(whole) == jax.tree.structure(expected)
    assert_close(copied(updated(dense, kept(whole), range(2, 4))), expected, atol=2e-5)
    again = updated(rows, rows.from_dense(whole), range(2, 4))
    assert_close(copied(rows.to_dense(again)), expected, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_a_state_goes_on_by_another_plan(name: str) -> None:
    optimizer = OPTIMIZERS[name]
    dense = make_step(pooled, optimizer, strategies={"data": bx.DataParallel()})
    begun = dense.init(jax.random.key(3))
    expected = copied(updated(dense, kept(begun), range(4)))
    both, less = (
        make_step(pooled, optimizer, strategies={"data": bx.Hybrid({"params/table": placement})})
        for placement in (bx.Rows(), bx.Replicated())
    )
    state = updated(both, both.adopt(begun, dense), range(2))
    state = updated(less, less.adopt(state, both), range(2, 3))
    state = updated(dense, dense.adopt(state, less), range(3, 4))
    assert_close(copied(state), expected, atol=2e-5)


def test_a_state_tells_what_is_padded() -> None:
    state = make_step(pooled, OPTIMIZERS["adam"]).init(jax.random.key(0))
    leaves = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in jax.tree.leaves_with_path(state)
    }
    told = state.padded_rows
    assert {path: told[path] for path in told if "table" in path} == {
        "params/table": ROWS,
        **{f"opt_state/rows/table/rows/{name}": ROWS for name in ("mu", "nu", "last")},
    }
    assert {path: leaves[path].shape[:2] for path in told} == {path: (-(-told[path] // 8), 8) for path in told}


def test_every_state_of_a_dense_step_is_dense() -> None:
    step = make_step(pooled, OPTIMIZERS["adam"], strategies={"data": bx.DataParallel()})
    state = step.init(jax.random.key(0))
    expected = copied(state)
    assert_close(copied(step.to_dense(state)), expected, atol=0)
    assert_close(copied(step.from_dense(state)), expected, atol=0)


def test_what_has_no_dense_form_says_so() -> None:
    strategies = {"data": bx.Hybrid(row_optimizers={"params/table": row_adagrad(0.2)})}
    step = make_step(pooled, OPTIMIZERS["adagrad"], strategies=strategies)
    state = step.init(jax.random.key(0))
    with pytest.raises(ArgumentError, match=r"row_optimizers moves \['table'\] in a way that is no dense optimizer's"):
        step.to_dense(state)
    adam = make_step(pooled, OPTIMIZERS["adam"])
    with pytest.raises(ArgumentError, match=r"state.*pass a state in the form of single-device training"):
        adam.from_dense(state)
