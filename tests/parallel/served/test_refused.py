"""What a step with tables on servers refuses, and what becomes of it when a server is lost."""

import os
import re
import signal
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braidax.parallel as bx
from braidax.comm import Communicator
from braidax.errors import ArgumentError, CallFailed, DataError, PeerLost
from braidax.gang import LocalGang
from tests.support.parallel.hybrid import OPTIMIZERS, init, make_batch, pooled, tied
from tests.support.parallel.models import make_mesh, refused, specs

SERVED = {"data": bx.Hybrid(tables="servers")}


def make_step(servers: Any, loss: Any = pooled, optimizer: Any = None, strategies: Any = None, **options: Any) -> Any:
    optimizer = OPTIMIZERS["sgd"] if optimizer is None else optimizer
    batch = options.pop("batch", specs(make_batch()))
    strategies = SERVED if strategies is None else strategies
    return bx.parallelize(
        loss, optimizer, make_mesh("8 explicit"), strategies, init=init, batch=batch, servers=servers, **options
    )


def whole_norm(params: Any, batch: Any, key: jax.Array) -> Any:
    value, aux = pooled(params, batch, key)
    return value + 1e-6 * jnp.square(params["table"]).sum(), aux


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no servers": ({}, "plan has ['other', 'table'] on servers, and servers is None: give parallelize the gang"),
    "no gang": ({"servers": 2}, "servers is 2, expected a gang whose ranks will have the tables"),
    "both places": (
        {"strategies": {"data": bx.Hybrid(tables="servers", overrides={"params/table": bx.Rows()})}},
        "plan has ['params/other'] on servers and ['params/table'] by rows on devices: expected all tables in one",
    ),
    "a table that is used whole": (
        {"loss": whole_norm, "strategies": {"data": bx.Hybrid({"params/table": bx.Served()}, tables="servers")}},
        "the rows of params/table, and these cannot be exchanged",
    ),
    "an optimizer that mixes rows": (
        {"optimizer": optax.lamb(1e-2), "strategies": {"data": bx.DataParallel({"params/table": bx.Served()})}},
        "optimizer does not move its rows one by one",
    ),
    "sums of more than gradients": (
        {"optimizer": optax.chain(optax.sgd(1.0), optax.clip_by_global_norm(1.0), optax.clip_by_global_norm(1.0))},
        "which is on servers, of more than their gradients: expected a sum of these alone",
    ),
    "tables that are late by other numbers": (
        {
            "strategies": {
                "data": bx.Hybrid({"params/table": bx.Served(staleness=1)}, tables=bx.Served(staleness=2)),
            }
        },
        "expected the same for all that are on servers",
    ),
    "frozen": (
        {"trainable": "params/kernel", "strategies": {"data": bx.DataParallel({"params/table": bx.Served()})}},
        "params/table, and these cannot be exchanged: it is frozen",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_served_is_refused(case: str, unchecked: None) -> None:
    options, words = REFUSED[case]
    with refused(ArgumentError, re.escape(words)):
        make_step(options.pop("servers", None), **options)


def test_another_word_than_one_of_the_two(unchecked: None) -> None:
    with pytest.raises(ArgumentError, match=r"tables='server': expected .rows., .servers. or parallel"):
        bx.Hybrid(tables="server")  # pyright: ignore[reportArgumentType]


def test_a_decorated_step_has_no_servers() -> None:
    mesh = make_mesh("8 explicit")

    @bx.parallelize(mesh, {"data": bx.Hybrid(tables="servers", overrides={"state/table": bx.Served()})})
    def step(state: Any, batch: Any) -> Any:
        loss, gradients = bx.value_and_grad(lambda state: jnp.square(state["table"][batch]).mean())(state)
        return jax.tree.map(lambda one, g: one - g, state, gradients), {"loss": loss}

    with pytest.raises(ArgumentError, match="keeps its shapes, and servers have their tables to themselves"):
        step({"table": jnp.ones((800, 4))}, jnp.zeros(8, jnp.int32))


def test_a_pipeline_has_no_servers() -> None:
    mesh = jax.make_mesh((2, 4), ("stage", "data"))
    strategies = {"stage": bx.Pipeline(), **SERVED}
    with pytest.raises(ArgumentError, match="tables on servers, and a Pipeline, which does not take them yet"):
        bx.parallelize(
            pooled, OPTIMIZERS["sgd"], mesh, strategies, init=init, batch=specs(make_batch()), microbatches=2
        )


def test_states_and_batches_that_do_not_fit(gangs: dict[int, LocalGang]) -> None:
    strategies = {"data": bx.Hybrid(tables="servers", out_of_range="raise")}
    with make_step(gangs[1], strategies=strategies) as step:
        with pytest.raises(ArgumentError, match="on its servers have seen 0 updates"):
            step.update(jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), step.state_specs), make_batch())
        first = step.init(jax.random.key(0))
        with pytest.raises(ArgumentError, match="give parallelize the batch="):
            step.update(first, {**make_batch(), "target": np.zeros(3, np.float32)})
        bad = make_batch()
        bad["ids"] = bad["ids"].copy()
        bad["ids"][3, 2] = 10_000
        with pytest.raises(DataError, match="has ids out of range: 1 for params/table of 203 rows; expected 0 <= id"):
            step.update(first, bad)
        state, _ = step.update(first, make_batch())  # what was refused has changed nothing
        with pytest.raises(ArgumentError, match="state is not the last one that this step has returned"):
            step.evaluate(first, make_batch())
        with pytest.raises(ArgumentError, match="table='kernel' is not on servers, expected one of"):
            step.table("kernel")
        assert step.table("table").shape == (203, 6)
        assert int(state.step) == 1
    with make_step(gangs[1]) as again:  # the gang serves the next run
        assert int(again.init(jax.random.key(0)).step) == 0


