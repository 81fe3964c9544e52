"""What the plan of a pipeline says, and what it is good for."""

import functools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import braidax
import braidax.parallel as bx
from braidax.errors import ArgumentError
from braidax.parallel.plan.planned.stages import PlannedPart
from braidax.parallel.stages import planning
from braidax.parallel.stages.schedules import Kind, Simulation, simulate, zero_bubble_h1
from braidax.parallel.stages.schedules.dependencies import Dependencies
from braidax.parallel.stages.segments import Clock, counted
from braidax.report import Report
from braidax.spans import Trace
from tests.support.parallel.models import refused, specs
from tests.support.parallel.stages.running.cases import Case, looped, mlp
from tests.support.parallel.stages.running.steps import init_of, make

ADAM = optax.adam(1e-2)
MACHINE = bx.Machine(1e9, {"pipe": bx.Link(1e6, 1e-3), "data": bx.Link(1e5)}, memory_bytes=1 << 20)


def planned(case: Case, pipeline: Any = None, **options: Any) -> Any:
    pipeline = bx.Pipeline(clock="counted") if pipeline is None else pipeline
    return make(case, {"pipe": pipeline, **options.pop("others", {})}, optimizer=ADAM, metrics=(), **options)


@pytest.fixture(scope="module")
def looped_step() -> Any:
    return planned(looped())


@functools.cache
def of_schedule(name: str) -> Any:
    """A step that several tests read, and train by: it keeps no state."""
    return planned(looped(), bx.Pipeline(name, clock="counted"))


def test_it_holds_stages_schedule_and_verdict(looped_step: Any) -> None:
    step, found = looped_step, looped_step.plan.pipeline
    assert (found.axis, found.inner_devices, found.clock) == ("pipe", 1, "counted")
    assert [one.device for one in found.stages] == [0, 1]
    assert found.stages[0].border is None
    assert found.stages[1].begins == str(step.cut.borders[0])
    rows = [{part.path: part.rows for part in stage.variables} for stage in found.stages]
    middle = rows[0]["params/layers/w"][1]
    assert rows[0] == {"params/layers/b": (0, middle), "params/layers/w": (0, middle)}
    assert rows[1] == {"params/layers/b": (middle, 4), "params/layers/w": (middle, 4), "params/head": None}
    each, seconds = [one.costs for one in found.stages], step.cut.seconds
    assert [one.forward_seconds for one in each] == [one.forward for one in seconds]
    assert [one.weight_seconds for one in each] == [one.weights for one in seconds]
    sent = 4 * 4 * 4  # samples of a microbatch, width, float32
    assert (each[0].sent_bytes, each[0].transfer_seconds, each[1].sent_bytes) == (sent, sent / 1e9, 0)
    own = 16 * 4 + (4 - middle) * (16 + 4) * 4
    assert each[1].held_bytes == pytest.approx(4 * own, rel=1e-2)  # Adam's, with its count
    simulation = simulate(found.parsed(), found.costs)
    assert found.schedule.seconds == simulation.makespan_seconds
    assert found.schedule.bubbles == (simulation.bubble(0), simulation.bubble(1))
    assert found.schedule.peak_bytes == (simulation.peak_bytes(0), simulation.peak_bytes(1))
    assert found.parsed().lists == step.schedule.computing().lists
    assert found.verdict.pipeline.seconds == found.schedule.seconds


def test_it_survives_json(looped_step: Any) -> None:
    plan = looped_step.plan
    text = plan.to_json()
    assert bx.Plan.from_json(text) == plan
    assert json.loads(text)["variables"][1]["placements"] == [{"placement": "Staged", "owners": [0, 1], "copies": []}]
    with pytest.raises(ArgumentError, match="text is no plan"):
        bx.Plan.from_json(text.replace('"inner_devices"', '"devices"'))


def test_it_prints_stages_and_where_variables_lie(looped_step: Any) -> None:
    text = str(looped_step.plan)
    assert max(map(len, text.splitlines())) <= 120
    assert re.search(r"^    1 +1 .* before iteration \d of .*cases.py:\d+$", text, re.MULTILINE)
    assert re.search(
        r"^schedule      1F1B: \d.*s a batch; idle \d+, \d+ %; activations at most 768 B, 208 B\.$", text, re.M
    )
    assert re.search(r"^verdict       (pipeline|data parallel|fully sharded): ", text, re.MULTILINE)
    assert re.search(r"^params/head .* stage 1 ", text, re.MULTILINE)
    assert re.search(r"^params/layers/w .* stages 0, 1 ", text, re.MULTILINE)
    assert "replicated" not in text
    assert "Seconds are counted, not measured" in " ".join(text.split())


