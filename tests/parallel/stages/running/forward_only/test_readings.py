"""`PipelinedStep.evaluate` and `wrap`: what one device computes, each part where its parameters lie."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braidax as whole
import braidax.parallel as bx
from braidax.errors import ArgumentError, SpecError
from tests.support.parallel.models import recorded_events, specs
from tests.support.parallel.stages.running.cases import Case, looped, mlp, small_gpt
from tests.support.parallel.stages.running.steps import PIPE, make

ADAM = optax.adam(1e-2)
SHARDED, ROTATED = bx.FullySharded(min_bytes=0), bx.RotatedTensorParallel(min_bytes=0)


@functools.cache
def looped_step() -> tuple[Case, Any, Any]:
    """A loss in two stages, and a state."""
    case = looped()
    step = make(case, PIPE, optimizer=ADAM)
    return case, step, step.init(jax.random.key(3))


def same(got: Any, wanted: Any) -> None:
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=2e-6), got, wanted)


def expected(fn: Callable[..., Any], step: Any, state: Any, batch: Any) -> Any:
    """What one device computes."""
    key = jax.random.wrap_key_data(jnp.asarray(np.array(jax.random.key_data(state.key))))
    key = jax.random.fold_in(key, int(state.step))
    given = {"variables": jax.device_get(state.variables), "key": key, "train": False}
    asked = inspect.signature(fn).parameters
    run = functools.partial(fn, **{name: given[name] for name in given if name in asked})
    return jax.jit(run)(step.whole_params(state), batch)


def same_metrics(case: Case, step: Any, state: Any) -> None:
    """Checks metrics of batches of two sizes, with dropout's keys."""
    half = jax.tree.map(lambda leaf: np.array(leaf[:8]), case.batch)
    for batch in (case.batch, half):
        loss, aux = expected(case.loss, step, state, batch)
        wanted = {"loss": loss, **{name: value for name, value in aux.items() if name != "variables"}}
        same(step.evaluate(state, batch), wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "schedule", "inner"),
    [
        (mlp(4), "1F1B", None),
        (looped(), "ZB-V", SHARDED),
        (mlp(4), "ZB-V", bx.DataParallel()),
        (mlp(4), "1F1B", ROTATED),
        (looped(5), "1F1B", bx.TensorParallel(min_bytes=0)),
        (looped(width=5), "1F1B", bx.FullySharded({"*": bx.Gathered(1)}, min_bytes=0)),
        (small_gpt(4), "1F1B", None),
        (small_gpt(4), "1F1B", SHARDED),
    ],
    ids=["tied", "loop, sharded", "tied, data", "tied, rotated", "loop, split", "loop, padded", "gpt", "gpt, sharded"],
)
def test_metrics_are_those_of_one_device(case: Case, schedule: str, inner: Any) -> None:
    strategies = {"pipe": bx.Pipeline(schedule, clock="counted")} | ({"data": inner} if inner else {})
    step = make(case, strategies, (2, 2) if inner else (2,), optimizer=ADAM)
    state, _ = step.update(step.init(jax.random.key(3)), case.batch)
    same_metrics(case, step, state)


def test_each_stage_runs_what_reads_its_variables_and_nothing_is_compiled_again() -> None:
    case, step, state = looped_step()
    same_metrics(case, step, state)
    forward = step._readings.of(None, specs(case.batch)).forward
    read = [[piece.rows for _, piece in one.pieces] for one in forward._parts]
    cut = state.params["layers"]["w"][0].shape[0]
    assert read == [[(0, cut)] * 2, [None, *[(cut, 4)] * 2]]
    with recorded_events() as events:
        again = step.evaluate(state, case.batch)
    assert not [event for event in events if "backend_compile" in event or "trace" in event]
    assert again["loss"].sharding == jax.NamedSharding(step.mesh, jax.P())


