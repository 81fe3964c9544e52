"""A decorated training step on any mesh is the undecorated one on one device."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import braidax.parallel as bx
from braidax.errors import ArgumentError, SpecError, StateError
from tests.support.parallel.models import (
    ON_MESHES,
    assert_close,
    copied,
    init,
    make_batch,
    make_mesh,
    masked_loss,
    on_one_device,
)

DATA = {"data": bx.DataParallel()}
OPTIMIZER = optax.adamw(1e-2)


class Training(NamedTuple):
    """A state of the user's own making."""

    step: Any
    params: Any
    average: Any
    opt_state: Any
    key: Any


def train_step(state: Training, batch: Any) -> tuple[Training, dict[str, Any]]:
    """Gradient clipping, a moving average, a second look at the batch: all that stands around a gradient."""
    key, sub = jax.random.split(state.key)
    (loss, aux), gradients = bx.value_and_grad(masked_loss, has_aux=True)(state.params, batch, sub)
    norm = optax.tree.norm(gradients)
    gradients = jax.tree.map(lambda leaf: leaf / jnp.maximum(norm, 1.0), gradients)
    updates, opt_state = OPTIMIZER.update(gradients, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    average = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, state.average, params)
    again = masked_loss(params, batch, sub)[0]
    return Training(state.step + 1, params, average, opt_state, key), {
        "loss": loss,
        "norm": norm,
        "again": again,
        **aux,
    }


@functools.cache
def shared() -> Any:
    """A step of which tests take updates; it keeps no state."""
    return bx.parallelize(make_mesh(), DATA)(train_step)


def step_with(mean: Callable[[Any], Any]) -> Callable[[Training, Any], tuple[Training, dict[str, Any]]]:
    """The same as code for `jax.pmap` has it: `mean` is over the devices."""

    def train_step(state: Training, batch: Any) -> tuple[Training, dict[str, Any]]:
        key, sub = jax.random.split(state.key)
        (loss, aux), gradients = bx.value_and_grad(masked_loss, has_aux=True)(state.params, batch, sub)
        updates, opt_state = OPTIMIZER.update(mean(gradients), state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return Training(state.step + 1, params, state.average, opt_state, key), mean({"loss": loss, **aux})

    return train_step


def begin(seed: int = 0) -> Training:
    params = init(jax.random.key(seed))
    # The average starts as the very same arrays.
    return Training(0, params, params, OPTIMIZER.init(params), jax.random.key(seed + 1))


def run(step: Any, state: Any, num: int = 3) -> tuple[Any, list[Any]]:
    metrics: list[Any] = []
    for seed in range(num):
        state, metric = step(state, make_batch(seed))
        metrics.append(metric)
    return state, metrics


@pytest.mark.parametrize("mesh", ON_MESHES)
def test_updates_equal_one_device(mesh: str) -> None:
    expected_state, expected = run(jax.jit(train_step), begin())
    state, got = run(bx.parallelize(make_mesh(mesh), DATA)(train_step), begin())
    assert_close(copied(state), copied(expected_state))
    assert_close(copied(got), copied(expected))
    assert state.params["weight"].sharding.device_set == set(jax.devices())


@pytest.mark.parametrize(
    "wrap",
    [pytest.param(jax.jit, marks=pytest.mark.slow), lambda fn: jax.jit(jax.jit(fn)), nnx.jit],
    ids=["jit", "twice", "nnx"],
)
def test_a_jitted_step_is_opened(wrap: Any) -> None:
    expected_state, expected = run(jax.jit(train_step), begin(), 2)
    state, got = run(bx.parallelize(make_mesh(), DATA)(wrap(train_step)), begin(), 2)
    assert_close(copied(state), copied(expected_state))
    assert_close(copied(got), copied(expected))


@pytest.mark.parametrize("wrap", [pytest.param(lambda fn: fn, marks=pytest.mark.slow), jax.jit], ids=["plain", "jit"])
def test_a_mean_over_the_axis_of_pmap_is_the_value_itself(wrap: Any) -> None:
    expected_state, expected = run(jax.jit(step_with(lambda tree: tree)), begin())
    step = bx.parallelize(make_mesh(), DATA)(wrap(step_with(lambda tree: jax.lax.pmean(tree, "batch"))))
    state, got = run(step, begin())
    assert_close(copied(state), copied(expected_state))
    assert_close(copied(got), copied(expected))


def test_before_apply_runs_between_the_two_and_donation_happens() -> None:
    step = shared()
    state, _ = step(begin(), make_batch())
    before, seen = copied(state), []
    new, _ = step.update(state, make_batch(1), before_apply=lambda: seen.append(copied(state)))
    assert_close(seen[0], before, atol=0)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((state.params, state.average, state.opt_state)))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(new))