def test_tied_weights_are_with_one_stage_and_lent_to_another() -> None:
    plan = planned(mlp(4)).plan
    placements = {one.path: one.placements for one in plan.variables}
    assert str(placements["params/tied"][0]) == "stage 0, lent to 1"
    assert PlannedPart("params/tied", None, owned=False) in plan.pipeline.stages[1].variables
    assert str(placements["params/unread"][0]) == "stage 0"
    other = replace(plan, pipeline=None)
    assert "pipeline: 2 stages along pipe, 1F1B → none" in plan.compare(other)


def check_what_is_held(step: Any) -> None:
    """Checks bytes of a plan by ZB-H1 against those that programs hold."""
    one, other = (stage.costs for stage in step.plan.pipeline.stages)
    halves = step._work.run.stage_programs[1].halves
    assert (one.kept_bytes, other.kept_bytes) == (one.activation_bytes + one.sent_bytes, halves.kept_bytes)
    assert other.kept_bytes <= other.activation_bytes
    first, second = 2 * one.activation_bytes + one.sent_bytes, other.activation_bytes + other.kept_bytes
    assert step.plan.pipeline.schedule.peak_bytes == (first, second)
    room = one.held_bytes + first - 1
    with refused(ArgumentError, rf"^memory_bytes={room}: device 0 .* and at most {first} of activations by .* 'ZB-H1'"):
        planned(looped(), bx.Pipeline("ZB-H1", clock="counted", memory_bytes=room))


