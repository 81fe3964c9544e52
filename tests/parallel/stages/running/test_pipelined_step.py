"""`Pipeline`: updates are those of one device with the same microbatches."""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braidax.parallel as bx
from braidax.checkpoint import Checkpointer, Every
from braidax.errors import ArgumentError, SpecError
from braidax.parallel.stages.schedules import one_forward_one_backward
from tests.support.parallel.models import recorded_events, refused, specs
from tests.support.parallel.stages.running.cases import Case, looped, mlp, small_gpt
from tests.support.parallel.stages.running.steps import PIPE, alone, init_of, make, same_updates


@functools.cache
def of_two_stages() -> Any:
    """A step that several tests read, and train by: it keeps no state."""
    return make(mlp(2), PIPE)


def test_what_does_not_depend_on_the_key_is_born_with_its_stage() -> None:
    mesh = jax.make_mesh((2,), ("pipe",))
    step = bx.parallelize(
        lambda params, batch: (jnp.tanh(batch["x"] @ params["first"]) @ params["last"]).mean(),
        optax.sgd(0.1),
        mesh,
        {"pipe": bx.Pipeline(clock="counted")},
        init=lambda key: {"first": jnp.eye(4), "last": jnp.ones((4, 4))},
        batch={"x": jax.ShapeDtypeStruct((8, 4), jnp.float32)},
        microbatches=2,
    )
    state = step.init(jax.random.key(0))
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == step.state_shardings
    assert all(leaf.committed for leaf in jax.tree.leaves(state))
    assert [leaf.device.id for leaf in jax.tree.leaves(state.params)] == [0, 1]


@pytest.mark.slow  # test_replicas.py has it with several devices for a stage
def test_updates_with_clipping_by_the_global_norm() -> None:
    case = mlp(2)
    step = of_two_stages()
    state = same_updates(case, step)
    homes = {name: [*leaf.devices()] for name, leaf in state.params.items()}
    assert homes["w0"] == homes["tied"] == [jax.devices()[0]]
    assert homes["w1"] == [jax.devices()[1]]
    assert state.opt_state[1][0].mu["w1"].devices() == {jax.devices()[1]}
    jax.tree.map(lambda leaf, on: leaf.sharding == on or pytest.fail(f"{leaf.sharding}"), state, step.state_shardings)


@pytest.mark.slow  # below it is beside stages under the mesh that is set, in test_stage_layouts.py beside ZB-H1
def test_stages_beside_data_parallelism() -> None:
    case = mlp(2)
    step = make(case, {"pipe": bx.Pipeline("ZB-H1", clock="counted"), "data": bx.DataParallel()}, (2, 2))
    state = same_updates(case, step)
    assert state.params["w0"].devices() == {*jax.devices()[:2]}
    on = step.batch_shardings["mask"]
    assert on.device_set == {*jax.devices()[2:4]}
    assert on.spec == jax.P(("data",))


@pytest.mark.parametrize(
    ("case", "schedule", "leaf"),
    [
        pytest.param(looped(), "1F1B", "w", marks=pytest.mark.slow),  # below the optimizer has masks
        pytest.param(small_gpt(4), "1F1B", "qkv", marks=pytest.mark.slow),
        pytest.param(small_gpt(4), "ZB-V", "qkv", marks=pytest.mark.slow),
    ],
    ids=["loop", "gpt", "gpt in a V"],
)
def test_layers_of_a_loop_are_divided_among_stages(case: Case, schedule: str, leaf: str) -> None:
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1, momentum=0.9))
    step = make(case, {"pipe": bx.Pipeline(schedule, clock="counted")}, optimizer=optimizer)
    state = same_updates(case, step, optimizer=optimizer)
    assert_divided(step, state, state.opt_state[1][0].trace, leaf)


def assert_divided(step: Any, state: Any, moments: Any, leaf: str) -> None:
    """Checks that each stage has its layers of a weight, and what the optimizer keeps of them."""
    pieces = state.params["layers"][leaf]
    assert sum(piece.shape[0] for piece in pieces) == 4
    assert len(pieces) == step.schedule.num_stages
    assert len(moments["layers"][leaf]) == len(pieces)
    whole = np.concatenate([np.array(piece) for piece in pieces])
    np.testing.assert_array_equal(whole, step.whole_params(state)["layers"][leaf])