def test_a_flax_train_state() -> None:
    def flax_step(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
        loss, gradients = bx.value_and_grad(lambda params: masked_loss(params, batch, jax.random.key(0))[0])(
            state.params
        )
        return state.apply_gradients(grads=gradients), {"loss": loss}

    def fresh() -> TrainState:
        return TrainState.create(apply_fn=None, params=init(jax.random.key(0)), tx=OPTIMIZER)

    expected_state, expected = run(jax.jit(flax_step), fresh())
    parallel = bx.parallelize(make_mesh(), DATA)(flax_step)
    state, got = run(parallel, fresh())
    assert_close(state.params, on_one_device(expected_state.params))
    assert_close(copied(got), copied(expected))
    assert int(state.step) == 3


def test_accumulation_in_a_scan_of_the_user_s_own() -> None:
    def accumulating(state: Any, batch: Any) -> Any:
        halves = jax.tree.map(lambda leaf: jnp.stack([leaf[0::2], leaf[1::2]]), batch)

        def one(total: Any, half: Any) -> Any:
            (loss, _), gradients = bx.value_and_grad(masked_loss, has_aux=True)(state, half, jax.random.key(0))
            return jax.tree.map(jnp.add, total, gradients), loss

        total, losses = jax.lax.scan(one, jax.tree.map(jnp.zeros_like, state), halves)
        return jax.tree.map(lambda leaf, gradient: leaf - 0.1 * gradient, state, total), {"loss": losses.mean()}

    expected_state, expected = run(jax.jit(accumulating), init(jax.random.key(0)))
    state, got = run(bx.parallelize(make_mesh(), DATA)(accumulating), init(jax.random.key(0)))
    assert_close(copied(state), copied(expected_state))
    assert_close(copied(got), copied(expected))


def test_it_is_traced_once_for_each_form() -> None:
    traced: list[int] = []

    @bx.parallelize(make_mesh(), DATA)
    def counting(state: Any, batch: Any) -> Any:
        traced.append(batch["ids"].shape[0])
        loss, gradients = bx.value_and_grad(lambda params: masked_loss(params, batch, jax.random.key(0))[0])(state)
        return jax.tree.map(lambda leaf, gradient: leaf - gradient, state, gradients), loss

    state = init(jax.random.key(0))
    for size in (16, 16, 8, 16, 8):
        state, _ = counting(state, make_batch(size=size))
    assert traced == [16, 8]


def test_plan_and_batch_shardings_need_no_array() -> None:
    step = bx.parallelize(make_mesh(), DATA)(train_step)
    state = jax.eval_shape(begin)
    batch = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), make_batch())
    assert "state/params/weight" in str(step.prepare(state, batch))
    assert step.batch_shardings(batch)["ids"].spec == jax.sharding.PartitionSpec("data")


def test_value_and_grad_is_jax_s_own_outside() -> None:
    params, batch = init(jax.random.key(0)), make_batch()
    ours = jax.jit(bx.value_and_grad(masked_loss, has_aux=True))(params, batch, jax.random.key(1))
    theirs = jax.jit(jax.value_and_grad(masked_loss, has_aux=True))(params, batch, jax.random.key(1))
    assert_close(ours, theirs, atol=0)
    value, gradients = bx.value_and_grad(lambda x, y: x * y, argnums=(0, 1))(3.0, 4.0)
    assert (float(value), [float(g) for g in gradients]) == (12.0, [4.0, 3.0])


made_before = jax.value_and_grad(lambda p: (p["w"] ** 2).sum())


def bad_without_mark(state: Any, batch: Any) -> Any:
    loss, gradients = made_before(state)
    return jax.tree.map(jnp.subtract, state, gradients), loss


def bad_jacobian(state: Any, batch: Any) -> Any:
    return jax.tree.map(jnp.subtract, state, jax.jacrev(lambda p: (p["w"] ** 2).sum())(state)), 1.0


def bad_linear(state: Any, batch: Any) -> Any:
    loss, linear = jax.linearize(lambda p: (p["w"] ** 2).sum(), state)
    (gradients,) = jax.linear_transpose(linear, state)(1.0)
    return jax.tree.map(jnp.subtract, state, gradients), loss


