"""Tables by rows in a decorated step: the numbers of one device, rows on the wire, 1/N of everything on a device."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braidax.parallel as bx
from braidax.errors import ArgumentError, DataError
from braidax.program import collectives_of
from tests.support.parallel.models import assert_close, copied, make_mesh

ROWS, WIDTH, BATCH, LENGTH = 4096, 6, 16, 5
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, eps=1e-4))
STRATEGIES: dict[str, Any] = {
    "one axis": {"data": bx.Hybrid()},
    "beside fully sharded": {"data": bx.Hybrid(dense=bx.FullySharded(min_bytes=0)), "model": bx.DataParallel()},
    "over two axes": {"data": bx.Hybrid(), "model": bx.Hybrid()},
    "over another axis": {"data": bx.DataParallel(), "model": bx.Hybrid(overrides={"state/params/ta*": bx.Rows()})},
}


def init(key: jax.Array) -> Any:
    keys = jax.random.split(key, 4)
    table, odd = jax.random.normal(keys[0], (ROWS, WIDTH)), jax.random.normal(keys[2], (ROWS - 1, WIDTH))
    bias, w = jax.random.normal(keys[1], (ROWS,)), jax.random.normal(keys[3], (WIDTH, 3))
    return {"table": table, "bias": bias, "odd": odd, "w": w}


def loss(params: Any, batch: Any, key: Any) -> Any:
    """Lookups by negative ids, and by ids that no row has, in a loop; one number a row; dropout; arrays as aux."""
    small = params["table"].astype(jnp.float32)
    x = small[batch["ids"]] + params["odd"][batch["ids"]]
    x = x * jax.random.bernoulli(key, 0.8, x.shape)

    def step(total: jax.Array, ids: jax.Array) -> Any:
        return total + jnp.tanh(small.at[ids].get(mode="fill", fill_value=0)).mean(-1), None

    total, _ = jax.lax.scan(step, jnp.zeros(len(x)), batch["more"].T)
    y = jnp.tanh(x.mean(1) @ params["w"]).sum(-1) + params["bias"][batch["ids"][:, 0]] + total
    return ((y - batch["target"]) ** 2).mean(), {"y": y}


def train_step(state: Any, batch: Any) -> Any:
    key, sub = jax.random.split(state["key"])
    (value, aux), gradients = jax.value_and_grad(loss, has_aux=True)(state["params"], batch, sub)
    updates, opt_state = OPTIMIZER.update(gradients, state["opt_state"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    average = optax.incremental_update(params, state["average"], 0.1)
    state = {"params": params, "average": average, "opt_state": opt_state, "key": key}
    return state, {"loss": value, "norm": optax.tree.norm(gradients), **aux}


@jax.jit
def _begun(first: jax.Array, key: jax.Array) -> Any:
    params = init(first)
    return {"params": params, "average": params, "opt_state": OPTIMIZER.init(params), "key": key}


def begin() -> Any:
    return _begun(jax.random.key(0), jax.random.key(4))


def samples(seed: int, beyond: int = 5) -> Any:
    random = np.random.default_rng(seed)
    return {
        "ids": random.integers(-3, ROWS - 1, (BATCH, LENGTH)).astype(np.int32),
        "more": random.integers(0, ROWS + beyond, (BATCH, 3)).astype(np.int32),
        "target": random.normal(size=BATCH).astype(np.float32),
    }


@functools.cache
def on_one_device() -> list[Any]:
    run, state, found = jax.jit(train_step), begin(), list[Any]()
    for seed in range(3):
        state, metrics = run(state, jax.tree.map(jnp.asarray, samples(seed)))
        found.append(copied(metrics))
    return [*found, copied(state)]


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=() if x == "over two axes" else pytest.mark.slow) for x in STRATEGIES],
)
def test_it_trains_as_on_one_device(name: str) -> None:
    step = bx.parallelize(make_mesh("8 auto" if name == "one axis" else "4x2 explicit"), STRATEGIES[name])(train_step)
    state, found = begin(), list[Any]()
    for seed in range(3):
        state, metrics = step(state, samples(seed))
        found.append(copied(metrics))
    for got, expected in zip([*found, copied(state)], on_one_device(), strict=True):
        assert_close(got, expected, atol=1e-5)
    axes = {"over two axes": ("data", "model"), "over another axis": ("model",)}.get(name, ("data",))
    of_table = (state["params"]["table"], state["average"]["table"], state["opt_state"][1][0].mu["table"])
    assert {leaf.sharding.spec for leaf in of_table} == {jax.P(axes if len(axes) > 1 else axes[0])}
    assert metrics["y"].sharding.spec != jax.P()


@functools.cache
def raising() -> Any:
    """A step that two tests read and train by: it keeps no state."""
    return bx.parallelize(make_mesh("8 auto"), {"data": bx.Hybrid(out_of_range="raise")})(train_step)


def test_rows_are_sent_and_the_plan_says_what_is_none() -> None:
    step = raising()
    plan = step.prepare(jax.eval_shape(begin), samples(0))
    known = {one.path: one for one in plan.variables}
    assert [str(known[f"state/params/{name}"].placements[0]) for name in ("table", "bias", "odd")] == [
        "rows", "rows", "replicated",
    ]  # fmt: skip
    assert "8 devices do not divide its 4,095 rows, and the state of a decorated" in known["state/params/odd"].why
    assert known["state/average/table"].why == "follows state/params/table"
    assert known["state/params/table"].costs.held_bytes == ROWS * WIDTH * 4 // 8
    sent = [collectives_of(one.compile().as_text() or "") for one in step.lower()]
    whole = 4 * (ROWS - 1) * WIDTH  # of the table that is none
    others = sum(one.times * one.sent_bytes for one in [*sent[0], *sent[1]]) - 2 * whole * 7 / 8
    assert 0 < others < 16 << 10  # the two tables have 112 KiB


def test_ids_that_no_row_has_are_told() -> None:
    step = raising()
    state, _ = step(begin(), samples(0, beyond=0))
    step.finish()
    wrong = samples(1, beyond=0)
    wrong["more"][3, 1] = ROWS + 7
    state, _ = step(state, wrong)
    told = r"the batch of update 2 of train_step has ids out of range: 1 for state/params/table of 4096 rows"
    with pytest.raises(DataError, match=told):
        step.finish()
    wrapped = step.wrap(lambda state, batch: loss(state["params"], batch, state["key"])[1])
    wrapped(state, wrong)
    with pytest.raises(DataError, match="the batch of <lambda> behind update 2 of train_step has ids"):
        step.finish()


def test_what_cannot_be_by_rows_is_said() -> None:
    with pytest.raises(
        ArgumentError, match=r"'data'\] has row_optimizers for \['state/params/table'\], and a decorated"
    ):
        bx.parallelize(
            make_mesh("8 auto"), {"data": bx.Hybrid(row_optimizers={"state/params/table": bx.rows.row_adagrad(0.1)})}
        )(train_step)
    asked = bx.Hybrid(overrides={"state/params/odd": bx.Rows()})
    with pytest.raises(ArgumentError, match=r"state/params/odd \[4095, 6\] would be padded, and the state of a dec"):
        bx.parallelize(make_mesh("8 auto"), {"data": asked})(train_step).prepare(jax.eval_shape(begin), samples(0))
    alone = bx.parallelize(jax.make_mesh((1,), ("data",)), {"data": bx.Hybrid()})(train_step)
    why = {one.path: one.why for one in alone.prepare(jax.eval_shape(begin), samples(0)).variables}
    assert "there is one device, and the optimizer of a decorated step moves all rows" in why["state/params/table"]


def test_a_frozen_table_and_ids_that_are_computed_are_whole() -> None:
    def step(state: Any, batch: Any) -> Any:
        def loss(table: Any) -> Any:
            chosen = (batch["ids"] + (table[0, 0] > 9)) % ROWS
            return (table[chosen] * state["frozen"][batch["ids"]]).mean()

        value, gradient = jax.value_and_grad(loss)(state["table"])
        return {**state, "table": state["table"] - gradient}, value

    table = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    plan = bx.parallelize(make_mesh("8 auto"), STRATEGIES["one axis"])(step).prepare(
        {"table": table, "frozen": table}, samples(0)
    )
    why = {one.path: (str(one.placements[0]), one.why, one.frozen) for one in plan.variables}
    assert why["state/frozen"] == ("replicated", "data: frozen: replicated, no gradient", True)
    assert why["state/table"][0] == "replicated"


def odd_step(state: Any, batch: Any) -> Any:
    """Gradients in a loop over two parts of the batch, of a table in bfloat16, read in a branch and under a remat; then
    one more, behind an update, in which the table is looked up by the loss alone, and another by the rest, too."""

    def first(small: Any, ids: Any) -> Any:
        rows = jax.checkpoint(lambda table: jnp.tanh(table[ids]))(small)
        more = jax.lax.cond(ids[0, 0] % 2 == 0, lambda: small[ids[:, 0]], lambda: small[ids[:, 1]] * 2)
        return (rows.mean(1) * more).astype(jnp.float32).sum(-1).mean()

    small = state["table"].astype(jnp.bfloat16)
    parts = batch["ids"].reshape(2, 8, LENGTH)
    values, gradients = jax.lax.scan(lambda _, ids: (None, jax.value_and_grad(first)(small, ids)), None, parts)[1]
    table = state["table"] - 0.1 * gradients.astype(jnp.float32).mean(0)

    def second(tables: Any) -> Any:
        return (tables[0][batch["ids"]] * tables[1][batch["more"][:, :1]]).sum(-1).mean()

    value, (of_table, of_other) = jax.value_and_grad(second)((table, state["other"]))
    other = state["other"] - 0.1 * of_other - 1e-3 * state["other"][::-1]
    return {"table": table - 0.1 * of_table, "other": other}, {"first": values.mean(), "second": value}


def test_what_steps_do_with_tables() -> None:
    table = begin()["params"]["table"][:64]
    begun = {"table": table, "other": jnp.cos(table)}
    step = bx.parallelize(make_mesh("8 auto"), {"data": bx.Hybrid(overrides={"state/*": bx.Rows()})})(odd_step)
    state, alone, run = begun, begun, jax.jit(odd_step)
    for seed in range(3):
        batch = {name: np.abs(ids) % 64 for name, ids in samples(seed).items() if name != "target"}
        state, found = step(state, batch)
        alone, expected = run(alone, jax.tree.map(jnp.asarray, batch))
        assert_close(copied(found), copied(expected), atol=1e-3)
    assert_close(copied(state), copied(alone), atol=2e-3)
    assert {leaf.sharding.spec for leaf in state.values()} == {jax.P("data")}
