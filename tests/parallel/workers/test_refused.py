"""What ParameterServers cannot do is said before anybody waits."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import braidax.parallel as bx
from braidax.errors import ArgumentError, DataError
from braidax.gang import LocalGang
from tests.support.parallel.workers import teams
from tests.support.parallel.workers.teams import BATCH, batches, init, loss, make_step, one_device, spec

PS = bx.ParameterServers()
MEETING = bx.Meeting("127.0.0.1:1", b"", "a job", "tcp", 1.0, num_servers=2, num_workers=3)


def of_variables(params: Any, batch: Any, key: jax.Array, variables: Any) -> Any:
    return loss(params, batch, key)[0], {"variables": {"seen": variables["seen"] + 1}}


def mixed(gradients: Any, params: Any) -> Any:
    """Moves a kernel by columns of what is on another server."""
    deep = gradients["deep"]
    return {**gradients, "deep": {**deep, "kernel": deep["kernel"] + gradients["words"].sum(0)}}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no servers": ({"servers": None}, "strategies has ParameterServers, and servers is None"),
    "no gang": ({"servers": 2}, "servers is 2, expected a gang"),
    "no worker": ({"servers": MEETING}, r"meeting of 3 workers that does not say which this is: expected servers=meet"),
    "variables": (
        {"loss_fn": of_variables, "init": lambda key: (init(key), {"seen": jnp.zeros(())})},
        "loss_fn asks for variables, which ParameterServers does not take",
    ),
    "more of others than numbers": (
        {"optimizer": optax.chain(optax.stateless(mixed), optax.sgd(0.1)), "loss_fn": teams.dense_loss},
        r"optimizer moves \[.*\] on server \d by the gradient of words, which lies on another: expected one that",
    ),
    "sums over more than gradients, where others push": (
        {
            "optimizer": optax.chain(optax.adam(0.1), optax.clip_by_global_norm(1.0)),
            "loss_fn": teams.dense_loss,
            "strategies": {"data": bx.ParameterServers(staleness=None)},
        },
        r"optimizer moves \[.*\] on server \d by opt_state/.*, which lies on another: expected one that",
    ),
    "two axes": (
        {"strategies": {"data": PS, "model": bx.TensorParallel()}, "mesh": (1, 1)},
        "strategies has ParameterServers and 1 more: expected it alone",
    ),
}


def test_a_decorated_step_has_no_parameter_servers() -> None:
    with pytest.raises(
        ArgumentError, match="strategies has ParameterServers, and a decorated step keeps its variables"
    ):
        bx.parallelize(jax.make_mesh((1,), ("data",)), {"data": PS})
    with pytest.raises(ArgumentError, match="servers was given, and a decorated step keeps its variables in its own"):
        bx.parallelize(  # pyright: ignore[reportCallIssue]
            jax.make_mesh((1,), ("data",)), {"data": bx.DataParallel()}, servers=MEETING
        )


def test_a_pipeline_has_no_parameter_servers() -> None:
    with pytest.raises(
        ArgumentError, match="on servers, and a Pipeline, which does not take them yet: expected Hybrid"
    ):
        bx.parallelize(
            loss,
            optax.sgd(0.1),
            jax.make_mesh((1, 1), ("data", "stage")),
            {"data": PS, "stage": bx.Pipeline()},
            init=init,
            batch=spec(BATCH),
        )


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused(name: str, unchecked: None) -> None:
    given, words = REFUSED[name]
    shape = given.get("mesh")
    mesh = one_device() if shape is None else jax.make_mesh(shape, ("data", "model"), devices=jax.devices()[:1])
    options: dict[str, Any] = {
        "loss_fn": loss,
        "optimizer": optax.sgd(0.1),
        "strategies": {"data": PS},
        "init": init,
        "batch": spec(BATCH),
        "servers": MEETING.of_worker(0),
        **given,
        "mesh": mesh,
    }
    first = [options.pop(one) for one in ("loss_fn", "optimizer", "mesh", "strategies")]
    with pytest.raises(ArgumentError, match=words):
        bx.parallelize(*first, **options)


def test_options_that_cannot_be(gangs: dict[int, LocalGang]) -> None:
    with pytest.raises(ArgumentError, match=r"staleness=-1: expected a number of updates, 0 or more, or None"):
        bx.ParameterServers(staleness=-1)
    with pytest.raises(ArgumentError, match="copies=0"):
        bx.ParameterServers(copies=0)
    with pytest.raises(ArgumentError, match=r"worker 3 of 3: expected 0 <= number < 3"):
        MEETING.of_worker(3)
    words = "workers=0: expected how many train"
    with pytest.raises(ArgumentError, match=words), bx.open_meeting(gangs[1], workers=0):
        pass
    with pytest.raises(ArgumentError, match="copies=2 of Served, and there are 1 servers"):
        make_step(gangs[1], bx.ParameterServers(copies=2))


def test_a_step_says_what_does_not_fit(gangs: dict[int, LocalGang]) -> None:
    with make_step(gangs[1], bx.ParameterServers(out_of_range="raise")) as step:
        batch = batches(1)[0]
        with pytest.raises(ArgumentError, match="expected one that came from this step's init"):
            step.update(step.state_specs, batch)
        with pytest.raises(ArgumentError, match=r"expected one .*: jax.random.key"):
            step.init(jax.random.key(0, impl="rbg"))
        state = step.init(jax.random.key(0))
        with pytest.raises(ArgumentError, match="batch/ids"):
            step.update(state, {**batch, "ids": batch["ids"][:4]})
        with pytest.raises(DataError, match="1 for params/words of 50 rows"):
            ids = batch["ids"].copy()
            ids[0, 0] = 50
            step.update(state, {**batch, "ids": ids})
        later, _ = step.update(state, batch)
        assert int(later.step) == 1
        with pytest.raises(ArgumentError, match=r"state is not the last one that this step has returned.* taken 1 upd"):
            step.update(state, batch)
        step.update(step.meet(state), batch)


def test_others_than_the_first_do_not_save(gangs: dict[int, LocalGang]) -> None:
    def work(number: int, seat: Any) -> Any:
        with make_step(seat) as step:
            if number == 1:
                with pytest.raises(ArgumentError, match=r"worker 1 has step\.variables in a checkpoint"):
                    step.variables.checkpoint_state()

    teams.team(gangs[1], 2, work)
