"""Stages with different numbers of devices along the axis: they train as one device does, and are planned."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import braidax.parallel as bx
from braidax.checkpoint import Checkpointer, Every
from braidax.errors import ArgumentError
from braidax.parallel.stages.running.executor import Pipelined
from braidax.parallel.stages.running.home import Home, sub_meshes
from braidax.parallel.stages.schedules import (
    Schedule,
    gpipe,
    one_forward_one_backward,
    parse_csv,
    simulate,
    zero_bubble_h1,
)
from tests.support.parallel.models import recorded_events, refused
from tests.support.parallel.stages.running.cases import (
    Case,
    check,
    key_and_batch,
    looped,
    mlp,
    placed,
    small_gpt,
    stages_of,
)
from tests.support.parallel.stages.running.steps import make, same_updates
from tests.support.program.cutting.models import draw

ADAM = optax.adam(1e-2)


def run_of(case: Case, schedule: Schedule, replicas: Sequence[int], recompute: Sequence[bool] = ()) -> Pipelined:
    """A case whose stages have so many devices."""
    program, mesh = case.traced(schedule.num_microbatches), Mesh(np.array(jax.devices()[: sum(replicas)]), ("pipe",))
    stages, meshes = stages_of(program, schedule.num_stages), sub_meshes(mesh, "pipe", replicas)
    return Pipelined(program, stages, schedule, meshes, batch_axes=("pipe",), recompute=recompute)


def same_by_all_schedules(case: Case, replicas: Sequence[int], recompute: Sequence[bool] = ()) -> Pipelined:
    expected, count = case.expected(4), len(replicas)
    run = run_of(case, one_forward_one_backward(count, 4), replicas, recompute)
    check(run, case, expected)
    for make_schedule in (gpipe, zero_bubble_h1):
        check(run.scheduled(make_schedule(count, 4)), case, expected)
    return run


def test_schedules_equal_one_device_and_nothing_is_compiled_again() -> None:
    case = mlp(2)
    run = same_by_all_schedules(case, (2, 1))
    assert [home.mesh.size for home in run.homes] == [2, 1]
    given = *placed(run, case), *key_and_batch(run, case)
    with recorded_events() as events:
        run.gradients(*given)
    assert not [event for event in events if "compile" in event or "trace" in event]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "replicas", "recompute"),
    [
        ("mlp", (1, 2, 1), ()),
        ("mlp", (2, 1, 1), ()),
        ("mlp", (1, 1, 2), (True, False, True)),
        ("mlp", (4, 1), (True, True)),
        ("mlp", (1, 2), ()),
        ("mlp of 6", (3, 2, 1), ()),
        ("mlp of 6", (2, 3), (False, True)),
        ("loop", (2, 1, 1), ()),
        ("loop", (1, 2), ()),
        ("gpt", (1, 2, 1), ()),
        ("gpt", (2, 1), (True, False)),
    ],
)
def test_any_stage_may_have_more_devices(
    name: str, replicas: Sequence[int], recompute: Sequence[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "gpt":  # in 16 bits the same sums in another order differ by more
        monkeypatch.setattr(jnp, "bfloat16", jnp.float32)
    made = {"mlp": mlp(4), "mlp of 6": mlp(4, samples=24), "loop": looped(), "gpt": small_gpt(4)}
    same_by_all_schedules(made[name], replicas, recompute)


@pytest.mark.slow
def test_many_microbatches_on_replicas() -> None:
    """More programs than XLA takes at once for CPU devices that wait for one another."""
    case = mlp(4, samples=128)
    check(run_of(case, gpipe(3, 64), (1, 2, 1)), case, case.expected(64))


def test_arrays_are_laid_out_anew_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where neither number of devices divides the other; nothing goes by way of the host."""
    mesh = Mesh(np.array(jax.devices()[:6]), ("pipe",))
    one, two, three = (Home(each, ("pipe",)) for each in sub_meshes(mesh, "pipe", (1, 2, 3)))
    values = [jnp.arange(48.0).reshape(12, 4), jnp.arange(24).reshape(2, 12), jnp.float32(3), jnp.arange(5)]
    dims = [0, 1, None, None]
    monkeypatch.setattr(type(values[0]), "_value", property(lambda _: pytest.fail("it is read on the host")))
    moved: dict[Any, list[Any]] = {}
    for source, to in ((one, two), (one, three), (two, one), (two, three), (three, one), (three, two)):
        on, wanted = ([home.along(v.shape, d) for v, d in zip(values, dims, strict=True)] for home in (source, to))
        moved[source, to] = [*to.bring(jax.device_put(values, on), source, wanted)]
        assert [array.sharding for array in moved[source, to]] == wanted
    monkeypatch.undo()
    for found in moved.values():
        for array, value in zip(found, values, strict=True):
            np.testing.assert_array_equal(array, value)
            for shard in array.addressable_shards:
                np.testing.assert_array_equal(shard.data, np.array(value)[shard.index])
    with recorded_events() as events:
        one.bring(moved[three, two], two, [one.whole] * 4)
    assert not [event for event in events if "compile" in event or "trace" in event]


