"""Tables on servers in the checkpoints of a run: saved with the state, and restored to other servers."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import braidax.parallel as bx
from braidax.checkpoint import Checkpointer, Every
from braidax.errors import ArgumentError
from braidax.gang import LocalGang
from braidax.parallel.rows import row_adagrad
from tests.support.parallel.hybrid import init, make_batch, pooled
from tests.support.parallel.models import copied, make_mesh, specs

CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "adam": (optax.adam(1e-2), {}),
    "own": (optax.sgd(0.1), {"row_optimizers": {"params/table": row_adagrad(0.1)}}),
}


def make_step(case: str, gang: LocalGang) -> Any:
    optimizer, options = CASES[case]
    strategies = {"data": bx.Hybrid(tables="servers", **options)}
    mesh = make_mesh("8 explicit")
    return bx.parallelize(pooled, optimizer, mesh, strategies, init=init, batch=specs(make_batch()), servers=gang)


def numbers(step: Any, state: bx.State) -> Any:
    return copied(state.params), {name: step.table(name) for name in ("table", "other")}


@pytest.mark.slow  # test_resizing.py restores to other servers than have saved, test_disk.py from and to disk
@pytest.mark.parametrize("case", ["adam", "own"])
def test_training_goes_on_bit_by_bit(gangs: dict[int, LocalGang], tmp_path: Path, case: str) -> None:
    """Saved behind the fourth update of two servers, restored to three; what came behind it is lost and comes again."""
    with make_step(case, gangs[2]) as step, Checkpointer(tmp_path, Every(4)) as saver:
        state, losses = step.init(jax.random.key(1)), list[float]()
        for seed in range(7):
            state, metrics = step.update(state, make_batch(seed), before_apply=saver.wait)
            saver.update((state, step.tables))
            losses.append(float(metrics["loss"]))
        expected = numbers(step, state)
    with make_step(case, gangs[3]) as step, Checkpointer(tmp_path, Every(4)) as saver:
        state, tables = saver.restore((step.state_specs, step.tables))
        assert tables is step.tables
        assert int(state.step) == 4
        for seed in range(4, 7):
            state, metrics = step.update(state, make_batch(seed))
            assert float(metrics["loss"]) == losses[seed]
        for one, two in zip(jax.tree.leaves(numbers(step, state)), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(one, two)


def test_a_state_alone_is_not_gone_on_with(gangs: dict[int, LocalGang], tmp_path: Path) -> None:
    """Its tables are those of another update."""
    with make_step("adam", gangs[1]) as step, Checkpointer(tmp_path, Every(1)) as saver:
        state = step.init(jax.random.key(1))
        for seed in range(2):
            state, _ = step.update(state, make_batch(seed))
            if seed == 0:
                saver.save(state)
        old = saver.restore(step.state_specs)
        with pytest.raises(
            ArgumentError, match="servers have seen 2 updates: go on with that one, begin by init, restore"
        ):
            step.update(old, make_batch(2))
        step.update(state, make_batch(2))
