"""The report: who waited for whom, and what stands in the lines and the files."""

import importlib
import json
import struct
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from braidax.errors import ArgumentError, MissingExtra
from braidax.report import Report, RunLength
from braidax.report.ends import Ends
from braidax.report.learning_rates import LearningRates
from braidax.spans import Trace
from tests.support.report import LENGTH, Clock, Metric, clock_of_report, told_steps


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return clock_of_report(monkeypatch)


def three_steps(report: Report, clock: Clock) -> None:
    """Step 1 ends at 3 s. Step 2's batch is there 2 s later and keeps the devices busy for 4 s; step 3's is early."""
    metrics = [Metric(4.0, clock, 3.0), Metric(2.0, clock, 9.0), Metric(1.0, clock, 10.0)]
    times = [(0.0, 1.0), (2.0, 5.0), (6.0, 7.0)]
    with report.following(LENGTH, 0):
        for number, (metric, (asked, arrived)) in enumerate(zip(metrics, times, strict=True)):
            clock.set(asked)
            with report.waiting():
                clock.set(arrived)
            if metric is metrics[2]:
                for ready in metrics:
                    ready.gate.set()
            report.update({"loss": metric}, epoch=number // 2)
        report.note({"test_loss": 0.5})


def steps(report: Report, *metrics: Any, first_step: int = 0) -> None:
    with report.following(LENGTH, first_step):
        for number, metric in enumerate(metrics):
            with report.waiting():
                pass
            report.update(metric, epoch=(first_step + number) // 2)


def test_stall_is_the_time_in_which_the_devices_had_nothing_to_do(clock: Clock) -> None:
    report = Report(show="nothing", trace=Trace())
    three_steps(report, clock)
    assert (report.pace.stall_seconds, report.pace.step_seconds, report.pace.num_samples) == (2.0, 5.0, 20)
    assert report.pace.stall_percent == pytest.approx(200 / 7)
    assert report.pace.samples_per_second == pytest.approx(20 / 7)
    steps = [span for span in report.trace.spans if span.lane == "step"]
    assert [(span.name, span.start, span.seconds) for span in steps] == [
        ("step 1", 1.0, 2.0),
        ("step 2", 5.0, 4.0),
        ("step 3", 9.0, 1.0),
    ]


@pytest.mark.parametrize("before_apply", [True, False])
def test_the_trace_has_what_loop_and_devices_did(
    before_apply: bool, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = Report(show="nothing", trace=Trace())
    told_steps(report, clock, monkeypatch, before_apply=before_apply)
    found: dict[str, list[tuple[float, float]]] = {}
    for span in sorted(report.trace.spans, key=lambda span: span.start):
        found.setdefault(f"{span.lane} {span.name}", []).append((span.start, span.end))
    saving = [(5.0, 6.0), (15.0, 16.0)]
    assert found == {
        "loop begin": [(0.0, 0.0)],
        "loop data wait": [(0.0, 1.0), (10.0, 11.0)],
        "loop dispatch": [(1.0, 5.0), (11.0, 15.0)],
        "loop snapshot stall": sorted(saving + [(2.0, 4.0), (12.0, 14.0)] * before_apply),
        "loop evaluation": [(6.0, 7.0), (16.0, 17.0)],
        "devices gradients": [(2.0, 7.0), (12.0, 20.0)],
        "devices apply": [(7.0, 9.0), (20.0, 23.0)],
        "step step 1": [(1.0, 9.0)],
        "step step 2": [(11.0, 23.0)],
    }
    assert report.pace.stall_seconds == 1.0  # devices had nothing from 9 to 11, and the loop waited from 10 on


def test_the_end_of_a_step_is_known_though_its_state_is_given_away() -> None:
    donating = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf + 1, state), donate_argnums=0)
    mesh = jax.make_mesh((8,), ("data",))
    split = jax.device_put(jnp.zeros((8, 1024)), jax.NamedSharding(mesh, jax.P("data")))
    state: Any = {"large": split, "small": jnp.zeros(3), "none": jnp.zeros((0, 4)), "least": jnp.zeros(())}
    key = jax.random.key(0)
    places = set[int]()
    ends = Ends()
    for number in range(1, 30):
        state = donating(state)
        taken = ends.of({**state, "key": key, "words": "no array"})
        places.add(state["large"].addressable_data(0).unsafe_buffer_pointer())
        last = state
        state = donating(state)
        assert last["large"].is_deleted()
        assert sorted(float(one[0]) for one in taken) == [2.0 * number - 1] * 2
    assert len(places) == 1  # nothing was copied: the memory is taken over all the time
    assert ends.of({}) == ()


def test_plain_lines_say_what_happened(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    three_steps(Report(show="plain", every_seconds=0), clock)
    assert capsys.readouterr().out.splitlines() == [
        "step 1/4  epoch 1/2  loss 4  first step 2.0 s, compiling included",
        "step 2/4  epoch 1/2  loss 2  2 samples/s  stall 33.3 %  ETA 0:12",
        "step 3/4  epoch 2/2  loss 1  3 samples/s  stall 28.6 %  ETA 0:04",
        "epoch 2 done  test_loss 0.5",
    ]


def test_plain_lines_keep_their_distance_but_show_the_last_step(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(every_seconds=1000)
    steps(report, *[{"loss": jnp.float32(0.25)}] * 3, first_step=1)
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == "going on after step 1"
    assert [line.partition("  loss")[0] for line in rest] == ["step 2/4  epoch 1/2", "step 4/4  epoch 2/2"]


def test_a_run_without_end_has_no_eta(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(show="plain", every_seconds=0)
    with report.following(RunLength(None, None, 10), 0):
        for second in (0.0, 1.0):
            clock.set(second)
            with report.waiting():
                pass
            metric = Metric(1.0, clock, second + 1)
            metric.gate.set()
            report.update({"loss": metric}, epoch=int(second))
    assert capsys.readouterr().out.splitlines()[-1] == "step 2  epoch 2  loss 1  10 samples/s  stall 0.0 %"


def test_a_terminal_gets_one_line_that_is_redrawn(
    clock: Clock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    three_steps(Report(show="line"), clock)
    note, bar = capsys.readouterr().out.splitlines()
    assert note == "epoch 2 done  test_loss 0.5"
    assert bar.rstrip().endswith("step 3/4  epoch 2/2  loss 1  3 samples/s  stall 28.6 %  ETA 0:04")


def test_metrics_are_lines_of_json(clock: Clock, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "metrics.jsonl"
    three_steps(Report(show="nothing", metrics=path), clock)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[1] == {
        "step": 2,
        "epoch": 0,
        "time": 1e9,
        "loss": 2.0,
        "samples_per_second": pytest.approx(10 / 6),
        "stall_percent": pytest.approx(100 / 3),
    }
    assert [line["step"] for line in lines] == [1, 2, 3, 3]
    assert lines[3] == {"step": 3, "epoch": 1, "time": 1e9, "test_loss": 0.5}


def test_a_session_adds_to_the_metrics_and_says_from_where(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    steps(Report(show="nothing", metrics=path), *[{"loss": jnp.float32(8.0)}] * 3)
    before = path.read_text()
    resumed = Report(show="nothing", metrics=path)  # the checkpoint was of step 1: 2 is done again
    steps(resumed, {"loss": jnp.float32(jnp.nan), "per_class": jnp.zeros(3)}, first_step=1)
    assert path.read_text().startswith(before)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["step"], line.get("loss"), line.get("resumed")) for line in lines] == [
        (1, 8.0, None),
        (2, 8.0, None),
        (3, 8.0, None),
        (1, None, True),
        (2, "nan", None),
    ]
    assert "per_class" not in lines[4]


@pytest.mark.parametrize(
    ("end", "last"),
    [
        ('{"step": 3, "lo', {"torn": '{"step": 3, "lo'}),
        ('{"step": 3, "loss": 1.0}', {"step": 3, "loss": 1.0}),
    ],
)
def test_a_line_that_a_crash_cut_short_is_kept_and_all_lines_are_json(
    end: str, last: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 4.0}\n{"step": 2, "loss": 2.0}\n' + end)
    steps(Report(show="nothing", metrics=path), {"loss": jnp.float32(0.5)}, first_step=2)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[:3] == [{"step": 1, "loss": 4.0}, {"step": 2, "loss": 2.0}, last]
    assert [(line["step"], line.get("loss")) for line in lines[3:]] == [(2, None), (3, 0.5)]


@pytest.mark.parametrize("text", ["My thesis\n", '{"a": 1}\n', "[1]\n", "no line"])
def test_a_file_that_is_no_metrics_is_left_alone(text: str, tmp_path: Path) -> None:
    path = tmp_path / "thesis.txt"
    path.write_text(text)
    with pytest.raises(ArgumentError, match=r"metrics='.*thesis.txt' is there and begins with b.*give another path"):
        steps(Report(show="nothing", metrics=path))
    assert path.read_text() == text


def test_a_path_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for metrics in (tmp_path / "file" / "metrics.jsonl", tmp_path):
        with pytest.raises(ArgumentError, match=r"metrics='.*' cannot be written \((Not|File|Is) .*another path"):
            steps(Report(show="nothing", metrics=metrics))
    with pytest.raises(ArgumentError, match=r"tensorboard='.*file' cannot be made \(File exists\)"):
        steps(Report(show="nothing", tensorboard=tmp_path / "file"))


def test_a_run_that_is_over_says_so_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "metrics.jsonl"
    steps(Report(show="line", metrics=path, tensorboard=tmp_path / "board"), first_step=4)
    assert capsys.readouterr().out.splitlines() == ["this run is over: it ended with step 4"]
    steps(Report(show="line", metrics=path), first_step=7)
    assert capsys.readouterr().out.splitlines() == ["this run has gone further: it is at step 7, of 4"]
    assert list(tmp_path.iterdir()) == []


def test_only_the_first_process_shows_and_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jax.process_index", lambda: 1)
    logged: list[int] = []
    files = {"metrics": tmp_path / "metrics.jsonl", "tensorboard": tmp_path / "board"}
    report = Report(show="plain", **files, loggers=[lambda values, *, step: logged.append(step)])
    steps(report, {"loss": jnp.float32(0.5)}, {"loss": jnp.float32(0.5)})
    assert logged == []
    assert (capsys.readouterr().out, list(tmp_path.iterdir())) == ("", [])
    assert report.pace.num_samples == 10


def test_metrics_of_nested_trees_are_named_by_their_path(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    report = Report(show="nothing", metrics=path)
    steps(report, {"loss": {"main": jnp.float32(1.5), "extra": jnp.ones((1,))}})
    line = json.loads(path.read_text())
    assert (line["loss/main"], line["loss/extra"]) == (1.5, 1.0)


def test_tensorboard_gets_every_scalar(clock: Clock, tmp_path: Path) -> None:
    protocol: Any = importlib.import_module("tensorboardX.proto.event_pb2")
    three_steps(Report(show="nothing", tensorboard=tmp_path), clock)
    (file,) = tmp_path.iterdir()
    data, found = file.read_bytes(), dict[tuple[str, int], float]()
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        event: Any = protocol.Event.FromString(data[12 : 12 + length])
        found |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
        data = data[16 + length :]
    assert found["loss", 1] == 4.0
    assert found["loss", 3] == 1.0
    assert found["test_loss", 3] == 0.5
    assert found["stall_percent", 2] == pytest.approx(100 / 3)


def rated(rate: float) -> optax.InjectStatefulHyperparamsState:
    return optax.InjectStatefulHyperparamsState(jnp.array(1), {"b1": 0.9, "learning_rate": jnp.array(rate)}, {}, ())


def test_of_several_learning_rates_each_has_a_name() -> None:
    rates = LearningRates()
    state = SimpleNamespace(opt_state=({"a": rated(0.5), "b": (rated(0.25),)}, jnp.array(7)))
    assert {name: float(one[0]) for name, one in rates.of(state).items()} == {
        "learning_rate/a": 0.5,
        "learning_rate/b/0": 0.25,
    }
    state = {"opt_state": [rated(0.125)]}
    assert {name: float(one[0]) for name, one in LearningRates().of(state).items()} == {"learning_rate": 0.125}
    assert rates.of(state) == {}  # another state than the first
    assert LearningRates().of({"learning_rate": jnp.array(1.0), "hyperparams": jnp.array(1.0)}) == {}


def test_a_learning_rate_of_the_loss_is_the_one_that_counts(tmp_path: Path) -> None:
    report = Report(show="nothing", metrics=tmp_path / "metrics.jsonl")
    with report.following(LENGTH, 0):
        report.update({"learning_rate": jnp.float32(2.0)}, epoch=0, state=rated(0.5))
        report.update({}, epoch=0, state=rated(0.5))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["learning_rate"] for line in lines] == [2.0, 0.5]


def test_loggers_get_every_scalar_in_order(clock: Clock) -> None:
    logged: list[tuple[int, dict[str, float]]] = []
    threads = set[str]()

    def log(values: dict[str, float], *, step: int) -> None:
        threads.add(threading.current_thread().name.rpartition("_")[0])
        logged.append((step, dict(values)))
        values.clear()  # it is the logger's own

    copy: list[tuple[int, dict[str, float]]] = []
    three_steps(Report(show="nothing", loggers=[log, lambda values, *, step: copy.append((step, values))]), clock)
    assert logged == copy
    assert [(step, values.get("loss")) for step, values in logged] == [(1, 4.0), (2, 2.0), (3, 1.0), (3, None)]
    assert logged[3] == (3, {"test_loss": 0.5})
    assert logged[1][1]["stall_percent"] == pytest.approx(100 / 3)
    assert threads == {"braidax-report"}


def test_a_logger_that_fails_ends_the_loop() -> None:
    def log(values: dict[str, float], *, step: int) -> None:
        raise OSError(f"no network in step {step}")

    with pytest.raises(OSError, match="no network in step 1"):
        steps(Report(show="nothing", loggers=[log]), {"loss": jnp.float32(0.5)})


def test_a_run_that_is_over_is_not_logged() -> None:
    logged: list[int] = []
    report = Report(show="nothing", loggers=[lambda values, *, step: logged.append(step)])
    with report.following(LENGTH, 4):
        report.note({"test_loss": 1.0})
    assert logged == []


@pytest.mark.usefixtures("unchecked")
def test_what_is_no_logger_is_named() -> None:
    run: Any = SimpleNamespace(log=print)
    with pytest.raises(ArgumentError, match=r"loggers\[0\] is a SimpleNamespace, expected .*: give its method `log`$"):
        Report(loggers=[run])
    path: Any = "board"
    with pytest.raises(ArgumentError, match=r"loggers\[1\] is a str, expected .* of a run of wandb$"):
        Report(loggers=[run.log, path])


def test_without_tensorboard_the_error_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    report = Report(show="nothing", tensorboard=tmp_path)
    with pytest.raises(MissingExtra, match=r'pip install "braidax\[tensorboard\]"'):
        steps(report)


def test_a_failed_computation_is_raised_in_the_loop(clock: Clock) -> None:
    class Failed(Metric):
        def block_until_ready(self) -> None:
            raise RuntimeError("out of memory")

    report = Report(show="nothing")
    with pytest.raises(RuntimeError, match="out of memory"):
        steps(report, {"loss": Failed(0.0, clock, 0.0)})


def test_wrong_use_is_named() -> None:
    with pytest.raises(ArgumentError, match=r"every_seconds=-1.0"):
        Report(every_seconds=-1.0)
    with pytest.raises(ArgumentError, match="follows no run"):
        Report().update({}, epoch=0)
