"""Other strategies beside a `Pipeline`: each stage's variables lie by them on its own devices."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braidax.parallel as bx
from braidax.checkpoint import Checkpointer, Every
from braidax.errors import ArgumentError
from braidax.parallel.stages.running.feeding import Given
from braidax.parallel.stages.schedules import Schedule, one_forward_one_backward, zero_bubble_h1
from tests.support.parallel.models import refused
from tests.support.parallel.stages.running.cases import Case, check, looped, mlp, pipelined, small_gpt
from tests.support.parallel.stages.running.steps import CLIPPED, make, same_updates

BY_ROWS = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))
SHARDED, ROTATED = bx.FullySharded(min_bytes=0), bx.RotatedTensorParallel(min_bytes=0)
SPLIT = bx.TensorParallel(min_bytes=0)


def gpt_of_32_bits(monkeypatch: pytest.MonkeyPatch) -> Case:
    """The same sums in another order differ by more than 1e-6 in 16 bits."""
    monkeypatch.setattr(jnp, "bfloat16", jnp.float32)
    return small_gpt(4)


def shard_bytes(tree: Any) -> dict[Any, int]:
    """Of each device, the bytes that it holds."""
    found: dict[Any, int] = {}
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            found[shard.device] = found.get(shard.device, 0) + shard.data.nbytes
    return found


def inside(case: Case, strategy: Any, schedule: str = "1F1B", optimizer: Any = CLIPPED, **options: Any) -> Any:
    pipeline = bx.Pipeline(schedule, clock="counted", **options)
    return make(case, {"pipe": pipeline, "data": strategy}, (2, 2), optimizer=optimizer)


def test_each_device_of_a_stage_has_its_part_of_everything() -> None:
    case = looped()
    step = inside(case, SHARDED, "ZB-H1", BY_ROWS)
    born = step.init(jax.random.key(3))
    assert jax.tree.map(lambda leaf: leaf.sharding, born) == step.state_shardings
    gradients = step._work.gradients(born, [Given(leaf, None) for leaf in jax.tree.leaves(case.batch)]).gradients
    for tree in (born.params, gradients, born.opt_state[1][0].mu, born.opt_state[1][0].nu):
        leaves = jax.tree.leaves(tree)
        assert [len(leaf.addressable_shards) for leaf in leaves] == [2] * 5
        assert {2 * shard.data.nbytes == leaf.nbytes for leaf in leaves for shard in leaf.addressable_shards} == {True}
    sums = [on.spec for one in step._work.run.stage_programs for on in one.sums_on]
    assert sums == [jax.P(None, "data")] * 2 + [jax.P("data")] + [jax.P(None, "data")] * 2
    state = same_updates(case, step, optimizer=BY_ROWS)
    held, whole = shard_bytes(state.params), sum(leaf.nbytes for leaf in jax.tree.leaves(state.params))
    assert held.keys() == {*jax.devices()[:4]}
    assert sum(held.values()) == whole
    assert {(one.path, *map(str, one.placements)) for one in step.plan.variables} == {
        ("params/head", "stage 1", "gathered, dim 0"),
        ("params/layers/b", "stages 0, 1", "gathered, dim 1"),
        ("params/layers/w", "stages 0, 1", "gathered, dim 1"),
    }
    plan, pipe = bx.Plan.from_json(step.plan.to_json()), {"pipe": bx.Pipeline("ZB-H1", clock="counted")}
    again = make(case, {**pipe, "data": SHARDED}, (2, 2), optimizer=BY_ROWS, plan=plan, microbatches=1)
    assert again.plan == step.plan
    with refused(
        ArgumentError, "plan has params/head as stage 1, gathered, dim 0, and strategies make it stage 1, repl"
    ):
        make(case, {**pipe, "data": bx.DataParallel()}, (2, 2), optimizer=BY_ROWS, plan=plan, microbatches=1)


def test_what_devices_do_not_divide_is_padded_and_saved_without(tmp_path: Any) -> None:
    case = looped(width=5)
    step = inside(case, bx.FullySharded({"*": bx.Gathered(1)}, min_bytes=0), optimizer=BY_ROWS)
    state = same_updates(case, step, optimizer=BY_ROWS, count=1)
    assert [leaf.shape[1] for leaf in jax.tree.leaves(state.params)] == [6] * 5
    assert state.true_shapes["params/head"] == (5, 5)
    assert state.true_shapes["opt_state/1/0/mu/layers/b/1"][1:] == (5,)
    with Checkpointer(tmp_path, Every(1)) as saver:
        saver.save(state)
        saver.wait()
        restored = saver.restore(step.state_specs)
    jax.tree.map(np.testing.assert_array_equal, restored.params, state.params)


def test_what_another_stage_reads_stays_whole() -> None:
    step = inside(mlp(2), SHARDED)
    told = {one.path: (str(one.placements[1]), one.why) for one in step.plan.variables}
    assert told["params/tied"] == (
        "replicated", "pipe: pipeline: with the stage that reads it; another stage reads it, too: whole",
    )  # fmt: skip
    assert told["params/unread"] == ("replicated", "no stage reads it: whole")
    assert told["params/w0"][0] == "gathered, dim 0"


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1F1B", "ZB-H1", "ZB-V"])
@pytest.mark.parametrize("strategy", [SHARDED, ROTATED, SPLIT], ids=["sharded", "rotated", "split"])
@pytest.mark.parametrize("recompute", [False, True], ids=["", "again"])
def test_layers_with_dropout_a_mask_and_tied_weights(schedule: str, strategy: Any, recompute: bool) -> None:
    case = mlp(4)
    state = same_updates(case, inside(case, strategy, schedule, recompute=recompute))
    assert any(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(state.params))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [SHARDED, ROTATED, SPLIT], ids=["sharded", "rotated", "split"])
@pytest.mark.parametrize("schedule", ["1F1B", "ZB-H1"])
def test_layers_of_a_loop_with_tied_embeddings(strategy: Any, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = gpt_of_32_bits(monkeypatch)
    state = same_updates(case, inside(case, strategy, schedule, BY_ROWS), optimizer=BY_ROWS)
    assert any("data" in str(leaf.sharding.spec) for leaf in jax.tree.leaves(state.params["layers"]))


THREE_AXES = [
    (case, data, model, ("1F1B", "ZB-H1", "ZB-V")[number % 3])
    for number, (case, data, model) in enumerate(
        (case, data, model)
        for case in ("loop", "layers", "gpt")
        for data in ("data", "sharded")
        for model in ("split", "rotated")
    )
]
INSIDE = {"data": bx.DataParallel(), "sharded": SHARDED, "split": SPLIT, "rotated": ROTATED}


def of_three_axes(case: Case, data: str, model: str, schedule: str, optimizer: Any) -> Any:
    """Two stages of two times two devices; checks gradients against one device."""
    strategies = {"pipe": bx.Pipeline(schedule, clock="counted"), "data": INSIDE[data], "model": INSIDE[model]}
    step = make(case, strategies, (2, 2, 2), optimizer=optimizer)
    state = step.init(jax.random.key(3))
    given = [Given(leaf, None) for leaf in jax.tree.leaves(case.batch)]
    found = step._work.whole_params(step._work.gradients(state, given).gradients)
    params = jax.tree.map(jnp.asarray, step.whole_params(state))
    key = jax.random.wrap_key_data(jnp.array(np.array(jax.random.key_data(jax.random.fold_in(state.key, 0)))))
    gradients, _, _ = replace(case, params=params, key=key).expected(4)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=0, atol=1e-6), found, gradients)
    return step


def test_two_axes_divide_what_a_stage_has() -> None:
    case = looped()
    step = of_three_axes(case, "sharded", "rotated", "ZB-H1", BY_ROWS)
    assert {(one.path, *map(str, one.placements)) for one in step.plan.variables} == {
        ("params/head", "stage 1", "gathered, dim 0", "rotated, dim 1"),
        ("params/layers/b", "stages 0, 1", "gathered, dim 1", "gathered, dim 1"),
        ("params/layers/w", "stages 0, 1", "gathered, dim 2", "gathered, dim 1"),
    }
    state = step.init(jax.random.key(3))
    held = shard_bytes((state.params, state.opt_state[1][0].mu, state.opt_state[1][0].nu))
    of_stages = [3 * 4 * (3 * (16 + 4)), 3 * 4 * (16 + 4 + 16)]  # layers and head, 4 wide, with both moments
    assert held == {device: of_stages[at // 4] // 4 for at, device in enumerate(jax.devices()[:8])}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "data", "model", "schedule"), THREE_AXES)
def test_three_axes(name: str, data: str, model: str, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = {"loop": looped, "layers": lambda: mlp(4), "gpt": lambda: gpt_of_32_bits(monkeypatch)}[name]()
    optimizer = CLIPPED if name == "layers" else BY_ROWS
    same_updates(case, of_three_axes(case, data, model, schedule, optimizer), optimizer=optimizer)


def test_what_an_island_sends_is_divided_along_samples() -> None:
    """Rings hide what descends from the batch: what goes to the next stage, and what is kept."""
    step = inside(mlp(4), ROTATED)
    first = step._work.run.stage_programs[0]
    assert [str(one.placements[1]) for one in step.plan.variables if one.path == "params/w0"] == ["rotated, dim 0"]
    sent = zip(first.stage.outgoing, first.ran_shardings.outgoing, strict=True)
    assert [on.spec for spec, on in sent if spec.ndim == 2] == [jax.P(("data",))] * 2
    assert jax.P(("data",)) in {on.spec for on in first.ran_shardings.kept}


@pytest.mark.parametrize(
    ("make", "schedule"),
    [
        (lambda _: looped(), one_forward_one_backward(2, 4)),
        (lambda _: looped(), zero_bubble_h1(2, 4)),
        pytest.param(gpt_of_32_bits, one_forward_one_backward(2, 4), marks=pytest.mark.slow),
        pytest.param(gpt_of_32_bits, zero_bubble_h1(2, 4), marks=pytest.mark.slow),
    ],
    ids=["loop", "loop in halves", "gpt", "gpt in halves"],
)
def test_gradients_are_summed_over_devices_once_an_update(
    make: Any, schedule: Schedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, texts = make(monkeypatch), dict[tuple[str, int], str]()
    run = pipelined(case, schedule, inner=2)

    def watch(owner: Any, name: str, stage: int, fn: Any, outs: Any) -> None:
        run_it, home = getattr(owner, name), run.homes[stage]

        def call(*args: Any) -> Any:
            if (name, stage) not in texts:
                ins = jax.tree.map(lambda one: one.sharding, args)
                texts[name, stage] = home.compile(fn, ins, outs).lower(*args).compile().as_text()
            return run_it(*args)

        monkeypatch.setattr(owner, name, call)

    for stage, (own, flush) in enumerate(zip(run.stage_programs, run.flushes, strict=True)):
        assert own.in_parts == (*range(len(own.reads)),)
        sent = tuple(own.incoming_shardings[at] for at in own._floats)
        watch(own, "backward", stage, own._backward, (own.sums_on, sent))
        if own.sends_back:
            whole, results = own.forward_backward, own.ran_shardings.results
            halves = whole.halves
            watch(whole, "whole", stage, whole._run, (own.sums_on, sent, results))
            watch(halves, "_to_inputs", stage, halves._inputs, (results, sent, halves.handed_shardings))
            watch(halves, "_to_weights", stage, halves._weights, own.sums_on)
            watch(own, "forward", stage, own._forward, own.ran_shardings)
        watch(flush, "_means", stage, flush._averaged, run.homes[stage].whole)
    check(run, case, case.expected(4))
    last = {("_to_inputs", 1), ("_to_weights", 1)} if schedule.name == "ZB-H1" else {("whole", 1)}
    assert {*texts} == {("backward", 0), *last, ("_means", 0), ("_means", 1)}
    run.observe = lambda operation, outputs: None  # each operation by itself
    check(run, case, case.expected(4))
    counts = {(name, stage): len(re.findall(r" all-reduce(-start)?\(", text)) for (name, stage), text in texts.items()}
    # I hands a norm's sum to W, which is less than what it is made of: it is summed over devices where it is made.
    handed = {("_to_inputs", 1)} if make is gpt_of_32_bits and schedule.name == "ZB-H1" else set[Any]()
    of_loss = {("whole", 1), ("_to_inputs", 1)}  # as many as in the forward pass
    forward = counts.pop(("forward", 1))
    assert counts == {
        key: int(key[0] == "_means" or key in handed) + forward * (key in of_loss) for key in texts if key in counts
    }
    assert not any(name in text for text in texts.values() for name in ("all-gather", "reduce-scatter", "all-to-all"))


class Own:
    """A strategy of a user's own, which leaves all whole."""

    splits_batch, place = True, bx.DataParallel().place

    def __repr__(self) -> str:
        return "Own()"


REFUSED: Mapping[str, tuple[Any, str]] = {
    "own": (
        Own(), r"strategies\['data'\] is Own\(\), which is not run inside of stages yet: beside a Pipeline "
        "expected one of DataParallel, FullySharded, Hybrid, RotatedTensorParallel, TensorParallel",
    ),
    "nothing": (bx.FullySharded({"params/none": bx.Replicated()}), "overrides.'params/none'. names no variable"),
    "taken apart": (bx.FullySharded({"params/layers/w": bx.Gathered(0)}), "asks for dim 0 of params/layers/w, which a"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_run_inside_is_refused(name: str) -> None:
    strategy, words = REFUSED[name]
    with refused(ArgumentError, words):
        inside(looped(), strategy, optimizer=BY_ROWS)