def predict(params: Any, batch: Any, key: Any, variables: Any, train: bool) -> Any:
    assert not train
    x, stacked = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), x), batch["x"], params["layers"]["w"])
    x = x * jax.random.bernoulli(key, 0.5, x.shape)
    return {"logits": x @ params["head"], "stacked": stacked, "mean": x.mean(), "count": 7, "seen": variables}


def generate(params: Any, batch: Any) -> Any:
    def token(x: Any, _: Any) -> Any:
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w["w"] + w["b"]), None), x, params["layers"])
        return x @ params["head"], x.sum(-1)

    return jax.lax.scan(token, batch["x"], None, 3)


def same_results(case: Case, step: Any, state: Any) -> None:
    """Checks wrapped functions, also behind an update, which gives up the state."""
    inputs, found, wanted = {"x": np.array(case.batch["x"][:4])}, list[Any](), list[Any]()
    for fn in (predict, generate, lambda params, batch: params):
        run = step.wrap(fn, batch=specs(inputs))
        found.append(run(state, inputs))
        wanted.append(expected(fn, step, state, inputs))
        assert jax.tree.map(lambda leaf: leaf.sharding, found[-1]) == run.out_shardings
    last = {*step._work.run.homes[1].mesh.devices.flat}
    assert found[0]["logits"].devices() == last
    assert found[0]["mean"].devices() == {*step.mesh.devices.flat}
    step.update(state, case.batch)
    same(found, wanted)


def test_functions_of_a_state_are_computed_where_it_lies() -> None:
    case, step, _ = looped_step()
    same_results(case, step, step.init(jax.random.key(3)))


@pytest.mark.slow
@pytest.mark.parametrize("inner", [SHARDED, ROTATED, bx.DataParallel()])
def test_functions_of_a_state_on_several_devices_a_stage(inner: Any) -> None:
    case = looped()
    step = make(case, PIPE | {"data": inner}, (2, 2), optimizer=ADAM)
    same_results(case, step, step.init(jax.random.key(3)))


def test_a_batch_comes_by_a_loader_or_where_the_function_wants_it() -> None:
    case, step, state = looped_step()
    batch = jax.tree.map(np.array, case.batch)
    loader = whole.DataLoader(batch, step.mesh, step.batch_shardings, batch_size=16, seed=None, epochs=1)
    told = whole.evaluate(step, state, loader)
    same(told["loss"], step.evaluate(state, batch)["loss"])
    run = step.wrap(lambda params, batch: (batch["x"] @ params["head"]).sum() + batch["y"].sum())
    assert {on.mesh.devices.item() for on in jax.tree.leaves(run.batch_shardings)} == {jax.devices()[1]}
    wanted = run(state, batch)
    same(run(state, jax.device_put(batch, run.batch_shardings)), wanted)
    same(run(state, jax.device_put(batch, step.batch_shardings)), wanted)


def test_what_does_not_fit_is_refused() -> None:
    case, step, _ = looped_step()
    state = step.init(jax.random.key(3))
    with pytest.raises(SpecError, match="batch/x has 0 samples"):
        step.evaluate(state, jax.tree.map(lambda leaf: leaf[:0], case.batch))
    with pytest.raises(ArgumentError, match="fn <lambda> returned None, expected a PyTree of arrays"):
        step.wrap(lambda params, batch: None)
    run = step.wrap(lambda params, batch: batch["x"] @ params["layers"]["w"][0] @ params["head"])
    with pytest.raises(ArgumentError, match=r"batch/x .* give wrap the batch=\{…\} that it is called with"):
        run(state, jax.tree.map(lambda leaf: leaf[:4], case.batch))
    with pytest.raises(ArgumentError, match="lower is of one program, and over a Pipeline this function is 2"):
        run.lower()
    step.update(state, case.batch)
    for read in (step.evaluate, run):
        with pytest.raises(ArgumentError, match="state was given up by an earlier update"):
            read(state, case.batch)
