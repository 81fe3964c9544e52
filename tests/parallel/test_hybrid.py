"""Hybrid steps: tables are exchanged by rows, and every number is that of single-device training."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as linen
import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braidax.parallel as bx
from braidax.errors import ArgumentError
from tests.support.parallel.hybrid import (
    BATCH,
    HYBRID,
    LENGTH,
    LOSSES,
    OPTIMIZERS,
    ROWS,
    WIDTH,
    as_dense,
    as_plain,
    assert_as_on_one_device,
    chained,
    init,
    make_batch,
    make_step,
    placed,
    pooled,
    pooled_by,
    tied,
)
from tests.support.parallel.models import assert_close, copied, make_mesh, recorded_events, single_device

SLOW = pytest.mark.slow  # a case like others, which is compiled and run nightly


# Momentum, which catches up with missed steps, and Adam are in test_hybrid_optimizers.py.
@pytest.mark.parametrize(
    "optimizer", [name if name == "sgd" else pytest.param(name, marks=SLOW) for name in OPTIMIZERS]
)
def test_every_optimizer(optimizer: str) -> None:
    step = pooled_by(optimizer)
    assert placed(step) == {
        "params/kernel": {"replicated"},
        "params/narrow": {"replicated"},
        "params/other": {"rows"},
        "params/table": {"rows"},
    }
    assert_as_on_one_device(step, pooled, OPTIMIZERS[optimizer])


# test_hybrid_options.py has the one in a scan by day, over two axes, and test_hybrid_clipping.py one with microbatches.
@pytest.mark.parametrize(
    ("loss", "mesh", "strategies"),
    [
        pytest.param("pooled", "4x2 explicit", HYBRID, marks=SLOW),
        pytest.param("pooled", "4x2 auto", {"data": bx.Hybrid(), "model": bx.DataParallel()}, marks=SLOW),
        pytest.param("pooled", "4x2 explicit", {"data": bx.Hybrid(), "model": bx.Hybrid()}, marks=SLOW),
        pytest.param("scanned", "8 auto", HYBRID, marks=SLOW),
        pytest.param("scanned", "4x2 explicit", {"data": bx.Hybrid(), "model": bx.Hybrid()}, marks=SLOW),
        pytest.param("sampled", "8 explicit", HYBRID, marks=SLOW),
        pytest.param("sampled", "4x2 auto", {"data": bx.Hybrid(), "model": bx.DataParallel()}, marks=SLOW),
        pytest.param("sampled", "4x2 explicit", {"data": bx.Hybrid(), "model": bx.Hybrid()}, marks=SLOW),
    ],
)
def test_every_loss_on_every_mesh(loss: str, mesh: str, strategies: Any) -> None:
    step = make_step(LOSSES[loss], OPTIMIZERS["adagrad"], mesh, strategies=strategies)
    assert placed(step)["params/table"] >= {"rows"}
    assert_as_on_one_device(step, LOSSES[loss], OPTIMIZERS["adagrad"], num_updates=4)


@SLOW
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    ("mesh", "strategies"),
    [
        ("8 auto", HYBRID),
        ("4x2 explicit", {"data": bx.Hybrid(), "model": bx.Hybrid()}),
        ("4x2 auto", {"data": bx.DataParallel(), "model": bx.Hybrid()}),
    ],
)
def test_every_optimizer_loss_and_mesh(optimizer: str, loss: str, mesh: str, strategies: Any) -> None:
    step = make_step(LOSSES[loss], OPTIMIZERS[optimizer], mesh, strategies=strategies)
    assert placed(step)["params/table"] >= {"rows"}
    assert_as_on_one_device(step, LOSSES[loss], OPTIMIZERS[optimizer])


def test_one_device_moves_only_rows_too() -> None:
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    step = make_step(pooled, OPTIMIZERS["adagrad"], mesh)
    assert placed(step)["params/other"] == {"rows"}
    assert_as_on_one_device(step, pooled, OPTIMIZERS["adagrad"], num_updates=3)


@SLOW  # test_hybrid_clipping.py has them with a norm over all rows
@pytest.mark.parametrize("loss", ["scanned", "sampled"])
def test_microbatches(loss: str) -> None:
    def accumulated(params: Any, batch: Any, key: jax.Array) -> Any:
        parts = [
            LOSSES[loss](params, jax.tree.map(lambda leaf, at=at: leaf[at::2], batch), jax.random.fold_in(key, at))
            for at in range(2)
        ]
        return jax.tree.map(lambda *values: sum(values) / 2, *parts)

    step = make_step(LOSSES[loss], OPTIMIZERS["adagrad"], microbatches=2)
    state, batches = step.init(jax.random.key(3)), [make_batch(seed) for seed in range(3)]
    begun = bx.State(0, as_dense(step, state.params), (), {}, state.key)
    begun = bx.State(
        0, begun.params, OPTIMIZERS["adagrad"].init(jax.tree.map(jnp.asarray, begun.params)), {}, state.key
    )
    expected, _, _ = single_device(as_plain(accumulated), OPTIMIZERS["adagrad"], begun, batches)
    for batch in batches:
        state, _ = step.update(state, batch)
    assert_close(as_dense(step, state.params), copied(expected), atol=1e-5)


def test_tables_are_born_and_kept_in_parts() -> None:
    step = pooled_by("adam")
    state = step.init(jax.random.key(0))
    for name in ("table", "other"):
        num_rows = -(-state.params[name].size // (8 * WIDTH))
        assert state.params[name].shape == (num_rows, 8, WIDTH)
        assert {shard.data.shape for shard in state.params[name].addressable_shards} == {(num_rows, 1, WIDTH)}
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state["rows"]["table"]) if leaf.ndim == 3]
    assert len(moments) == 2
    assert all({shard.data.shape[1] for shard in moment.addressable_shards} == {1} for moment in moments)


def squared(params: Any, batch: Any, key: jax.Array) -> Any:
    return (params["other"][batch["ids"]] ** 2).mean(), {}


@pytest.mark.parametrize("mesh", ["8 auto", "8 explicit"])
def test_no_device_makes_a_whole_table(mesh: str) -> None:
    num_rows = 100_000

    def large(key: jax.Array) -> Any:
        return {**init(key), "other": jax.random.normal(key, (num_rows, 16))}

    step = make_step(squared, OPTIMIZERS["sgd"], mesh, init=large)
    compiled = step._init.lower(jax.eval_shape(lambda: jax.random.key(0))).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < num_rows * 16 * 4


@SLOW  # rows/test_traffic.py has the exchange and the update of rows
def test_memory_does_not_grow_with_the_table() -> None:
    def temporary_bytes(num_rows: int) -> int:
        def large(key: jax.Array) -> Any:
            return {**init(key), "other": jax.random.normal(key, (num_rows, WIDTH))}

        lowered = make_step(squared, OPTIMIZERS["adagrad"], init=large).lower()
        return sum(one.compile().memory_analysis().temp_size_in_bytes for one in lowered)

    assert temporary_bytes(400_000) <= temporary_bytes(40_000) + 1024


def test_an_update_compiles_once() -> None:
    step = make_step(pooled, OPTIMIZERS["sgd"])  # what test_every_optimizer has compiled
    state = step.init(jax.random.key(0))
    with jax.log_compiles(False):
        for seed in range(3):
            state, _ = step.update(state, make_batch(seed))
    assert step._gradients._cache_size() == step._apply._cache_size() == 1


# Verdicts


PLANNED: dict[str, tuple[Callable[..., Any], set[str]]] = {
    "no table": (lambda params, batch: ((batch["target"][:, None] @ params["kernel"][:1]) ** 2).mean(), set()),
    "a table that is used whole, too": (tied, set()),
    "tables": (pooled, {"rows"}),
}


@pytest.mark.parametrize("loss", PLANNED)
@pytest.mark.parametrize(
    "optimizer",
    [optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)), optax.sgd(optax.linear_schedule(0, 1, 9), 0.9)],
    ids=["clipped adam", "momentum with a schedule"],
)
def test_planning_compiles_nothing(loss: str, optimizer: optax.GradientTransformation) -> None:
    fn, expected = PLANNED[loss]
    with recorded_events() as events:
        step = make_step(fn, optimizer)
    assert any("jaxpr_trace" in event for event in events)
    assert [event for event in events if "backend_compile" in event] == []
    assert {one for placements in placed(step).values() for one in placements} - {"replicated"} == expected


def test_what_is_also_used_whole_is_dense_and_says_where() -> None:
    step = make_step(tied, OPTIMIZERS["sgd"])
    assert placed(step)["params/table"] == {"replicated"}
    why = next(v.why for v in step.plan.variables if v.path == "params/table")
    assert "gathered by rows" in why
    assert "its gradient is dense" in why
    assert "hybrid.py:" in why


def test_ids_that_parameters_decide_are_dense() -> None:
    step = make_step(chained, OPTIMIZERS["sgd"])
    assert placed(step)["params/other"] == {"replicated"}
    assert placed(step)["params/table"] == {"rows"}
    assert "its ids are computed from parameters" in next(
        v.why for v in step.plan.variables if v.path == "params/other"
    )


@pytest.mark.parametrize("microbatches", [1, pytest.param(2, marks=SLOW)])
def test_prints_change_nothing_and_come_once(microbatches: int) -> None:
    told: list[tuple[str, float]] = []

    def tell(name: str, value: Any) -> None:
        jax.debug.callback(lambda value: told.append((name, float(value))), value)

    @jax.custom_vjp
    def same(x: jax.Array) -> jax.Array:
        tell("inside", x.mean())
        return x

    same.defvjp(lambda x: (same(x), None), lambda _, back: (back,))

    def loss(params: Any, batch: Any, key: jax.Array) -> Any:
        def step(state: jax.Array, ids: jax.Array) -> tuple[jax.Array, None]:
            tell("looked up", params["table"][ids].mean())
            return jnp.tanh(state @ params["kernel"] + params["table"][ids]), None

        tell("ids", batch["ids"].sum())
        jax.debug.print("{}", params["kernel"].sum())
        state, _ = jax.lax.scan(step, jnp.zeros((len(batch["ids"]), WIDTH)), batch["ids"].T)
        return ((same(state).sum(-1) - batch["target"]) ** 2).mean(), {}

    step = make_step(loss, OPTIMIZERS["sgd"], microbatches=microbatches)
    assert placed(step)["params/table"] == {"rows"}
    state = step.init(jax.random.key(0))
    before = as_dense(step, state.params)["table"]
    state, _ = step.update(state, make_batch())
    jax.block_until_ready(state)
    jax.effects_barrier()
    counts = {name: sum(one == name for one, _ in told) for name, _ in told}
    assert counts == {"ids": microbatches, "looked up": LENGTH * microbatches, "inside": microbatches}
    assert sum(value for name, value in told if name == "ids") == make_batch()["ids"].sum()
    means = sorted(value for name, value in told if name == "looked up")
    if microbatches == 1:
        np.testing.assert_allclose(means, sorted(before[make_batch()["ids"]].mean((0, 2))), rtol=1e-4, atol=1e-6)


def test_ids_of_a_callback_with_effects_are_dense() -> None:
    """Asked for ahead of the loss, they would be asked for twice."""

    def loss(params: Any, batch: Any, key: jax.Array) -> Any:
        spec = jax.ShapeDtypeStruct(batch["ids"].shape, batch["ids"].dtype)
        ids = jax.experimental.io_callback(lambda ids: ids, spec, batch["ids"])
        return (params["table"][ids] ** 2).mean(), {}

    step = make_step(loss, OPTIMIZERS["sgd"])
    assert placed(step)["params/table"] == {"replicated"}
    (why,) = [one.why for one in step.plan.variables if one.path == "params/table"]
    assert "callbacks with effects" in why


def test_a_small_table_is_all_reduced() -> None:
    def small(key: jax.Array) -> Any:
        return {**init(key), "narrow": jnp.zeros(3)}

    def loss(params: Any, batch: Any) -> Any:
        return (params["narrow"][batch["ids"] % 3].sum(1) - params["table"][batch["ids"]].sum((1, 2))).mean()

    step = make_step(loss, OPTIMIZERS["sgd"], init=small)
    assert placed(step)["params/narrow"] == {"replicated"}
    assert placed(step)["params/table"] == {"rows"}


def test_an_optimizer_that_mixes_elements_keeps_all_dense() -> None:
    step = make_step(pooled, optax.lamb(1e-3))
    assert placed(step)["params/table"] == {"replicated"}
    assert "optimizer does not move its rows one by one: its update has reduce_sum" in step.plan.variables[-1].why


def test_overrides() -> None:
    strategies = {"data": bx.Hybrid({"params/t*": bx.Replicated(), "params/o*": bx.Rows()})}
    step = make_step(pooled, OPTIMIZERS["sgd"], strategies=strategies)
    assert placed(step)["params/table"] == {"replicated"}
    assert placed(step)["params/other"] == {"rows"}
    with pytest.raises(
        ArgumentError, match=r"overrides\['\*/kernel'\] asks for the rows of params/kernel.*dot_general"
    ):
        make_step(pooled, OPTIMIZERS["sgd"], strategies={"data": bx.Hybrid({"*/kernel": bx.Rows()})})


def test_the_plan_survives_json() -> None:
    plan = pooled_by("sgd").plan
    assert bx.Plan.from_json(plan.to_json()) == plan


@SLOW  # test_whole_tables.py has a table that is trained by rows
def test_evaluation_may_use_a_table_whole() -> None:
    def loss(params: Any, batch: Any, train: bool) -> Any:
        state = params["table"][batch["ids"][:, 0]]
        return (state**2).mean() if train else (state @ params["other"].T).mean()

    step = make_step(loss, OPTIMIZERS["sgd"], strategies={"data": bx.Hybrid({"params/other": bx.Replicated()})})
    state = step.init(jax.random.key(0))
    dense = as_dense(step, state.params)
    got = step.evaluate(state, make_batch())["loss"]
    expected = (dense["table"][make_batch()["ids"][:, 0]] @ dense["other"].T).mean()
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)

    def other(params: Any, batch: Any, train: bool) -> Any:
        state = params["table"][batch["ids"][:, 0]]
        return (state**2).mean() if train else (params["table"] ** 2).mean()

    step = make_step(other, OPTIMIZERS["momentum"])
    state = step.init(jax.random.key(0))
    for seed in range(2):
        state, _ = step.update(state, make_batch(seed))
    whole = as_dense(step, step.settled(state).params)["table"]
    np.testing.assert_allclose(step.evaluate(state, make_batch())["loss"], (whole**2).mean(), rtol=1e-5)


class Bag(linen.Module):
    @linen.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        return linen.Dense(1)(linen.Embed(ROWS, WIDTH)(ids).mean(1))[:, 0]


def of_a_module(params: Any, batch: Any, key: jax.Array) -> Any:
    return ((Bag().apply(params, batch["ids"]) - batch["target"]) ** 2).mean(), {}


@functools.cache
def module_step() -> bx.Step:
    """A step that two tests read and train by: it keeps no state."""
    ids = jnp.zeros((BATCH, LENGTH), jnp.int32)
    return make_step(of_a_module, OPTIMIZERS["adagrad"], init=lambda key: Bag().init(key, ids))


def test_a_module_of_flax() -> None:
    assert placed(module_step())["params/params/Embed_0/embedding"] == {"rows"}


@SLOW  # test_step.py trains modules of Flax
def test_a_module_of_flax_trains_as_on_one_device() -> None:
    assert_as_on_one_device(module_step(), of_a_module, OPTIMIZERS["adagrad"], num_updates=3)


def test_where_nothing_is_read_by_rows_its_programs_are_those_of_data_parallelism() -> None:
    def init(key: jax.Array) -> Any:
        return {"kernel": jax.random.normal(key, (8, 4))}

    def loss(params: Any, batch: Any) -> Any:
        return jnp.square(jnp.tanh(batch @ params["kernel"])).mean()

    texts = [
        [made.as_text() for made in bx.parallelize(
            loss, optax.adam(1e-2), make_mesh("8 explicit"), {"data": strategy}, init=init, batch=jnp.zeros((16, 8))
        ).lower()[:2]]
        for strategy in (bx.Hybrid(), bx.DataParallel())
    ]  # fmt: skip
    assert len(texts[0]) == 2
    assert texts[0] == texts[1]
