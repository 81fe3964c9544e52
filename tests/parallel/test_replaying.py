"""Plans that are given: they build what they say, and what does not fit is named before anything is compiled."""

import json
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braidax.parallel as bx
from braidax.errors import ArgumentError
from tests.support.parallel.models import assert_close, copied, make_mesh

ROWS, WIDTH = 401, 8
BATCH = {"ids": jax.ShapeDtypeStruct((16, 3), jnp.int32), "target": jax.ShapeDtypeStruct((16,), jnp.float32)}


def init(key: jax.Array) -> dict[str, jax.Array]:
    first, second = jax.random.split(key)
    return {"table": jax.random.normal(first, (ROWS, WIDTH)), "kernel": jax.random.normal(second, (WIDTH, 16))}


def loss(params: Any, batch: Any) -> jax.Array:
    hidden = jnp.tanh(params["table"][batch["ids"]].mean(1) @ params["kernel"])
    return ((hidden.sum(-1) - batch["target"]) ** 2).mean()


def samples(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    ids = random.integers(0, ROWS, (16, 3)).astype(np.int32)
    return {"ids": ids, "target": random.normal(size=16).astype(np.float32)}


def make(strategies: Any = None, mesh: str = "4x2 explicit", **options: Any) -> bx.Step:
    options = {"init": init, "batch": BATCH, **options}
    return bx.parallelize(loss, optax.sgd(1e-2, momentum=0.9), make_mesh(mesh), strategies, **options)


BOTH = {"data": bx.Hybrid(dense=bx.FullySharded(min_bytes=0)), "model": bx.DataParallel()}


def test_a_plan_builds_what_it_says() -> None:
    made = make(BOTH, microbatches=2)
    assert {str(one.placements[0]) for one in made.plan.variables} == {"rows", "gathered, dim 0"}
    again = make(plan=bx.Plan.from_json(made.plan.to_json()))
    assert again.plan == made.plan
    assert again.state_shardings == made.state_shardings
    assert again.batch_shardings == made.batch_shardings
    states = [step.init(jax.random.key(0)) for step in (made, again)]
    for seed in range(3):
        states = [step.update(state, samples(seed))[0] for step, state in zip((made, again), states, strict=True)]
    assert_close(copied(states[1].params), copied(states[0].params), atol=0)


def test_a_plan_by_hand() -> None:
    plan = make({"data": bx.DataParallel()}).plan
    kernel, table = plan.variables
    changed = replace(plan, variables=(replace(kernel, placements=(bx.Gathered(1), bx.Gathered(0))), table))
    step = make(plan=changed)
    assert step.state_shardings.params["kernel"].spec == jax.P("model", "data")
    state, metrics = step.update(step.init(jax.random.key(0)), samples(0))
    expected = make({"data": bx.DataParallel()})
    other, _ = expected.update(expected.init(jax.random.key(0)), samples(0))
    assert_close(copied(step.to_dense(state).params), copied(other.params), atol=1e-6)
    assert np.isfinite(metrics["loss"])


def text_of(**changes: Any) -> str:
    return json.dumps({**json.loads(make(BOTH).plan.to_json()), **changes})


def test_a_plan_of_another_mesh_or_model_is_named() -> None:
    plan = make(BOTH).plan
    with pytest.raises(ArgumentError, match=r"plan is for a mesh \{'data': 4, 'model': 2\}, and mesh is \{'data': 8\}"):
        make(plan=plan, mesh="8 auto")
    with pytest.raises(ArgumentError, match="microbatches is 4, and plan has 1: leave it out"):
        make(plan=plan, microbatches=4)
    with pytest.raises(ArgumentError, match=r"another model: params/kernel is in the plan, and not in the model; p"):
        make(plan=plan, init=lambda key: {"table": init(key)["table"], "other": jnp.ones(3)})
    with pytest.raises(ArgumentError, match=r"kernel is float32\[8, 16\] in the plan, and float32\[8, 32\] in "):
        make(plan=plan, init=lambda key: {**init(key), "kernel": jnp.ones((WIDTH, 32))})
    with pytest.raises(ArgumentError, match=r"plan splits the batch over \['host'\]"):
        make(plan=bx.Plan.from_json(text_of(batch_axes=["host"])))


def test_a_placement_that_cannot_be_is_named() -> None:
    plan = make(BOTH).plan
    kernel, table = plan.variables
    for placements, words in (
        (
            (bx.Rows(), bx.Replicated()),
            "plan asks for the rows of params/kernel, and these cannot be exchanged: used",
        ),
        (
            (bx.Gathered(2), bx.Replicated()),
            r"params/kernel cannot be placed by Gathered\(dim=2\) on the axis 'data': dim=2 of a ",
        ),
        ((bx.Replicated(),), "plan places params/kernel on 1 axes, expected 2"),
    ):
        with pytest.raises(ArgumentError, match=words):
            make(plan=replace(plan, variables=(replace(kernel, placements=placements), table)))


def test_without_a_plan_strategies_are_needed() -> None:
    with pytest.raises(ArgumentError, match="parallelize is missing strategies"):
        make()
