"""Attribution of spans that are known: exact values of each lane, and that lanes are a partition of the step."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braidax.errors import ArgumentError
from braidax.spans import Span, Trace
from braidax.tune import LANES, Attribution, StepTime, attribute

MS = 1e-3


@dataclass(frozen=True)
class Step:
    """What one step of a loop does, in milliseconds: one after the other, and nothing is overlapped."""

    data: float = 1.0
    python: float = 2.0
    gradients: float = 8.0
    stall: float = 0.0
    apply: float = 2.0
    comm: float = 0.0
    rest: float = 0.5
    evaluation: float = 0.0
    saving: float = 0.0


@dataclass
class Run:
    """Writes down what a report would of some steps."""

    process: str = ""
    now: float = 100.0
    spans: list[Span] = field(default_factory=list[Span])

    def add(self, lane: str, name: str, start: float, end: float, thread: str = "MainThread") -> None:
        self.spans.append(Span(lane, name, thread, start, end - start, 0, self.process))

    def timed(self, lane: str, name: str, milliseconds: float, thread: str = "MainThread") -> float:
        start, self.now = self.now, self.now + milliseconds * MS
        self.add(lane, name, start, self.now, thread)
        return start

    def begin(self) -> "Run":
        self.timed("loop", "begin", 0.0)
        return self

    def step(self, number: int, one: Step) -> None:
        first = self.timed("loop", "data wait", one.data)
        begun = self.now
        self.now += one.python * MS
        self.timed("comm", "ask servers", one.comm)
        if one.saving:
            self.add("checkpoint", "persist", self.now, self.now + one.saving * MS, "braidax-checkpoint")
        self.timed("devices", "gradients", one.gradients, "devices")
        if one.stall:
            self.timed("loop", "snapshot stall", one.stall)
        self.add("loop", "dispatch", begun, self.now)
        self.timed("devices", "apply", one.apply, "devices")
        self.add("step", f"step {number}", first, self.now, "devices")
        self.now += one.rest * MS
        if one.evaluation:
            self.timed("loop", "evaluation", one.evaluation)

    def trace(self) -> Trace:
        return traced(self.spans)


def traced(spans: Sequence[Span]) -> Trace:
    trace = Trace()
    trace.take(spans, {})
    return trace


def run(*steps: Step, process: str = "") -> Run:
    found = Run(process).begin()
    for number, one in enumerate((Step(), *steps), 1):
        found.step(number, one)
    return found


def lanes_of(found: StepTime) -> dict[str, float]:
    """Milliseconds by lane, without those that are 0."""
    return {lane: round(seconds / MS, 6) for lane, seconds in found.lanes.items() if seconds > 1e-9}


PLAIN = {"data wait": 1.0, "dispatch": 2.0, "compute": 10.0, "other": 0.5}


@pytest.mark.parametrize(
    ("change", "lane"),
    [
        ({"data": 21.0}, "data wait"),
        ({"python": 22.0}, "dispatch"),
        ({"stall": 20.0}, "snapshot stall"),
        ({"comm": 20.0}, "exposed communication"),
        ({"gradients": 28.0}, "compute"),
        ({"apply": 22.0}, "compute"),
    ],
)
def test_what_takes_longer_is_in_its_own_lane(change: dict[str, float], lane: str) -> None:
    found = attribute(run(Step(), replace(Step(), **change), Step()).trace())
    assert [step.step for step in found.steps] == [1, 2, 3, 4]
    assert lanes_of(found.steps[1]) == PLAIN
    assert lanes_of(found.steps[2]) == {**PLAIN, lane: PLAIN.get(lane, 0.0) + 20.0}
    assert found.steps[2].seconds == pytest.approx(33.5 * MS)
    assert lanes_of(found.steps[3]) == PLAIN


def test_the_rest_of_the_loop_is_other_and_belongs_to_the_next_step() -> None:
    found = attribute(run(Step(rest=20.5), Step()).trace())
    assert lanes_of(found.steps[2]) == {**PLAIN, "other": 20.5}


def test_an_evaluation_is_in_no_step() -> None:
    found = attribute(run(Step(evaluation=500.0), Step()).trace())
    assert found.steps[2].seconds == pytest.approx(13 * MS)
    assert found.steps[2].lanes["other"] == 0.0


def test_what_devices_compute_meanwhile_hides_what_the_loop_waits_for() -> None:
    spans = [
        Span("loop", "begin", "main", 0.0, 0.0, 0),
        Span("step", "step 1", "devices", 0.0, 1.0, 0),
        Span("devices", "gradients", "devices", 1.0, 2.0, 0),  # dispatched ahead
        Span("loop", "data wait", "main", 1.0, 1.75, 0),
        Span("loop", "snapshot stall", "main", 2.75, 0.75, 0),
        Span("devices", "apply", "devices", 3.5, 0.5, 0),
        Span("step", "step 2", "devices", 1.0, 3.0, 0),
    ]
    (_, found) = attribute(traced(spans)).steps
    assert found.seconds == 3.0
    assert found.lanes == dict.fromkeys(LANES, 0.0) | {"compute": 2.5, "snapshot stall": 0.5}


def test_where_several_reasons_hold_the_first_counts() -> None:
    def found(*names: str) -> str:
        spans = [Span("loop", name, "main", 1.0, 1.0, 0) for name in names if name != "comm"]
        spans += [Span("comm", "recv", "main", 1.0, 1.0, 0) for name in names if name == "comm"]
        ends = [Span("step", "step 1", "devices", 0.0, 1.0, 0), Span("step", "step 2", "devices", 1.0, 1.0, 0)]
        begin = Span("loop", "begin", "main", 0.0, 0.0, 0)
        (lane,) = lanes_of(attribute(traced([begin, *spans, *ends])).steps[1])
        return lane

    assert found("dispatch", "comm", "data wait", "snapshot stall") == "snapshot stall"
    assert found("dispatch", "comm", "data wait") == "data wait"
    assert found("dispatch", "comm") == "exposed communication"
    assert found("dispatch") == "dispatch"
    assert found() == "other"


def test_communication_of_other_threads_is_not_the_loop_s() -> None:
    made = run(Step(comm=20.0))
    spans = [one._replace(thread="braidax-served") if one.lane == "comm" else one for one in made.spans]
    assert lanes_of(attribute(traced(spans)).steps[1]) == {**PLAIN, "dispatch": 22.0}


def test_steps_beside_a_checkpoint_are_longer_by_its_interference() -> None:
    quiet, beside = Step(), Step(gradients=13.0, saving=15.0)
    found = attribute(run(quiet, quiet, quiet, beside, beside, quiet).trace())
    assert [round(step.lanes["persist interference"] / MS, 6) for step in found.steps] == [0, 0, 0, 0, 5, 5, 0]
    assert lanes_of(found.steps[4]) == {**PLAIN, "persist interference": 5.0}


@pytest.mark.parametrize(
    ("beside", "expected"),
    [
        (Step(gradients=6.0, saving=8.0), 0.0),  # shorter than those without: not negative
        (Step(gradients=28.0, saving=2.0), 2.0),  # longer than the checkpoint was under way: not more than that
    ],
)
def test_interference_has_bounds(beside: Step, expected: float) -> None:
    found = attribute(run(*[Step()] * 3, beside).trace())
    assert found.steps[4].lanes["persist interference"] == pytest.approx(expected * MS)
    assert found.steps[4].lanes["compute"] == pytest.approx((beside.gradients + beside.apply - expected) * MS)


def test_without_undisturbed_steps_nothing_is_known_of_interference() -> None:
    found = attribute(run(*[Step(gradients=13.0, saving=14.0)] * 5).trace())
    assert {step.lanes["persist interference"] for step in found.steps} == {0.0}


def staged(number: int, busy: Sequence[Sequence[tuple[float, float]]]) -> list[Span]:
    """Operations of devices in the gradients of a step, in milliseconds behind their beginning."""
    made = run(*[Step()] * 3)
    gradients = [one for one in made.spans if one.name == "gradients"][number - 1]
    start = gradients.start
    spans = [Span("stages", f"operations of update {number}", "devices", start, gradients.seconds, 0)]
    for at, each in enumerate(busy):
        spans += [Span(f"stage {at}", "F0", f"device {at}", start + a * MS, (b - a) * MS, 0) for a, b in each]
    return [*made.spans, *spans]


def test_a_bubble_is_the_share_in_which_devices_of_stages_compute_nothing() -> None:
    found = attribute(traced(staged(2, [[(0, 3), (6, 8)], [(3, 6)]])))  # 5 and 3 of 8 ms
    assert lanes_of(found.steps[1]) == {**PLAIN, "compute": 6.0, "bubble": 4.0}
    assert lanes_of(found.steps[3]) == {**PLAIN, "compute": 6.0, "bubble": 4.0}  # the latest that is known


def test_what_devices_still_do_of_the_step_before_is_no_bubble_of_this_one() -> None:
    spans = [
        Span("loop", "begin", "main", 0.0, 0.0, 0),
        Span("step", "step 1", "devices", 0.0, 1.0, 0),
        Span("devices", "gradients", "devices", 1.0, 2.0, 0),
        Span("step", "step 2", "devices", 1.0, 2.0, 0),
        Span("stages", "operations of update 2", "devices", 0.5, 2.5, 0),  # while step 1 was under way
        Span("stage 0", "F0", "device 0", 0.5, 2.5, 0),
        Span("stage 1", "F0", "device 1", 1.5, 1.5, 0),
    ]
    assert lanes_of(attribute(traced(spans)).steps[1]) == {"compute": 1750.0, "bubble": 250.0}


def test_stages_compute_while_their_operations_are_dispatched() -> None:
    spans = [
        Span("loop", "begin", "main", 0.0, 0.0, 0),
        Span("step", "step 1", "devices", 0.0, 1.0, 0),
        Span("loop", "dispatch", "main", 1.0, 3.0, 0),
        Span("loop", "operations", "main", 1.5, 2.0, 0),
        Span("devices", "gradients", "devices", 3.5, 1.5, 0),
        Span("step", "step 2", "devices", 1.0, 4.0, 0),
    ]
    assert lanes_of(attribute(traced(spans)).steps[1]) == {"dispatch": 500.0, "compute": 3500.0}


def test_what_compute_is_longer_than_alone_is_communication() -> None:
    alone = attribute(run(*[Step(gradients=5.0)] * 3).trace())
    found = attribute(run(*[Step()] * 3).trace(), alone=alone)
    assert lanes_of(found.steps[2]) == {**PLAIN, "compute": 7.0, "exposed communication": 3.0}
    slower = attribute(run(*[Step(gradients=50.0)] * 3).trace())
    assert lanes_of(attribute(run(*[Step()] * 3).trace(), alone=slower).steps[2]) == PLAIN
    with pytest.raises(ArgumentError, match="alone has no step behind the first one"):
        attribute(run(Step()).trace(), alone=attribute(run().trace()))


def test_of_several_processes_an_instant_counts_in_which_any_has_no_program() -> None:
    one, late = run(Step(), process="rank 0"), run(Step(data=7.0), process="rank 1")
    ends = {span.name: span.end for span in late.spans if span.lane == "step"}
    waits = [  # the first one's gradients hold a sum over all: they end with those of the other
        span._replace(seconds=span.seconds + 6 * MS) if span.name == "gradients" and span.start > 100.015 else span
        for span in one.spans
    ]
    waits = [
        span._replace(start=span.start + 6 * MS) if span.name == "apply" and span.start > 100.02 else span
        for span in waits
    ]
    waits = [span._replace(seconds=ends[span.name] - span.start) if span.lane == "step" else span for span in waits]
    for traces in (traced([*waits, *late.spans]), [traced(waits), traced(late.spans)]):
        found = attribute(traces)
        assert lanes_of(found.steps[1]) == {**PLAIN, "data wait": 7.0}


def test_a_process_that_is_done_first_is_not_waited_for() -> None:
    first, second = run(Step(), process="rank 0"), run(Step(apply=4.0), process="rank 1")
    assert lanes_of(attribute(traced([*first.spans, *second.spans])).steps[1]) == {**PLAIN, "compute": 12.0}


def test_the_first_step_of_each_session_compiles_and_is_in_no_mean() -> None:
    made = run(Step(), Step())
    made.now += 5.0
    made.begin()
    made.step(4, Step(gradients=900.0))
    made.step(5, Step(data=4.0))
    found = attribute(made.trace())
    assert [(step.step, step.compiles) for step in found.steps] == [
        (1, True), (2, False), (3, False), (4, True), (5, False),
    ]  # fmt: skip
    assert found.steps[3].seconds == pytest.approx(0.905)  # not the time between the sessions
    assert found.mean()["data wait"] == pytest.approx(2 * MS)
    assert found.step_seconds == pytest.approx(14.5 * MS)
    assert found.summary() == "step 14.5 ms: compute 69 %, data wait 14 %, dispatch 14 %, other 3 %"
    assert found.share()["compute"] == pytest.approx(10 / 14.5)


def test_it_is_printed_as_a_table() -> None:
    lines = str(attribute(run(Step(), Step()).trace())).splitlines()
    assert lines[0].split() == ["lane", "a", "step", "share"]
    assert lines[1].split() == ["data", "wait", "1", "ms", "7.4", "%"]
    assert [line.rsplit("  ", 2)[0].split("  ")[0] for line in lines[1:-1]] == list(LANES)
    assert lines[-1].split() == ["step", "13.5", "ms", "mean", "of", "2", "steps"]
    nothing = attribute(run().trace())
    assert nothing.summary() == "no step behind the first one"
    assert nothing.mean() == dict.fromkeys(LANES, 0.0)


def test_it_is_read_as_it_was_written() -> None:
    found = attribute(run(Step(), Step(stall=3.0)).trace())
    assert Attribution.from_json(found.to_json()) == found


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "text is no JSON"),
        ("[]", "text has the format None, not 'braidax attribution 1'"),
        ('{"format": "braidax attribution 2"}', "text has the format 'braidax attribution 2'"),
        ('{"format": "braidax attribution 1", "steps": 3}', "text has steps of type int"),
        ('{"format": "braidax attribution 1", "steps": [3]}', r"text has steps\[0\]=3"),
    ],
)
def test_other_texts_are_refused(text: str, told: str) -> None:
    with pytest.raises(ArgumentError, match=f"{told}.*attribute the trace anew"):
        Attribution.from_json(text)


@pytest.mark.parametrize("bad", [{"seconds": -1}, {"step": 1.5}, {"compiles": 1}, {"lanes": {}}, {"seconds": True}])
def test_steps_that_are_none_are_refused(bad: dict[str, Any]) -> None:
    made = json.loads(attribute(run(Step()).trace()).to_json())
    made["steps"][1] |= bad
    with pytest.raises(ArgumentError, match=r"text has steps\[1\]="):
        Attribution.from_json(json.dumps(made))


def test_a_trace_without_steps_says_what_to_do() -> None:
    with pytest.raises(ArgumentError, match=r"traces\[0\] has no step: expected the trace of a Report"):
        attribute(Trace())
    with pytest.raises(ArgumentError, match="traces is empty"):
        attribute([])


_NAMES = ("data wait", "dispatch", "snapshot stall", "operations", "evaluation", "unknown")
_TIMES = st.floats(0.0, 9.0, allow_nan=False)


@st.composite
def any_spans(draw: st.DrawFn) -> list[Span]:
    """Spans of all kinds, anywhere."""
    places = [("loop", name, "main") for name in _NAMES]
    places += [("devices", "gradients", "devices"), ("devices", "apply", "devices"), ("checkpoint", "persist", "c")]
    places += [("comm", "recv", "main"), ("comm", "recv", "other"), ("stages", "operations of update 4", "devices")]
    places += [("stage 0", "F0", "device 0"), ("stage 1", "B0", "device 1"), ("loop", "begin", "main")]
    processes = draw(st.sampled_from([[""], ["rank 0", "rank 1"]]))
    found: list[Span] = []
    for process in processes:
        for _ in range(draw(st.integers(0, 14))):
            lane, name, thread = draw(st.sampled_from(places))
            found.append(Span(lane, name, thread, draw(_TIMES), draw(_TIMES), 0, process))
        for number, end in enumerate(sorted(draw(st.lists(_TIMES, min_size=1, max_size=6))), 1):
            found.append(Span("step", f"step {number}", "devices", end, 0.0, 0, process))
    return found


@given(any_spans(), st.randoms(use_true_random=False))
def test_lanes_are_a_partition_whatever_was_recorded_in_whatever_order(spans: list[Span], random: Any) -> None:
    found = attribute(traced(spans))
    for step in found.steps:
        assert tuple(step.lanes) == LANES
        assert min(step.lanes.values()) >= 0.0
        assert sum(step.lanes.values()) == pytest.approx(step.seconds, abs=1e-9)
    mean = found.mean()
    assert sum(mean.values()) == pytest.approx(found.step_seconds, abs=1e-9)
    shuffled = list(spans)
    random.shuffle(shuffled)
    assert attribute(traced(shuffled)) == found
