"""Attribution of real runs: what fit, steps of stages and programs that call the host back let a trace know."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from braidax.checkpoint import Checkpointer, Every
from braidax.data import DataLoader
from braidax.loop import fit
from braidax.parallel import DataParallel, Pipeline, parallelize
from braidax.report import Report
from braidax.spans import Span, Trace
from braidax.tune import LANES, Attribution, attribute
from tests.support.report import Clock, clock_of_report, told_steps

STEPS, BATCH = 6, 8
SAMPLES = {"x": np.arange(STEPS * BATCH * 4, dtype=np.float32).reshape(-1, 4) / 100}


def init(key: jax.Array) -> Any:
    return {"first": jnp.eye(4), "second": jnp.eye(4) / 2}


def loss(params: Any, batch: Any) -> jax.Array:
    with jax.named_scope("first"):
        hidden = jnp.tanh(batch["x"] @ params["first"])
    with jax.named_scope("second"):
        return jnp.mean(jnp.tanh(hidden @ params["second"]) ** 2)


def calling_back(params: Any, batch: Any) -> jax.Array:
    zero = jax.pure_callback(
        lambda _: np.zeros((), np.float32),
        jax.ShapeDtypeStruct((), jnp.float32),
        jax.lax.stop_gradient(batch["x"][0, 0]),
    )
    return loss(params, batch) + zero


def trained(loss: Any, strategy: Any, num_devices: int, folder: Path) -> tuple[list[Span], Attribution]:
    mesh = jax.make_mesh((num_devices,), ("axis",), devices=jax.devices()[:num_devices])
    batch = {"x": jax.ShapeDtypeStruct((BATCH, 4), jnp.float32)}
    step = parallelize(loss, optax.adam(0.1), mesh, {"axis": strategy}, init=init, batch=batch)
    trace = Trace()
    with (
        DataLoader(SAMPLES, mesh, step.batch_shardings, batch_size=BATCH) as loader,
        Checkpointer(folder, Every(2)) as saver,
    ):
        fit(step, step.init(jax.random.key(0)), loader, saver=saver, report=Report(show="nothing", trace=trace))
    found = attribute(trace)
    assert [one.step for one in found.steps] == list(range(1, STEPS + 1))
    assert [one.compiles for one in found.steps] == [True] + [False] * (STEPS - 1)
    for one in found.steps:
        assert tuple(one.lanes) == LANES
        assert min(one.lanes.values()) >= 0
        assert sum(one.lanes.values()) == pytest.approx(one.seconds)
    ends = sorted(span.end for span in trace.spans if span.lane == "step")
    assert sum(one.seconds for one in found.counted) == pytest.approx(ends[-1] - ends[0])
    return trace.spans, found


def of(spans: Sequence[Span], lane: str, name: str) -> list[Span]:
    return sorted((one for one in spans if (one.lane, one.name) == (lane, name)), key=lambda one: one.start)


def test_fit_records_what_attribution_needs(tmp_path: Path) -> None:
    spans, found = trained(loss, DataParallel(), 2, tmp_path)
    waits, updates = of(spans, "loop", "data wait"), of(spans, "loop", "dispatch")
    gradients, applies = of(spans, "devices", "gradients"), of(spans, "devices", "apply")
    assert [len(each) for each in (waits, updates, gradients, applies)] == [STEPS] * 4
    for wait, update, computed, applied in zip(waits, updates, gradients, applies, strict=True):
        assert wait.end <= update.start <= computed.start <= computed.end <= applied.start
        assert {wait.thread, update.thread, computed.thread} == {"MainThread", "devices"}
    inside = [one for one in of(spans, "loop", "snapshot stall") if any(u.start < one.start < u.end for u in updates)]
    assert len(inside) == STEPS  # before apply; and as often in the saver's update
    assert len(of(spans, "loop", "snapshot stall")) == 2 * STEPS
    assert {one.name for one in spans if one.lane == "checkpoint"} == {"snapshot", "persist"}
    assert not of(spans, "loop", "operations")
    assert found.mean()["bubble"] == found.mean()["exposed communication"] == 0


def test_stages_are_known_to_compute_while_they_are_dispatched(tmp_path: Path) -> None:
    spans, found = trained(loss, Pipeline("GPipe", cuts=("second",), clock="counted"), 2, tmp_path)
    updates, operations = of(spans, "loop", "dispatch"), of(spans, "loop", "operations")
    assert len(operations) == STEPS
    for update, one in zip(updates, operations, strict=True):
        assert update.start < one.start < one.end < update.end
    assert [one.lane for one in spans if one.name == "operations of update 4"] == ["stages"]
    for again in range(2):  # on cores that others use, too, stages may end late enough to seem to compute at once
        if all(one.lanes["bubble"] > 0 for one in found.counted):
            break
        (place := tmp_path / str(again)).mkdir()
        _, found = trained(loss, Pipeline("GPipe", cuts=("second",), clock="counted"), 2, place)
    assert all(one.lanes["bubble"] > 0 for one in found.counted)  # one microbatch: no two stages compute at once


def test_a_program_that_calls_the_host_back_computes_while_it_is_called(tmp_path: Path) -> None:
    spans, _ = trained(calling_back, DataParallel(), 1, tmp_path)
    updates, calls = of(spans, "loop", "dispatch"), of(spans, "loop", "operations")
    assert len(calls) == STEPS
    for update, call in zip(updates, calls, strict=True):
        assert update.start < call.start < call.end < update.end


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return clock_of_report(monkeypatch)


def test_what_a_report_was_told_is_attributed_exactly(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    report = Report(show="nothing", trace=Trace())
    told_steps(report, clock, monkeypatch, before_apply=True)
    first, second = attribute(report.trace).steps
    nothing = dict.fromkeys(LANES, 0.0)
    assert (first.seconds, second.seconds) == (9.0, 14.0)
    assert first.lanes == {**nothing, "data wait": 1.0, "dispatch": 1.0, "compute": 7.0}
    assert second.lanes == {**nothing, "other": 1.0, "data wait": 1.0, "dispatch": 1.0, "compute": 11.0}
