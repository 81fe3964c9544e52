"""Steps whose tables are on servers: every number is that of single-device training."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braidax.parallel as bx
from braidax.comm.transports.ucx import UcxTransport
from braidax.gang import LocalGang
from braidax.parallel.given.arrays import place
from tests.support.parallel.hybrid import LOSSES, OPTIMIZERS, as_plain, init, make_batch, placed, pooled
from tests.support.parallel.models import assert_close, copied, make_mesh, single_device, specs
from tests.support.parallel.served import resizing
from tests.support.parallel.served.losing import assert_equal

SLOW = pytest.mark.slow
CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), optax.adagrad(0.3))


@pytest.fixture(scope="module")
def gang(gangs: dict[int, LocalGang]) -> LocalGang:
    return gangs[2]


def make_step(loss: Any, optimizer: Any, gang: LocalGang, mesh: str = "8 explicit", **options: Any) -> Any:
    options = {
        "init": init,
        "batch": specs(make_batch()),
        "strategies": {"data": bx.Hybrid(tables="servers")},
        **options,
    }
    return bx.parallelize(loss, optimizer, make_mesh(mesh), options.pop("strategies"), servers=gang, **options)


def assert_as_on_one_device(
    step: Any, loss: Callable[..., Any], optimizer: Any, *, num_updates: int = 6, ahead: int = 0
) -> None:
    state = step.init(jax.random.key(3))
    batches = [place(make_batch(seed), step.batch_shardings) for seed in range(num_updates)]
    first = step.to_dense(state)
    begun = bx.State(0, first.params, optimizer.init(jax.tree.map(jnp.asarray, first.params)), {}, first.key)
    expected, _, (*told, on_one) = single_device(
        as_plain(loss), optimizer, begun, [make_batch(seed) for seed in range(num_updates)], then=make_batch(0)
    )
    for number, (batch, expects) in enumerate(zip(batches, told, strict=True)):
        for coming in batches[number + 1 : number + 1 + ahead]:
            step.prepare(coming)
        state, metrics = step.update(state, batch)
        norm = metrics.pop("grad_norm", None)
        assert norm is None or float(norm) > 0
        assert_close(copied(metrics), copied(expects), atol=1e-5)
    evaluated = step.evaluate(state, make_batch(0))
    np.testing.assert_allclose(evaluated["loss"], on_one["loss"], rtol=2e-5, atol=1e-5)
    assert_close(copied(step.to_dense(state).params), copied(expected), atol=1e-5)


@pytest.mark.parametrize(
    "optimizer",
    [pytest.param(name, marks=SLOW) for name in OPTIMIZERS],  # below Adam, by another transport
)
def test_every_optimizer(gang: LocalGang, optimizer: str) -> None:
    with make_step(pooled, OPTIMIZERS[optimizer], gang) as step:
        assert placed(step) == {
            "params/kernel": {"replicated"},
            "params/narrow": {"replicated"},
            "params/other": {"served"},
            "params/table": {"served"},
        }
        assert_as_on_one_device(step, pooled, OPTIMIZERS[optimizer], ahead=2)


def test_rows_travel_by_the_transport_of_the_gang() -> None:
    with LocalGang(1, transport="ucx") as gang, make_step(pooled, OPTIMIZERS["adam"], gang) as step:
        assert isinstance(step._servers._world.comm._progress._transport, UcxTransport)
        assert_as_on_one_device(step, pooled, OPTIMIZERS["adam"], ahead=2)


@pytest.mark.parametrize("optimizer", [pytest.param("adagrad", marks=SLOW), "momentum"])
@pytest.mark.parametrize(
    ("loss", "mesh"),
    [
        ("scanned", "8 auto"),
        pytest.param("sampled", "4x2 auto", marks=SLOW),
        pytest.param("sampled", "8 explicit", marks=SLOW),
    ],
)
def test_every_loss_on_every_mesh(gang: LocalGang, loss: str, mesh: str, optimizer: str) -> None:
    with make_step(LOSSES[loss], OPTIMIZERS[optimizer], gang, mesh) as step:
        assert "served" in placed(step)["params/table"]
        assert_as_on_one_device(step, LOSSES[loss], OPTIMIZERS[optimizer], num_updates=4)


@SLOW  # test_growing.py has one, test_growing_moments.py three
@pytest.mark.parametrize("num_servers", [1, 3])
def test_any_number_of_servers(gangs: dict[int, LocalGang], num_servers: int) -> None:
    with make_step(pooled, OPTIMIZERS["adagrad"], gangs[num_servers]) as step:
        assert_as_on_one_device(step, pooled, OPTIMIZERS["adagrad"], num_updates=3)


@SLOW  # test_growing.py clips by the norm over rows of several devices, too
def test_sums_over_rows_are_those_of_all_servers(gang: LocalGang) -> None:
    """Several devices have the same rows: the norm is that of their sum."""
    with make_step(pooled, CLIPPED, gang, metrics=("grad_norm",)) as step:
        assert_as_on_one_device(step, pooled, CLIPPED, ahead=1)
        state = step.init(jax.random.key(3))
        dense = bx.parallelize(
            pooled, CLIPPED, make_mesh("8 explicit"), {"data": bx.DataParallel()}, init=init,
            batch=specs(make_batch()), metrics=("grad_norm",),
        )  # fmt: skip
        other = dense.init(jax.random.key(3))
        for seed in range(3):
            (state, told), (other, expected) = (
                step.update(state, make_batch(seed)),
                dense.update(other, make_batch(seed)),
            )
            np.testing.assert_allclose(told["grad_norm"], expected["grad_norm"], rtol=1e-5)


@SLOW  # workers/test_saved.py reads variables behind each update
def test_a_table_is_read_and_stays_as_it_is(gang: LocalGang) -> None:
    """Rows that lag are brought up in what is told alone."""
    with resizing.make_step(gang, OPTIMIZERS["adam"], spares=0) as step:
        expected = resizing.trained(step)
        assert_equal(resizing.trained(step, lambda number: step.table("table")), expected)


@SLOW  # workers/test_together.py has them
def test_microbatches(gang: LocalGang) -> None:
    with make_step(LOSSES["sampled"], OPTIMIZERS["adagrad"], gang, microbatches=2) as step:
        state = step.init(jax.random.key(3))
        dense = bx.parallelize(
            LOSSES["sampled"], OPTIMIZERS["adagrad"], make_mesh("8 explicit"), {"data": bx.DataParallel()}, init=init,
            batch=specs(make_batch()), microbatches=2,
        )  # fmt: skip
        other = dense.init(jax.random.key(3))
        for seed in range(3):
            state, other = step.update(state, make_batch(seed))[0], dense.update(other, make_batch(seed))[0]
        assert_close(copied(step.to_dense(state).params), copied(other.params), atol=1e-5)


@SLOW  # test_growing_moments.py sets one
def test_a_learning_rate_that_is_set_counts_from_there(gang: LocalGang) -> None:
    """Rows that no batch has read since lag behind: they take the missed steps by the old one."""
    optimizer = optax.inject_hyperparams(optax.adamw)(learning_rate=3e-2, weight_decay=0.1)
    with make_step(pooled, optimizer, gang) as step:
        state = step.init(jax.random.key(3))
        dense = bx.parallelize(
            pooled,
            optimizer,
            make_mesh("8 explicit"),
            {"data": bx.DataParallel()},
            init=init,
            batch=specs(make_batch()),
        )
        other = dense.init(jax.random.key(3))
        for seed in range(6):
            if seed == 3:
                rate = jnp.float32(3e-3)
                state.opt_state["dense"].hyperparams["learning_rate"] = rate
                other.opt_state.hyperparams["learning_rate"] = rate
            state, other = step.update(state, make_batch(seed))[0], dense.update(other, make_batch(seed))[0]
        assert_close(copied(step.to_dense(state).params), copied(other.params), atol=1e-5)


@SLOW  # test_resizing_ahead.py puts a dense state back
def test_training_goes_on_from_a_dense_state(gangs: dict[int, LocalGang]) -> None:
    """What is kept of rows comes back, too, to other servers of another number."""
    optimizer, batches = OPTIMIZERS["adam"], [make_batch(seed) for seed in range(6)]
    with make_step(pooled, optimizer, gangs[2]) as step:
        state = step.init(jax.random.key(3))
        for batch in batches[:3]:
            state, _ = step.update(state, batch)
        saved = step.to_dense(state)
        for batch in batches[3:]:
            state, _ = step.update(state, batch)
        expected = copied(step.to_dense(state))
    with make_step(pooled, optimizer, gangs[1]) as step:
        state = step.from_dense(saved)
        assert int(state.step) == 3
        for batch in batches[3:]:
            state, _ = step.update(state, batch)
        assert_close(copied(step.to_dense(state)), expected, atol=1e-6)


def test_what_is_dense_may_be_fully_sharded_and_padded(gang: LocalGang) -> None:
    """A dense state has it without padding, and what it gives back is the same state."""
    optimizer = OPTIMIZERS["adam"]
    dense = bx.FullySharded({"params/kernel": bx.Gathered(0)})  # 6 rows on 8 devices
    with make_step(pooled, optimizer, gang, strategies={"data": bx.Hybrid(tables="servers", dense=dense)}) as step:
        assert placed(step)["params/kernel"] == {"gathered, dim 0"}
        assert step.state_specs.params["kernel"].shape == (8, 6)
        assert_as_on_one_device(step, pooled, optimizer, num_updates=3)
        state, _ = step.update(step.init(jax.random.key(3)), make_batch(0))
        saved = step.to_dense(state)
        assert saved.params["kernel"].shape == (6, 6)
        again = copied(step.to_dense(step.from_dense(saved)))
        assert_close(again, copied(saved), atol=0)