def test_a_plan_is_followed_and_nothing_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = looped()
    first = of_schedule("ZB-H1")
    plan = bx.Plan.from_json(first.plan.to_json())
    check_what_is_held(first)
    monkeypatch.setattr("braidax.parallel.pipelined_step.agreed_stages", None)
    again = planned(case, bx.Pipeline(), plan=plan, microbatches=1)
    assert again.plan == plan
    assert again.schedule.lists == first.schedule.lists
    assert again.cut == replace(first.cut, stages=again.cut.stages, costs=again.cut.costs)
    assert str(again.cut.borders[0]) == str(first.cut.borders[0])
    states = [one.update(one.init(jax.random.key(0)), case.batch)[0] for one in (first, again)]
    for one, other in zip(*(jax.tree.leaves(state.params) for state in states), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_plan_of_something_else_is_refused(looped_step: Any) -> None:
    plan, case, other = looped_step.plan, looped(), mlp(4)
    first, second = plan.pipeline.stages
    pipe = {"pipe": bx.Pipeline()}

    def changed(**fields: Any) -> bx.Plan:
        return replace(plan, pipeline=replace(plan.pipeline, **fields))

    for given, words in {
        replace(plan, pipeline=None): "plan has no pipeline, and strategies has one",
        changed(axis="data"): r"plan has its stages along 'data', and strategies has the Pipeline along 'pipe'",
        changed(inner_devices=2): "plan's pipeline has inner_devices=2, and the step 1",
        changed(stages=(first,)): "plan's pipeline has num_stages=2, and the step 1",
        changed(stages=(first, replace(second, border=(99, 0)))): "plan cuts another loss",
        changed(stages=(first, replace(second, border=(0, 99)))): "plan cuts another loss",
        changed(
            stages=(replace(first, variables=()), second)
        ): "another loss: stage 0 has nothing in it, .* this loss params/layers/b, params",
        replace(plan, microbatches=8): "plan's pipeline has num_microbatches=4, and the step 8",
    }.items():
        with refused(ArgumentError, words):
            make(case, pipe, optimizer=ADAM, metrics=(), microbatches=1, plan=given)
    with refused(ArgumentError, "plan has a pipeline along 'pipe', and strategies has none: give strategies={'pipe'"):
        bx.parallelize(
            case.loss, ADAM, looped_step.mesh, init=init_of(case), batch=specs(case.batch), plan=plan
        )  # fmt: skip
    with refused(ArgumentError, "plan is of another model: params/head is in the plan, and not in the model"):
        make(other, pipe, optimizer=ADAM, metrics=(), microbatches=1, plan=plan)


def test_links_and_memory_are_those_of_a_machine() -> None:
    step = planned(
        looped(), bx.Pipeline(clock="counted", machine=MACHINE), shape=(2, 2), others={"data": bx.DataParallel()}
    )
    found = step.plan.pipeline
    assert found.inner_devices == 2
    each = [one.costs for one in found.stages]
    assert each[0].sent_bytes == 32  # two of the samples of a microbatch
    assert each[0].transfer_seconds == pytest.approx(1e-3 + 32 / 1e6)
    summed = 4 * 4 * 4 + (4 - found.stages[0].variables[0].rows[1]) * (16 + 4) * 4  # bytes, of stage 1
    assert each[1].weight_seconds == step.cut.seconds[1].weights / 2
    assert found.update_seconds[1] == pytest.approx(summed / 1e5)
    assert each[1].forward_seconds == step.cut.seconds[1].forward / 2
    assert (found.verdict.room_bytes, found.verdict.is_room_known) == (1 << 20, True)
    assert found.verdict.link_bytes_per_second == 1e6
    with refused(ArgumentError, r"machine has permutes along \['data'\], and none along the axis 'pipe'"):
        planned(looped(), bx.Pipeline(machine=replace(MACHINE, permutes={"data": bx.Link(1.0)})))


def test_what_does_not_fit_into_memory_is_refused_or_runs_again() -> None:
    case = looped(8, width=8, samples=128)
    roomy = planned(case).plan.pipeline
    peaks = zip(roomy.stages, roomy.schedule.peak_bytes, strict=True)
    room = max(stage.costs.held_bytes + peak for stage, peak in peaks) * 3 // 4
    tight = planned(case, bx.Pipeline(clock="counted", memory_bytes=room)).plan.pipeline
    assert any(one.recompute for one in tight.stages)
    for stage, peak in zip(tight.stages, tight.schedule.peak_bytes, strict=True):
        assert stage.costs.held_bytes + peak <= room
    with refused(ArgumentError, r"memory_bytes=1000: no cut into 2 stages on 2 devices fits"):
        planned(case, bx.Pipeline(clock="counted", memory_bytes=1000))
    with refused(ArgumentError, r"memory_bytes=\d+: device \d would hold \d+ bytes of parameters, .* schedule 'GPipe'"):
        planned(case, bx.Pipeline("GPipe", clock="counted", memory_bytes=room), microbatches=16)


@pytest.mark.parametrize(("schedule", "backward"), [("1F1B", "whole"), ("ZB-H1", "halves"), ("searched", "halves")])
def test_backward_passes_are_timed_as_the_schedule_runs_them(
    schedule: str, backward: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[str]()

    def clock(*, backward: str) -> Clock:
        asked.append(backward)
        return counted()

    monkeypatch.setattr(planning, "measured", clock)
    planned(looped(), bx.Pipeline(schedule))
    assert {*asked} == {backward}


def test_a_schedule_is_searched_for() -> None:
    case = looped()
    step = planned(case, bx.Pipeline("searched", clock="counted"), microbatches=8)
    found = step.plan.pipeline
    assert found.schedule.name == step.schedule.name == "searched"
    assert found.schedule.bound_seconds <= found.schedule.seconds
    assert found.schedule.seconds <= simulate(zero_bubble_h1(2, 8), found.costs).makespan_seconds
    assert "none is shorter than" in str(step.plan)
    _, metrics = step.update(step.init(jax.random.key(0)), case.batch)
    assert np.isfinite(metrics["loss"])
    with refused(ArgumentError, r"cuts=\['a'\] makes 2 stages, and stages=3: name 2"):
        planned(case, bx.Pipeline("searched", stages=3, cuts=("a",)))
    with refused(ArgumentError, "memory_bytes=0: expected a size in bytes"):
        bx.Pipeline(memory_bytes=0)


def check_order(found: Simulation) -> None:
    """Checks that nothing begins before the one before it on its device has ended, and all that it needs."""
    dependencies = Dependencies(found.schedule)
    ends = {each.operation: each.end for timed in found.timed for each in timed}
    for device, timed in enumerate(found.timed):
        expected = [one for one in found.schedule.lists[device] if one.kind is not Kind.UPDATE]
        assert [each.operation for each in timed] == expected
        before = 0.0
        for each in timed:
            assert each.end >= each.start >= max(before, *(ends[need] for need in dependencies.of(each.operation)), 0.0)
            before = each.end
    assert found.makespan_seconds > 0.0


@pytest.mark.parametrize("name", ["ZB-H1", pytest.param("1F1B", marks=pytest.mark.slow)])
def test_a_step_is_measured_and_drawn_in_text_and_html(name: str, tmp_path: Path) -> None:
    case = looped()
    step = of_schedule(name)
    state = step.init(jax.random.key(0))
    trace = Trace()
    measured = step.measure(state, case.batch, trace=trace)
    check_order(measured)
    assert {lane: total.num_spans for lane, total in trace.totals().items()} == {
        "stage 0": len(measured.timed[0]),
        "stage 1": len(measured.timed[1]),
    }
    assert sum(span.seconds for span in trace.spans) == pytest.approx(
        sum(each.end - each.start for timed in measured.timed for each in timed)
    )
    assert sum(map(len, measured.timed)) == 2 * 4 * (2 if name == "1F1B" else 3)
    path = tmp_path / "timeline.html"
    text = step.plan.timeline(path, measured=measured, width=60)
    heads = [line for line in text.splitlines() if not line.startswith("device")]
    assert [head.partition(":")[0] for head in heads if head] == ["planned", "simulated", "measured"]
    page = path.read_text(encoding="utf-8")
    assert page.count("<title>forward of microbatch 3, stage 1: ") >= 2  # one that took no time is not drawn
    assert f"<h1>2 stages along pipe, {name}</h1>" in page
    assert "planned: every pass takes the same: " in page
    after, _ = step.update(state, case.batch)  # measuring has given nothing up
    assert int(after.step) == 1
    with pytest.raises(ArgumentError, match="batch/y is missing"):
        step.measure(after, {"x": case.batch["x"]})


def test_a_trace_of_fit_has_a_lane_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("braidax.parallel.stages.running.measuring._EVERY", 5)
    case = looped()
    step, other = planned(case, bx.Pipeline("ZB-H1", clock="counted")), of_schedule("ZB-H1")
    source = braidax.open({name: np.concatenate([leaf] * 10) for name, leaf in case.batch.items()})

    def trained(step: Any, trace: Trace | None) -> Any:
        loader = braidax.DataLoader(source, step.mesh, step.batch_shardings, batch_size=16, seed=0, epochs=1)
        report = Report(show="nothing", trace=trace)
        return braidax.fit(step, step.init(jax.random.key(0)), loader, report=report)

    trace = Trace()
    state, untraced = trained(step, trace), trained(other, None)
    jax.tree.map(np.testing.assert_array_equal, state.params, untraced.params)  # who looks on changes nothing
    spans = {lane: [one for one in trace.spans if one.lane == lane] for lane in trace.totals()}
    assert [one.name for one in spans["stages"]] == ["operations of update 4", "operations of update 9"]
    assert [one.name for one in spans["step"]] == [f"step {number}" for number in range(1, 11)]
    for stage in range(2):
        names = [str(one)[1:] for one in step.schedule.lists[stage] if one.kind in (*"FBIW",)]
        assert [one.name for one in spans[f"stage {stage}"]] == names * 2
        assert {one.thread for one in spans[f"stage {stage}"]} == {f"device {stage}"}
    for whole in spans["stages"]:
        end = whole.start + whole.seconds
        inside = [one for stage in range(2) for one in spans[f"stage {stage}"] if whole.start <= one.start <= end]
        assert len(inside) == 2 * 4 * 3
        assert max(one.start + one.seconds for one in inside) == pytest.approx(end)
    assert step._work.run.observe is None


def test_a_plan_without_pipeline_has_no_timeline() -> None:
    plan = replace(planned(looped()).plan, pipeline=None)
    with pytest.raises(ArgumentError, match="the plan has no pipeline, whose stages a timeline shows"):
        plan.timeline()


def test_what_is_planned_is_measured_by_the_clock() -> None:
    step = planned(looped(), bx.Pipeline(), shape=(2, 2), others={"data": bx.DataParallel()})
    found = step.plan.pipeline
    assert found.clock == "measured"
    assert all(one.costs.forward_seconds > 0 for one in found.stages)
    assert 0 < found.stages[0].costs.transfer_seconds < 1
    assert all(one.seconds > 0 for one in found.verdict.others)
    assert "counted" not in str(step.plan)