def own_pid(comm: Communicator) -> int:
    """Returns the process of the rank."""
    return os.getpid()


@pytest.mark.slow  # test_losing.py has both servers of a part, workers/test_losing.py these words
def test_a_server_that_dies_is_told_of_at_once() -> None:
    with LocalGang(2) as gang:
        pids = gang.run(own_pid)
        with make_step(gang) as step:
            state, _ = step.update(step.init(jax.random.key(0)), make_batch())
            step.finish()
            os.kill(pids[1], signal.SIGKILL)
            began = time.monotonic()
            with pytest.raises(PeerLost, match="server 1 of 2 is lost, and its only copy of what it had"):
                for seed in range(20):
                    state, _ = step.update(state, make_batch(seed))
                    step.finish()
            assert time.monotonic() - began < 20


def test_plans_say_what_is_served(gangs: dict[int, LocalGang]) -> None:
    with make_step(gangs[1]) as step:
        table = next(one for one in step.plan.variables if one.path == "params/table")
        assert table.placements == (bx.Served(),)
        assert table.costs.held_bytes == 0
        assert table.costs.sent_bytes
        assert "served" in str(step.plan)
        assert bx.Plan.from_json(step.plan.to_json()) == step.plan
    with make_step(gangs[1], plan=step.plan) as again:
        assert again.plan.variables == step.plan.variables


def test_what_is_also_used_whole_stays_dense() -> None:
    step = make_step(None, lambda params, batch, key: (tied(params, batch), {}))
    assert {str(one.placements[0]) for one in step.plan.variables if one.path == "params/table"} == {"replicated"}


def test_a_server_without_memory_is_named_and_the_gang_goes_on(gangs: dict[int, LocalGang]) -> None:
    """What could not begin leaves the ranks free for the next step."""

    def huge(key: jax.Array) -> Any:
        return {**init(key), "other": jnp.zeros((1 << 30, 1 << 20))}  # more than can be addressed

    def squared(params: Any, batch: Any) -> Any:
        return jnp.square(params["other"][batch["ids"]]).mean()

    with pytest.raises(CallFailed, match=r"no memory for its part of other, float32.*: give more servers"):
        bx.parallelize(
            squared,
            OPTIMIZERS["sgd"],
            make_mesh("8 explicit"),
            SERVED,
            init=huge,
            batch=specs(make_batch()),
            servers=gangs[1],
        )
    with make_step(gangs[1]) as step:
        assert int(step.init(jax.random.key(0)).step) == 0
