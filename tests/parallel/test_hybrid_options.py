"""Hybrid steps with what may be said of tables: aggregation inside hosts, own optimizers, wrong ids."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braidax.parallel as bx
from braidax.errors import ArgumentError, DataError, StateError
from braidax.parallel.compute.late_checks import LATE_UPDATES
from braidax.parallel.rows import row_adagrad
from braidax.program import compile_on
from tests.support.parallel.hybrid import (
    OPTIMIZERS,
    ROWS,
    as_dense,
    assert_as_on_one_device,
    init,
    make_batch,
    make_step,
    placed,
    pooled,
    pooled_by,
    sampled,
    scanned,
)
from tests.support.parallel.models import copied

TABLES = ("table", "other", "narrow")
INNER = {f"params/{name}": bx.Rows(aggregate="inner") for name in TABLES}
BOTH = {"data": bx.Hybrid(INNER), "model": bx.Hybrid()}


@pytest.mark.parametrize(
    ("loss", "names", "mesh"),
    [
        pytest.param(sampled, TABLES, "4x2 explicit", marks=pytest.mark.slow),
        (scanned, ("table",), "4x2 auto"),  # one table: what several do is in rows/test_exchange.py
    ],
)
def test_rows_aggregated_inside_hosts(loss: Any, names: tuple[str, ...], mesh: str) -> None:
    inner = {f"params/{name}": bx.Rows(aggregate="inner") for name in names}
    strategies = {"data": bx.Hybrid(inner), "model": bx.Hybrid()}
    step = make_step(loss, OPTIMIZERS["adagrad"], mesh, strategies=strategies)
    reading: Any = step._work._reading  # pyright: ignore[reportPrivateUsage]
    groups = reading.packing.groups
    assert [[hop.axes for hop in group.exchange.hops] for group in groups] == [[("model",), ("data",)]] * len(groups)
    assert_as_on_one_device(step, loss, OPTIMIZERS["adagrad"], num_updates=4)


def test_a_row_optimizer_of_ones_own() -> None:
    strategies = {"data": bx.Hybrid(row_optimizers={"params/table": row_adagrad(0.2)})}
    step = make_step(pooled, OPTIMIZERS["sgd"], strategies=strategies)
    state, batch = step.init(jax.random.key(3)), make_batch()
    begun, key = as_dense(step, state.params), jax.random.fold_in(copied(state.key), 0)
    gradient = jax.jit(jax.grad(lambda params: pooled(params, batch, key)[0]))(begun)["table"]
    state, _ = step.update(state, batch)
    sums = 0.1 + np.square(gradient).mean(1)
    expected = begun["table"] - 0.2 * gradient / np.sqrt(sums + 1e-7)[:, None]
    np.testing.assert_allclose(as_dense(step, state.params)["table"], expected, rtol=2e-5, atol=1e-6)
    # The others move as the step's optimizer says, and one that mixes elements leaves only them dense.
    step = make_step(pooled, optax.lamb(1e-3), strategies=strategies)
    assert placed(step)["params/table"] == {"rows"}
    assert placed(step)["params/other"] == {"replicated"}


@functools.cache
def overridden() -> bx.Step:
    """A step that two tests read and train by: it keeps no state."""
    return make_step(pooled, OPTIMIZERS["adagrad"], strategies={"data": bx.DataParallel({"params/table": bx.Rows()})})


def test_data_parallel_may_be_overridden_too() -> None:
    assert placed(overridden())["params/table"] == {"rows"}
    assert placed(overridden())["params/other"] == {"replicated"}


@pytest.mark.slow  # tables by rows are in test_hybrid.py
def test_what_overrides_data_parallel_trains_as_on_one_device() -> None:
    assert_as_on_one_device(overridden(), pooled, OPTIMIZERS["adagrad"], num_updates=2)


# Ids out of range


def clipped(params: Any, batch: Any, key: jax.Array) -> Any:
    return (jnp.take(params["table"], batch["ids"], axis=0, mode="clip") ** 2).sum(-1).mean(), {}


def filled(params: Any, batch: Any, key: jax.Array) -> Any:
    return (jnp.take(params["table"], batch["ids"], axis=0, mode="fill", fill_value=0) ** 2).sum(-1).mean(), {}


def with_wrong_ids(seed: int = 0) -> dict[str, np.ndarray]:
    batch = make_batch(seed)
    batch["ids"][2, 1:3] = ROWS, ROWS + 50
    return batch


@pytest.mark.parametrize("loss", [clipped, filled])
def test_ids_out_of_range_mean_what_the_loss_says(loss: Any) -> None:
    step = make_step(loss, OPTIMIZERS["sgd"])
    state = step.init(jax.random.key(0))
    begun = jax.tree.map(jnp.asarray, as_dense(step, state.params))
    on_one = jax.jit(jax.value_and_grad(lambda params, batch: loss(params, batch, None)[0]))
    expected, gradient = on_one(begun, with_wrong_ids())
    state, metrics = step.update(state, with_wrong_ids())
    assert set(metrics) == {"loss", "row_rounds"}
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)
    moved = begun["table"] - 0.3 * gradient["table"]
    np.testing.assert_allclose(as_dense(step, state.params)["table"], moved, rtol=1e-5, atol=1e-6)


@functools.cache
def raising(loss: Any) -> bx.Step:
    """A step that several tests train by: it keeps no state, but counts its updates."""
    return make_step(loss, OPTIMIZERS["sgd"], strategies={"data": bx.Hybrid(out_of_range="raise")})


def number_of(step: bx.Step, update: int) -> int:
    """Returns the number of an update to come, the first of which is 1."""
    return step._num_updates + update  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("loss", [clipped, pytest.param(filled, marks=pytest.mark.slow)])
def test_ids_out_of_range_raise_some_updates_later(loss: Any) -> None:
    step = raising(loss)
    state, number = step.init(jax.random.key(0)), number_of(step, 2)
    state, metrics = step.update(state, make_batch())
    assert set(metrics) == {"loss", "row_rounds"}
    state, _ = step.update(state, with_wrong_ids())
    for _ in range(LATE_UPDATES - 1):
        state, _ = step.update(state, make_batch())
    wrong = rf"ids out of range: 2 for params/table of {ROWS} rows; .*mode="
    with pytest.raises(DataError, match=rf"the batch of update {number} of this step has {wrong}"):
        step.update(state, make_batch())
    step.update(state, make_batch())  # the state is still valid


def test_settling_looks_at_all_ids() -> None:
    step = raising(clipped)
    number = number_of(step, 1)
    state, _ = step.update(step.init(jax.random.key(0)), with_wrong_ids())
    with pytest.raises(DataError, match=f"the batch of update {number} "):
        step.settled(state)
    step.evaluate(state, with_wrong_ids())
    with pytest.raises(DataError, match=f"the batch of an evaluation behind update {number} "):
        step.settled(state)


def test_the_last_ids_are_looked_at_when_asked_for() -> None:
    step = raising(clipped)
    number = number_of(step, 2)
    state, _ = step.update(step.init(jax.random.key(0)), make_batch())
    step.finish()
    step.update(state, with_wrong_ids())
    with pytest.raises(DataError, match=f"the batch of update {number} "):
        step.finish()
    step.finish()  # it is told once


# Options that cannot work


@pytest.mark.usefixtures("unchecked")
def test_options_that_are_none() -> None:
    with pytest.raises(ArgumentError, match=r'aggregate=.outer.: expected "auto", "inner" or "none"'):
        bx.Rows(aggregate="outer")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ArgumentError, match=r'out_of_range=.drop.: expected "as jax" or "raise"'):
        bx.Hybrid(out_of_range="drop")  # pyright: ignore[reportArgumentType]


def test_options_that_cannot_work() -> None:
    with pytest.raises(ArgumentError, match="combine_bytes=-1: expected a size in bytes"):
        bx.DataParallel(combine_bytes=-1)
    with pytest.raises(ArgumentError, match='aggregate="inner" of Rows needs a table over two axes'):
        make_step(pooled, OPTIMIZERS["sgd"], strategies={"data": bx.Hybrid({"*/table": bx.Rows(aggregate="inner")})})
    with pytest.raises(ArgumentError, match=r"row_optimizers\['\*'\] and another axis gives it otherwise"):
        two = {axis: bx.Hybrid(row_optimizers={"*": row_adagrad(0.1)}) for axis in ("data", "model")}
        make_step(pooled, OPTIMIZERS["sgd"], "4x2 auto", strategies=two)
    with pytest.raises(ArgumentError, match=r"combine_bytes is \[1, 2\]: expected the same in all strategies"):
        two = {"data": bx.Hybrid(combine_bytes=1), "model": bx.DataParallel(combine_bytes=2)}
        make_step(pooled, OPTIMIZERS["sgd"], "4x2 auto", strategies=two)


# Losses that cannot work, or only densely


def assigned(params: Any, batch: Any) -> Any:
    params["table"] = 2 * params["table"]
    return params["table"][batch["ids"]].sum()


def updated_inside(params: Any, batch: Any) -> Any:
    return params["table"].at[batch["ids"][:, 0]].set(0.0)[batch["ids"]].sum()


def by_floats(params: Any, batch: Any) -> Any:
    return params["table"][batch["target"]].sum()


def many_losses(params: Any, batch: Any) -> Any:
    return params["table"][batch["ids"]].sum((1, 2))


def test_losses_that_cannot_work() -> None:
    with pytest.raises(StateError, match="params/table was changed in place by assigned and the change would be lost"):
        make_step(assigned, OPTIMIZERS["sgd"])
    with pytest.raises(TypeError, match="must have integer or boolean type, got indexer with type float32"):
        make_step(by_floats, OPTIMIZERS["sgd"])
    with pytest.raises(ArgumentError, match=r"a loss that is float32\[16\], expected a floating-point scalar"):
        make_step(many_losses, OPTIMIZERS["sgd"])
    step = make_step(updated_inside, OPTIMIZERS["sgd"])
    assert placed(step)["params/table"] == {"replicated"}
    assert "used whole by scatter at test_hybrid_options.py:" in step.plan.variables[-1].why


def test_shards_may_be_empty() -> None:
    def small(key: jax.Array) -> Any:
        return {**init(key), "table": jax.random.normal(key, (3, 6))}  # on 8 devices

    def loss(params: Any, batch: Any, key: jax.Array) -> Any:
        return ((params["table"][batch["ids"] % 3].sum((1, 2)) - batch["target"]) ** 2).mean(), {}

    step = make_step(loss, OPTIMIZERS["momentum"], init=small, strategies={"data": bx.Hybrid({"*/table": bx.Rows()})})
    assert step.init(jax.random.key(0)).params["table"].shape == (1, 8, 6)
    assert_as_on_one_device(step, loss, OPTIMIZERS["momentum"], num_updates=2)


def test_the_combine_threshold_reaches_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def noted(*args: Any, compiler_options: Any = None, **options: Any) -> Any:
        asked.append(compiler_options)
        return compile_on(*args, compiler_options=compiler_options, **options)

    monkeypatch.setattr("braidax.parallel.step.compile_on", noted)
    step = make_step(clipped, OPTIMIZERS["sgd"], strategies={"data": bx.Hybrid(combine_bytes=1 << 20)})
    assert asked[0] == {"xla_gpu_all_reduce_combine_threshold_bytes": 1 << 20}  # of the gradients
    _, metrics = step.update(step.init(jax.random.key(0)), make_batch())
    assert np.isfinite(metrics["loss"])
    with pytest.raises(Exception, match="no_such_option"):
        jax.jit(lambda x: x, compiler_options={"no_such_option": 1})(1.0)  # so an unknown one would have been told


def test_strategies_show_what_they_were_given() -> None:
    assert repr(bx.DataParallel()) == "DataParallel()"
    assert repr(bx.Hybrid(combine_bytes=0)) == "Hybrid(combine_bytes=0)"
    shown = repr(bx.Hybrid({"a*": bx.Replicated()}, row_optimizers={"b*": row_adagrad(0.1)}, out_of_range="raise"))
    assert shown == "Hybrid(overrides={'a*': Replicated()}, row_optimizers=['b*'], out_of_range='raise')"


def test_the_plan_of_options_survives_json() -> None:
    plan = make_step(sampled, OPTIMIZERS["sgd"], "4x2 auto", strategies=BOTH).plan
    assert bx.Plan.from_json(plan.to_json()) == plan
    assert pooled_by("sgd").plan != plan