def bad_shape(state: Any, batch: Any) -> Any:
    loss, _ = bx.value_and_grad(lambda p: (p["w"] ** 2).sum())(state)
    return {"w": jnp.ones(3)}, loss


def bad_change(state: Any, batch: Any) -> Any:
    loss, gradients = bx.value_and_grad(lambda p: (p["w"] ** 2).sum())(state)
    state["w"] = state["w"] - gradients["w"]
    return {"w": jnp.zeros(2)}, loss


def good_change(state: Any, batch: Any) -> Any:
    loss, gradients = bx.value_and_grad(lambda p: (p["w"] ** 2).sum())(state)
    state["w"] = state["w"] - 0.25 * gradients["w"]
    return state, loss


@pytest.mark.parametrize(
    ("fn", "state", "batch", "error", "message"),
    [
        (
            bad_without_mark,
            {"w": np.ones(2)},
            make_batch(),
            ArgumentError,
            r"with bx\.value_and_grad .*inside of the step",
        ),
        (
            bad_jacobian,
            {"w": np.ones(2)},
            make_batch(),
            ArgumentError,
            r"with bx\.value_and_grad .*by jax\.jacrev, .* none",
        ),
        (bad_linear, {"w": np.ones(2)}, make_batch(), ArgumentError, r"with bx\.value_and_grad .*jax\.linearize none"),
        (bad_shape, {"w": np.ones(2)}, make_batch(), StateError, r"state/w is float32\[3\], expected float32\[2\]"),
        (bad_change, {"w": np.ones(2)}, make_batch(), StateError, "state/w was changed in place by bad_change"),
        (lambda s, b: s, {"w": np.ones(2)}, make_batch(), ArgumentError, r"returned dict, expected \(state, metrics\)"),
        (bad_shape, {"w": "text"}, make_batch(), ArgumentError, r"state/w is 'text', expected an array"),
        (bad_shape, {"w": np.ones(2)}, make_batch(size=6), SpecError, "batch/ids has 6 samples"),
    ],
)
def test_what_cannot_be_parallelized_is_refused(
    fn: Any, state: Any, batch: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        bx.parallelize(make_mesh(), DATA)(fn)(state, batch)


def test_a_state_changed_in_place_and_returned_is_fine() -> None:
    state, loss = bx.parallelize(make_mesh(), DATA)(good_change)({"w": np.ones(2, np.float32)}, make_batch())
    np.testing.assert_allclose(state["w"], [0.5, 0.5])
    assert float(loss) == 2.0


def test_numbers_and_host_arrays_in_the_state_cost_no_second_trace() -> None:
    traced: list[int] = []

    @bx.parallelize(make_mesh(), DATA)
    def scheduled(state: Any, batch: Any) -> Any:
        traced.append(1)
        loss, gradients = bx.value_and_grad(lambda w: (w.astype(jnp.float32) ** 2).sum())(state["w"])
        assert state["rate"].weak_type
        return {
            "w": state["w"] - state["rate"] * gradients,
            "rate": state["rate"] * 0.5,
            "step": state["step"] + 1,
        }, loss

    state: Any = {"w": jnp.ones(3, jnp.bfloat16), "rate": 0.25, "step": 0}
    for _ in range(3):
        state, _ = scheduled(state, make_batch())
    assert (traced, int(state["step"]), float(state["rate"]), state["w"].dtype) == ([1], 3, 0.03125, jnp.bfloat16)


def test_the_first_state_stays_the_user_s() -> None:
    state = begin()
    shared()(state, make_batch())
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array))


def bad_metrics(state: Any, batch: Any) -> Any:
    loss, _ = bx.value_and_grad(lambda p: (p["w"] ** 2).sum())(state)
    state["w"] = state["w"] + 1
    return {"w": jnp.zeros(2)}, {"loss": loss, "shown": state["w"]}


def test_a_change_that_only_the_metrics_show_is_lost_and_an_error() -> None:
    with pytest.raises(StateError, match="state/w was changed in place by bad_metrics"):
        bx.parallelize(make_mesh(), DATA)(bad_metrics)({"w": np.ones(2, np.float32)}, make_batch())


def test_a_step_has_a_plan_once_it_knows_its_arguments() -> None:
    step = bx.parallelize(make_mesh(), DATA)(train_step)
    with pytest.raises(StateError, match=r"train_step has no plan before .*call prepare\(state, batch\)"):
        _ = step.plan
    plan = step.prepare(jax.eval_shape(begin), make_batch())
    assert step.plan is plan
    step(begin(), make_batch())
    assert step.plan is plan