def test_it_is_made_and_run_under_the_mesh_that_is_set() -> None:
    case, optimizer = looped(2), optax.sgd(0.1)
    mesh = jax.make_mesh((2, 2), ("pipe", "data"))
    with jax.set_mesh(mesh):
        step: Any = bx.parallelize(
            case.loss, optimizer, strategies={"pipe": bx.Pipeline(), "data": bx.DataParallel()}, init=init_of(case),
            batch=specs(case.batch), microbatches=4,
        )  # fmt: skip
        state, _ = step.update(step.init(jax.random.key(3)), jax.tree.map(np.array, case.batch))
        assert jax.sharding.get_mesh() == mesh
    one = alone(case, optimizer)
    expected, _ = one.update(one.init(jax.random.key(3)), case.batch)
    jax.tree.map(
        lambda got, want: np.testing.assert_allclose(got, want, atol=1e-6), step.whole_params(state), expected.params
    )


@pytest.mark.slow  # test_checkpoints.py has it in other cuts, too
def test_a_checkpoint_is_restored_and_trained_on_bit_for_bit(tmp_path: Path) -> None:
    case = looped()
    step = make(case, PIPE, optimizer=optax.adam(1e-2))
    state, _ = step.update(step.init(jax.random.key(3)), case.batch)
    with Checkpointer(tmp_path, Every(1)) as saver:
        saver.save(state)
        saver.wait()
    expected, _ = step.update(state, case.batch)
    with Checkpointer(tmp_path, Every(1)) as saver:
        restored = saver.restore(step.state_specs)
    got, _ = step.update(restored, case.batch)
    for one, other in zip(jax.tree.leaves(got.params), jax.tree.leaves(expected.params), strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.devices() == other.devices()


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer",
    [optax.lamb(1e-2), optax.adafactor(1e-2, min_dim_size_to_factor=2), optax.apply_if_finite(optax.adam(1e-2), 2)],
    ids=["lamb", "adafactor", "if finite"],
)
def test_an_optimizer_with_norms_or_factors_of_each_variable(optimizer: Any) -> None:
    case = mlp(4)
    same_updates(case, make(case, {"pipe": bx.Pipeline(clock="counted")}, optimizer=optimizer), optimizer=optimizer)


def test_layers_of_a_loop_are_divided_and_masks_of_an_optimizer_are_by_name() -> None:
    mask = {"layers": {"w": True, "b": False}, "head": False}
    case, optimizer = looped(), optax.adamw(1e-2, weight_decay=0.5, mask=mask)
    step = make(case, PIPE, optimizer=optimizer)
    state = same_updates(case, step, optimizer=optimizer)
    assert_divided(step, state, state.opt_state[0].mu, "w")


def test_a_schedule_and_cuts_of_ones_own() -> None:
    case = mlp(4)

    def loss(params: Any, batch: Any, key: Any, variables: Any) -> Any:
        x = jnp.tanh(batch["x"] @ params["w0"])
        with jax.named_scope("second"):
            x = jnp.tanh(x @ params["w1"])
        return ((x.sum(-1) - batch["y"]) ** 2).mean(), {"variables": variables}

    own = Case(loss, {name: case.params[name] for name in ("w0", "w1")}, {}, case.batch)
    schedule = one_forward_one_backward(2, 4)
    step = make(own, {"pipe": bx.Pipeline(schedule, cuts=("second",), clock="counted")})
    state = same_updates(own, step, count=1)
    assert [*state.params["w1"].devices()] == [jax.devices()[1]]


def test_a_batch_or_a_state_of_another_form_is_refused() -> None:
    case = mlp(2)
    step = of_two_stages()
    state = step.init(jax.random.key(0))
    with pytest.raises(ArgumentError, match="batch/mask is missing"):
        step.update(state, {"x": case.batch["x"], "y": case.batch["y"]})
    with pytest.raises(ArgumentError, match=r"state/opt_state.* pass a state that came from this step's init"):
        step.update(replace(state, opt_state=()), case.batch)
    with pytest.raises(ArgumentError, match="make it with jax"):
        step.init(jax.random.key(0, impl="rbg"))


