"""`trainable=` over stages: what is frozen has no gradient and no optimizer's state, and lies where it is read."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braidax.parallel as bx
from braidax.errors import ArgumentError
from braidax.parallel import pipelined_step
from tests.support.parallel.models import refused, specs
from tests.support.parallel.stages.running.cases import Case, looped, mlp
from tests.support.parallel.stages.running.steps import init_of, make

CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2, weight_decay=0.1))
ALONE = "params/head"
"""The first stage has nothing that is trained."""


def coded(samples: int = 16) -> Case:
    """Layers in a loop, of which whole numbers and their scales are frozen, beside small ones that are trained."""

    def layer(x: Any, weights: Any) -> Any:
        whole = weights["code"].astype(jnp.float32) * weights["scale"]
        return jnp.tanh(x @ whole + x @ weights["down"] @ weights["up"]), None

    def loss(params: Any, batch: Any, variables: Any) -> Any:
        x, _ = jax.lax.scan(layer, batch["x"], params["layers"])
        return (((x @ params["head"]).sum(-1) - batch["y"]) ** 2).mean(), {"variables": variables}

    random = np.random.default_rng(0)
    shapes = {"scale": (4, 1, 1), "down": (4, 4, 2), "up": (4, 2, 4)}
    layers = {name: jnp.asarray(random.normal(size=shape), jnp.float32) / 2 for name, shape in shapes.items()}
    layers["code"] = jnp.asarray(random.integers(-3, 4, (4, 4, 4)), jnp.int8)
    batch = {"x": random.normal(size=(samples, 4)).astype(np.float32), "y": np.ones(samples, np.float32)}
    return Case(loss, {"layers": layers, "head": jnp.eye(4)}, {}, batch)


def same_training(case: Case, trainable: Any, schedule: str = "1F1B", inner: Any = None, **options: Any) -> Any:
    """Checks two updates against one device. **Returns:** the step and its last state."""
    told: dict[str, Any] = {"clock": "counted", **options}
    strategies = {"pipe": bx.Pipeline(schedule, **told)} | ({"data": inner} if inner else {})
    given: dict[str, Any] = {"trainable": trainable, "metrics": ("grad_norm",), "microbatches": 4}
    step = make(case, strategies, (2, 2) if inner else (2,), optimizer=CLIPPED, **given)
    one, batch = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1]), specs(case.batch)
    apart: dict[str, Any] = {"init": init_of(case), "batch": batch, **given}
    other = bx.parallelize(case.loss, CLIPPED, one, {"data": bx.DataParallel()}, **apart)
    state, wanted = step.init(jax.random.key(3)), other.init(jax.random.key(3))
    begun = step.whole_params(state)
    for _ in range(2):
        state, metrics = step.update(state, case.batch)
        wanted, expected = other.update(wanted, case.batch)
        for name, value in expected.items():
            np.testing.assert_allclose(metrics[name], value, rtol=1e-5, atol=2e-6, err_msg=name)
    params = step.whole_params(state)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6), params, wanted.params)
    frozen = [one.path.removeprefix("params/") for one in step.plan.variables if one.frozen]
    same = {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for (path, a), b in zip(jax.tree.leaves_with_path(begun), jax.tree.leaves(params), strict=True)
        if np.array_equal(a, b)
    }
    assert same >= {*frozen}
    return step, state


@pytest.mark.slow
def test_layers_are_frozen_and_a_stage_may_have_nothing_that_is_trained() -> None:
    step, state = same_training(looped(), ALONE, "ZB-H1")
    assert [leaf.shape for leaf in jax.tree.leaves(state.opt_state)] == [(), (4, 4), (4, 4)]
    programs = step._work.run.stage_programs
    assert [[spec.shape for spec in one.specs] for one in programs] == [[], [(4, 4)]]
    assert [one.path for one in step.plan.variables if one.frozen] == ["params/layers/b", "params/layers/w"]


def test_whole_numbers_lie_with_their_stages_on_shards_and_are_not_trained() -> None:
    trained = ("params/head", "params/layers/down", "params/layers/up")
    _, state = same_training(coded(), trained, inner=bx.FullySharded(min_bytes=0))
    code = state.params["layers"]["code"]
    assert [one.dtype for one in code] == [jnp.int8] * 2
    assert {one.sharding.shard_shape(one.shape)[1:] for one in code} == {(2, 4)}
    assert len(jax.tree.leaves(state.opt_state)) == 1 + 2 * (1 + 2 * 2)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1F1B", "ZB-V"])
@pytest.mark.parametrize("trainable", ["params/w*", ["params/tied", "params/b1"]], ids=["others", "tied"])
@pytest.mark.parametrize("inner", [None, bx.DataParallel(), bx.FullySharded(min_bytes=0), bx.RotatedTensorParallel()])
def test_weights_that_two_stages_read(trainable: Any, schedule: str, inner: Any) -> None:
    same_training(mlp(4), trainable, schedule, inner)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"recompute": True}, {"clock": "measured"}])
def test_layers_of_a_loop_with_frozen_ones(options: Any) -> None:
    same_training(coded(), ["params/head", "params/layers/up"], "ZB-H1", **options)


def test_schedules_that_do_not_flush_are_refused_before_anything_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(pipelined_step, "agreed_stages")
    model, pipeline = looped(), bx.Pipeline("PipeDream", clock="counted")
    with refused(ArgumentError, "trainable is given, and schedule 'PipeDream' does not flush, which is not run yet"):
        make(model, {"pipe": pipeline}, optimizer=optax.sgd(0.1), trainable=ALONE)
