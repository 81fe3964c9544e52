"""Tables that grow under optimizers that move rows without a gradient: training is that of servers with all rows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braidax.parallel as bx
from braidax.checkpoint import Checkpointer, Every
from braidax.gang import LocalGang
from braidax.parallel.given.arrays import place
from braidax.parallel.rows import row_optimizer
from tests.support.parallel.models import specs
from tests.support.parallel.served.models import ROWS, init, loss, zipf_batches

SLOW = pytest.mark.slow
SEEN = bx.Seen(ROWS)
DECAY = optax.inject_hyperparams(optax.adamw)(learning_rate=3e-2, weight_decay=0.1)
OPTIMIZERS: dict[str, Any] = {
    "decay, set anew": DECAY,
    "adam": optax.adam(1e-2),
    "momentum": optax.sgd(0.1, 0.9),
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2, weight_decay=0.1)),
    "own rows": optax.adagrad(0.1),
}
NUM_STEPS = 9


@pytest.fixture(scope="module")
def gang(gangs: dict[int, LocalGang]) -> LocalGang:
    return gangs[3]


def make_step(gang: LocalGang, case: str, seen: bx.Seen | None, **served: Any) -> Any:
    own = {"params/table": row_optimizer(optax.adamw(1e-2, weight_decay=0.1))} if case == "own rows" else {}
    served = {"spares": 1, **served}
    strategies = {"data": bx.Hybrid({"params/table": bx.Served(seen=seen, **served)}, row_optimizers=own)}
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    batch = specs(zipf_batches(1)[0])
    return bx.parallelize(loss, OPTIMIZERS[case], mesh, strategies, init=init, batch=batch, servers=gang)


def set_rate(step: Any, state: Any, number: int) -> None:
    """Sets another learning rate before some steps, where the optimizer has one that may be set."""
    dense = state.opt_state["dense"]
    if number in (3, 5) and hasattr(dense, "hyperparams"):
        dense.hyperparams["learning_rate"] = jnp.float32(3e-3 * number)


def trained(
    step: Any, state: Any, numbers: Any, before: Callable[[int], object] = lambda number: None
) -> tuple[Any, list[float]]:
    """Trains, and reads rows that are not there by `evaluate`, too."""
    batches, losses = zipf_batches(NUM_STEPS + 1), list[float]()
    for number in numbers:
        before(number)
        set_rate(step, state, number)
        state, metrics = step.update(state, place(batches[number], step.batch_shardings))
        every = {**batches[-1], "ids": np.arange(16, dtype=np.int32) * 31}
        losses += [float(metrics["loss"]), float(step.evaluate(state, every)["loss"])]
    return state, losses


@pytest.mark.parametrize("case", [one if "," in one else pytest.param(one, marks=SLOW) for one in OPTIMIZERS])
def test_training_is_that_with_all_rows(gang: LocalGang, case: str, tmp_path: Path) -> None:
    """Bit by bit, over other numbers of servers, a checkpoint, and a learning rate that is set by hand."""
    sizes = {4: 3, 6: 1} if case != "clipped" else {}  # a norm is a sum over servers
    with make_step(gang, case, None) as step:
        state, expected = trained(step, step.init(jax.random.key(0)), range(NUM_STEPS))
        table = step.table("table")

    def resize(number: int) -> None:
        if number in sizes:
            step.resize(sizes[number])

    with make_step(gang, case, SEEN) as step, Checkpointer(tmp_path / "saved", Every(1)) as saver:
        state, losses = trained(step, step.init(jax.random.key(0)), range(7), resize)
        saver.save((state, step.tables))
    with make_step(gang, case, SEEN) as step, Checkpointer(tmp_path / "saved", Every(1)) as saver:
        state, _ = saver.restore((step.state_specs, step.tables))
        state, more = trained(step, state, range(7, NUM_STEPS))
        assert losses + more == expected
        ids, rows = step.seen_rows("table")
        assert 0 < len(ids) < ROWS
        assert rows.tobytes() == table[ids].tobytes()
        step.publish(tmp_path / "published")
        found = bx.Published(tmp_path / "published").seen["table"]
        np.testing.assert_array_equal(found.ids, ids)
        assert found.rows.tobytes() == rows.tobytes()