def pipe(stages: Any, schedule: Any = "1F1B", **options: Any) -> dict[str, Any]:
    return {"pipe": bx.Pipeline(schedule, stages=stages, clock="counted", **options)}


def test_updates_with_clipping_by_the_global_norm() -> None:
    case = mlp(2)
    step = make(case, pipe((1, 2)), (3,))
    state = same_updates(case, step)
    first, second = jax.devices()[:1], jax.devices()[1:3]
    assert state.params["w0"].sharding == SingleDeviceSharding(first[0])
    assert state.params["w1"].sharding.device_set == state.opt_state[1][0].mu["w1"].sharding.device_set == {*second}
    assert {name: on.device_set for name, on in step.batch_shardings.items()} == {
        "x": {*first}, "mask": {*second}, "y": {*second},
    }  # fmt: skip
    assert step.batch_shardings["mask"].spec == jax.P(("pipe",))
    lie = jax.tree.map(jax.device_put, case.batch, step.batch_shardings)
    _, metrics = step.update(state, lie)
    assert metrics["x"].sharding == NamedSharding(step.batch_shardings["y"].mesh, PartitionSpec(("pipe",)))
    assert step.state_specs.params["w1"].sharding == state.params["w1"].sharding


@pytest.mark.parametrize("count", [16, pytest.param(15, marks=pytest.mark.slow)])
def test_a_batch_is_evaluated_whose_samples_replicas_divide_or_not(count: int) -> None:
    case = looped()
    step = make(case, pipe((1, 2)), (3,), optimizer=ADAM)
    state, batch = step.init(jax.random.key(3)), jax.tree.map(lambda leaf: leaf[:count], case.batch)
    wanted, _ = jax.jit(case.loss)(step.whole_params(state), batch, jax.random.key(0), {})
    np.testing.assert_allclose(step.evaluate(state, batch)["loss"], wanted, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1F1B", "GPipe", "ZB-H1"])
@pytest.mark.parametrize("stages", [(1, 2, 1), (2, 1), (1, 3)])
def test_more_updates(schedule: str, stages: tuple[int, ...]) -> None:
    case = mlp(4, samples=48)
    same_updates(case, make(case, pipe(stages, schedule), (sum(stages),)), count=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "inside",
    [
        bx.DataParallel(), bx.FullySharded(min_bytes=0), bx.RotatedTensorParallel(min_bytes=0),
        bx.TensorParallel(min_bytes=0),
    ],
    ids=lambda one: type(one).__name__,
)  # fmt: skip
@pytest.mark.parametrize("stages", [(2, 1), (1, 2)])
def test_another_axis_divides_each_replica(inside: Any, stages: tuple[int, ...]) -> None:
    case = mlp(4)
    step = make(case, {**pipe(stages, "ZB-H1"), "data": inside}, (3, 2))
    state = same_updates(case, step)
    assert len(state.params["w0"].sharding.device_set) == 2 * stages[0]
    assert [axis.name for axis in step.plan.axes] == ["pipe", "data"]
    assert all(len(one.placements) == 2 for one in step.plan.variables)
    assert "no strategy" not in str(step.plan)
    again = make(
        case,
        {**pipe(None, "ZB-H1"), "data": inside},
        (3, 2),
        plan=bx.Plan.from_json(step.plan.to_json()),
        microbatches=1,
    )
    assert again.plan == step.plan


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["PipeDream, vertical sync", "2BW"])
def test_without_a_flush_they_train_as_with_one_device_a_stage(schedule: str) -> None:
    """Of these two schedules all gradients are late alike, wherever the loss is cut."""
    case, trained = looped(), list[Any]()
    for stages, count in ((None, 2), ((1, 2), 3), ((2, 1), 3)):
        step = make(case, pipe(stages, schedule), (count,), optimizer=ADAM, metrics=())
        state = step.init(jax.random.key(0))
        for _ in range(2):
            state, _ = step.update(state, case.batch)
        trained.append(step.whole_params(state))
    for other in trained[1:]:
        jax.tree.map(lambda one, two: np.testing.assert_allclose(one, two, rtol=0, atol=1e-5), trained[0], other)