def test_nothing_is_compiled_again_and_the_old_state_gives_its_memory() -> None:
    case = mlp(2)
    step = make(case, {"pipe": bx.Pipeline(clock="counted")}, optimizer=optax.adam(1e-2))
    state, order = step.init(jax.random.key(0)), list[str]()
    first, _ = step.update(state, case.batch, before_apply=lambda: order.append(str(state.step.is_deleted())))
    moved = (state.params, state.opt_state[0].mu, state.opt_state[0].nu)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(moved))
    assert order == ["False"]
    second, _ = step.update(first, case.batch)
    with recorded_events() as events:
        step.update(second, jax.tree.map(np.array, case.batch))
    assert not [event for event in events if "backend_compile" in event or "trace" in event]
    with pytest.raises(ArgumentError, match="state was given up by an earlier update"):
        step.update(first, case.batch)


@pytest.mark.parametrize("shape", [(2,), pytest.param((2, 2), marks=pytest.mark.slow)])
def test_all_programs_of_stages_get_the_options_of_the_compiler(shape: tuple[int, ...]) -> None:
    case, strategies = looped(2), PIPE | ({"data": bx.DataParallel()} if len(shape) > 1 else {})
    step = make(case, strategies, shape, optimizer=optax.sgd(0.1), compiler_options={"tpu": {"no_such_option": 1}})
    assert np.isfinite(step.evaluate(step.init(jax.random.key(0)), case.batch)["loss"])
    step = make(case, strategies, shape, optimizer=optax.sgd(0.1), compiler_options={"cpu": {"no_such_option": 1}})
    for run, args in ((step.init, [jax.random.key(0)]), (step._work.run.stage_programs[1].zeros, [])):
        with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option: 'no_such_option'"):
            run(*args)


REFUSED: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "batch": (PIPE, {"microbatches": 3}, SpecError, "batch/mask has 16 samples, which do not divide into microbatch"),
    "stages": (
        {"pipe": bx.Pipeline("Interleaved1F1B", stages=3, clock="counted")}, {}, ArgumentError,
        "stages=3: expected a multiple of the 2 devices",
    ),
    "too many": (
        {"pipe": bx.Pipeline("Interleaved1F1B", stages=40, clock="counted")}, {}, ArgumentError,
        "num_stages=40: the loss has .* places to cut at",
    ),
    "other stages": ({"pipe": bx.Pipeline(stages=4)}, {}, ArgumentError, "stages=4: schedule '1F1B' has 2 on 2 "),
    "microbatches": (
        {"pipe": bx.Pipeline(one_forward_one_backward(2, 8))}, {}, ArgumentError,
        "schedule '1F1B' has num_microbatches=8, and the step 4",
    ),
    "cuts": (
        {"pipe": bx.Pipeline(cuts=("a", "b"))}, {}, ArgumentError, "makes 3 stages, and schedule '1F1B' has 2 on 2",
    ),
    "trainable": (PIPE, {"trainable": "params/v*"}, ArgumentError, "trainable='params/v\\*' names no variable"),
    "rules": (PIPE, {"rules": {"mlp": "pipe"}}, ArgumentError, "rules is given with a Pipeline"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused(name: str) -> None:
    strategies, options, error, words = REFUSED[name]
    case = mlp(4)
    with refused(error, words):
        make(case, strategies, **options)


def large(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.size > 40, params)


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (optax.lamb(1e-2), r"optimizer takes params/layers/.* as a whole \(reduce_sum over all rows"),
        (optax.adafactor(1e-2, min_dim_size_to_factor=2), r"params/layers/.* \(add with an array whose rows differ"),
        (optax.chain(optax.clip_by_block_rms(1.0), optax.sgd(0.1)), "optimizer takes params/layers/.* as a whole"),
        (optax.adamw(1e-2, mask=large), r"optimizer takes params/layers/w as a whole \(it does something else with"),
    ],
)
def test_an_optimizer_that_takes_a_divided_variable_as_a_whole_is_refused(optimizer: Any, words: str) -> None:
    case = looped()
    with refused(ArgumentError, words):
        make(case, PIPE, optimizer=optimizer)


@pytest.mark.usefixtures("unchecked")
def test_what_is_not_run_in_stages_yet_is_refused() -> None:
    step = of_two_stages()
    with pytest.raises(ArgumentError, match="a decorated step is not cut into stages"):
        bx.parallelize(step.mesh, PIPE)
    with pytest.raises(ArgumentError, match="schedule='2BM': expected one of"):
        bx.Pipeline("2BM")
    with pytest.raises(ArgumentError, match="clock='x': expected"):
        bx.Pipeline(clock="x")  # pyright: ignore[reportArgumentType]
    assert "pipeline: with the stage that reads it" in str(step.plan)