@pytest.mark.slow  # test_checkpoints.py has other cuts, and none
def test_a_checkpoint_goes_into_another_cut_and_back_bit_for_bit(tmp_path: Path) -> None:
    case = looped(4)
    two = make(case, pipe((2, 1)), (3,), optimizer=ADAM)
    other = make(case, pipe((1, 2), "GPipe"), (3,), optimizer=ADAM)
    none = make(case, {"pipe": bx.DataParallel()}, (2,), optimizer=ADAM)
    state, files = two.init(jax.random.key(3)), list[bytes]()
    state, _ = two.update(state, case.batch)
    for number, step in enumerate((two, other, none, two)):
        with Checkpointer(tmp_path / str(number), Every(1)) as saver:
            saver.save(state)
            saver.wait()
            state = saver.restore(step.state_specs)
        assert jax.tree.map(lambda leaf: leaf.sharding, state) == step.state_shardings
        (file,) = (tmp_path / str(number)).glob("*/arrays-00000.safetensors")
        files.append(file.read_bytes())
    assert len({*files}) == 1
    shapes = [jax.tree.map(lambda leaf: leaf.shape, step.state_specs.params) for step in (two, other)]
    assert shapes[0] != shapes[1]
    assert int(state.step) == 1


def heavy() -> Case:
    """Light layers, and a head that takes most of the time."""

    def loss(params: Any, batch: Any, variables: Any) -> Any:
        x = batch["x"]
        for at in range(4):
            x = jnp.tanh(x @ params[f"w{at}"])
        x = jnp.tanh(x @ params["head"])
        return ((x.sum(-1) - batch["y"]) ** 2).mean(), {"variables": variables}

    params = {f"w{at}": draw(16, 16, seed=at) / 4 for at in range(4)} | {"head": draw(16, 160, seed=9) / 4}
    return Case(loss, params, {}, {"x": draw(64, 16, seed=50), "y": draw(64, seed=51)})


@pytest.fixture(scope="module")
def heavy_step() -> Any:
    return make(heavy(), pipe("planned"), (4,), optimizer=ADAM)


def test_a_heavy_head_gets_more_devices(heavy_step: Any) -> None:
    found, case = heavy_step.plan.pipeline, heavy()
    assert [one.replicas for one in found.stages] == [1, 3] or [one.replicas for one in found.stages] == [2, 2]
    each = make(case, pipe(None), (4,), optimizer=ADAM).plan.pipeline
    assert found.schedule.seconds < 0.8 * each.schedule.seconds
    three = make(case, pipe(3), (4,), optimizer=ADAM).plan.pipeline
    assert sorted(one.replicas for one in three.stages) == [1, 1, 2]
    assert found.schedule.seconds <= three.schedule.seconds
    told = make(case, pipe(tuple(one.replicas for one in found.stages)), (4,), optimizer=ADAM).plan.pipeline
    assert told == found
    searched = make(case, pipe("planned", "searched"), (4,), optimizer=ADAM).plan.pipeline
    assert searched.schedule.seconds <= found.schedule.seconds
    assert sum(one.replicas for one in searched.stages) == 4
    state = heavy_step.init(jax.random.key(0))
    assert len(state.params["head"].sharding.device_set) == found.stages[-1].replicas


def test_the_plan_tells_of_replicas_and_is_followed(heavy_step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, case = heavy_step.plan, heavy()
    assert bx.Plan.from_json(plan.to_json()) == plan
    monkeypatch.setattr("braidax.parallel.pipelined_step.agreed_stages", None)
    again = make(case, pipe(None), (4,), optimizer=ADAM, plan=plan, microbatches=1)
    assert again.plan == plan
    assert again.state_shardings == heavy_step.state_shardings
    assert again.cut == replace(heavy_step.cut, stages=again.cut.stages, costs=again.cut.costs)
    text = str(plan)
    assert "batch         split over the devices that a stage has along pipe, microbatches=4" in text
    first, second = plan.pipeline.places
    assert (first.start, first.stop, second.stop) == (0, plan.pipeline.stages[0].replicas, 4)
    drawn = plan.timeline(width=40)
    assert f"devices {second[0]}–3 │" in drawn
    assert f" on {len(first)} and {len(second)} devices, 1F1B" in plan.pipeline.short
    fewer = replace(plan.pipeline, stages=(plan.pipeline.stages[0], replace(plan.pipeline.stages[1], replicas=1)))
    monkeypatch.undo()
    fewer_rows = Case(case.loss, case.params, {}, jax.tree.map(lambda leaf: leaf[:20], case.batch))
    three = make(case, pipe((1, 2)), (3,), optimizer=ADAM).plan
    with refused(ArgumentError, r"stages=\(1, 2\): stage 1 has 2 devices, which do not divide the 5 samples"):
        make(fewer_rows, pipe(None), (3,), optimizer=ADAM, plan=three, microbatches=1)
    with refused(ArgumentError, r"plan's pipeline has num_devices=\d, and the step 4: plan anew"):
        make(case, pipe(None), (4,), optimizer=ADAM, plan=replace(plan, pipeline=fewer), microbatches=1)


def test_what_replicas_cost_is_planned() -> None:
    """A third of the head's samples each, and one sum of its gradients an update, over the link of the axis."""
    machine = bx.Machine(1e9, {"pipe": bx.Link(1e7)}, {"pipe": bx.Link(1e6)}, memory_bytes=1 << 20)
    case = mlp(2, samples=48)
    step = make(case, pipe((1, 3), machine=machine), (4,), optimizer=ADAM)
    found, seconds = step.plan.pipeline, step.cut.seconds
    costs = [one.costs for one in found.stages]
    assert costs[1].forward_seconds == seconds[1].forward / 3
    assert costs[0].forward_seconds == seconds[0].forward
    assert costs[0].transfer_seconds == pytest.approx(costs[0].sent_bytes / 1e7)
    own = sum(leaf.num_bytes for leaf in step.cut.stages[1].leaves if leaf.argument == 0)
    assert found.update_seconds == (0.0, pytest.approx(2 * own * 2 / 3 / 1e6))
    assert found.schedule.seconds == simulate(found.parsed(), found.costs).makespan_seconds
    slow = replace(machine, collectives={"pipe": bx.Link(1e3)})
    planned = make(case, pipe("planned", machine=slow), (4,), optimizer=ADAM).plan.pipeline
    assert [one.replicas for one in planned.stages] == [1] * len(planned.stages)  # sums would take too long


REFUSED: dict[str, tuple[Any, int, str]] = {
    "rows": (
        pipe((3, 1)), 4,
        r"stages=\(3, 1\): stage 0 has 3 devices, which do not divide the 4 samples of a microbatch: choose a batch",
    ),
    "sum": (pipe((2, 1)), 4, r"stages=\(2, 1\) are on 3 devices, and the axis has 4: give each device"),
    "several a device": (
        pipe((2, 1, 1), "ZB-V"), 4, r"stages=\(2, 1, 1\): a schedule with several stages a device has them on one each",
    ),
    "planned in a V": (pipe("planned", "ZB-V"), 4, "stages='planned': a schedule with several stages a device has"),
    "csv": (
        pipe((2, 1, 1), parse_csv("0F0,0B0\n1F0,1B0\n")), 4,
        "schedule '.*' has num_devices=2, and the step 3",
    ),
    "no division": (pipe(2), 7, "num_devices=7: they cannot be divided among 2 stages so that each stage's divide the"),
    "fewer cuts": (
        pipe(None, "searched", cuts=("a",)), 4,
        r"cuts=\['a'\] makes 2 stages, fewer than 4 devices: name more, or .* with stages=.planned.",
    ),
    "none": (pipe(0), 4, "stages=0: expected 1 or more"),
    "cuts": (
        pipe((2, 1, 1), cuts=("a",)), 4, r"cuts=\['a'\] makes 2 stages, and schedule '1F1B' has 3 on 3 devices: name 2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused(name: str) -> None:
    strategies, devices, words = REFUSED[name]
    case = mlp(4)
    with refused(ArgumentError, words):
        make(case, strategies, (devices,))


@pytest.mark.usefixtures("unchecked")
def test_stages_that_are_none_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"stages=\(2, 0\): expected for each stage on how many devices it is"):
        bx.Pipeline(stages=(2, 0))
    with pytest.raises(ArgumentError, match=r"stages=\(\): expected for each"):
        bx.Pipeline(stages=())
    with pytest.raises(ArgumentError, match="stages='some': expected a number, numbers of devices, or \"planned\""):
        bx.Pipeline(stages="some")  # pyright: ignore[reportArgumentType]


def test_rows_count_with_what_the_other_axis_divides() -> None:
    case = mlp(4, samples=8)
    words = r"stages=\(2, 1\): stage 0 has 4 devices \(2 for each of 2 along other axes\), which do not divide the 2 sa"
    with refused(ArgumentError, words):
        make(case, {**pipe((2, 1)), "data": bx.DataParallel()}, (3, 2))
