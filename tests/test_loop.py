"""The loop: what it computes, that it resumes exactly, and how it ends."""

import functools
import json
import signal
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from braidax.checkpoint import Checkpointer, Every
from braidax.data import Cursor, DataLoader
from braidax.errors import ArgumentError, DataError
from braidax.loop import evaluate, fit, fitting
from braidax.parallel import DataParallel, FullySharded, Hybrid, Plan, Rows, Step, parallelize
from braidax.report import Report
from braidax.spans import Trace
from tests.support.loop import MESH, SAMPLES, make_loader, make_step

_SAID = "step 7 is done and saved; run the program again to go on from there"


class InterruptedSaver(Checkpointer):
    """Presses Ctrl-C, as often as `presses` says, or gets another signal, after the step `at`."""

    at = 7
    presses = 1
    number = signal.SIGINT

    def update(self, tree: Any, *, metric: Any = None) -> None:
        super().update(tree, metric=metric)
        if self.num_updates == self.at:
            for _ in range(self.presses):
                signal.raise_signal(self.number)


class PreemptedSaver(InterruptedSaver):
    number = signal.SIGTERM


class TwiceInterruptedSaver(InterruptedSaver):
    at = 2
    presses = 2


def test_it_descends_as_by_hand(tmp_path: Path) -> None:
    # The loss is (w - 2)², so each step at rate 1/4 halves the way to 2.
    samples = {"x": np.ones((8, 1), np.float32), "y": np.full(8, 2, np.float32)}
    step = make_step(optax.sgd(0.25), samples, 8)
    report = Report(show="nothing", metrics=tmp_path / "metrics.jsonl", trace=Trace(max_spans=99))
    with make_loader(step, samples, epochs=3) as loader:
        state = fit(step, step.init(jax.random.key(0)), loader, report=report)
    assert float(state.params["w"][0]) == 1.75
    assert int(state.step) == 3
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["epoch"], line["loss"]) for line in lines] == [(1, 0, 4.0), (2, 1, 1.0), (3, 2, 0.25)]
    assert [span.name for span in report.trace.spans if span.lane == "step"] == ["step 1", "step 2", "step 3"]
    assert report.pace.num_samples == 16


@pytest.mark.parametrize(
    ("saver_type", "ending"), [(InterruptedSaver, KeyboardInterrupt(_SAID)), (PreemptedSaver, SystemExit(143))]
)
def test_an_interrupted_run_ends_where_an_uninterrupted_one_does(
    saver_type: type[InterruptedSaver], ending: BaseException, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = make_step(optax.adam(0.1), SAMPLES, 8)
    whole = fit(step, step.init(jax.random.key(0)), make_loader(step, epochs=3))

    with make_loader(step, epochs=3) as loader, saver_type(tmp_path, Every(100)) as saver:
        with pytest.raises(type(ending)) as raised:
            fit(step, step.init(jax.random.key(0)), loader, saver=saver)
        assert raised.value.args == ending.args
        assert (f"SIGTERM: {_SAID}\n" in capsys.readouterr().err) == (saver_type is PreemptedSaver)
        assert saver.num_updates == 7
        assert Plan.from_json(saver.notes["plan"]) == step.plan
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    with make_loader(step, epochs=3) as loader, Checkpointer(tmp_path, Every(100)) as saver:
        report = Report(show="nothing")
        state = fit(step, step.init(jax.random.key(1)), loader, saver=saver, report=report)
        assert report.pace.num_samples == (15 - 7 - 1) * 8
    assert int(state.step) == 15
    jax.tree.map(np.testing.assert_array_equal, (state.params, state.opt_state), (whole.params, whole.opt_state))


def test_a_finished_run_trains_no_more(tmp_path: Path) -> None:
    step = make_step(optax.adam(0.1), SAMPLES, 8)
    states: list[Any] = []
    for _ in range(2):
        with make_loader(step, epochs=2) as loader, Checkpointer(tmp_path, Every(3)) as saver:
            states.append(fit(step, step.init(jax.random.key(0)), loader, saver=saver))
            assert saver.num_updates == 10
    np.testing.assert_array_equal(states[0].params["w"], states[1].params["w"])
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000006", "step-00000009", "step-00000010"]


def test_steps_are_counted_by_the_state_in_whatever_batches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = tmp_path / "metrics.jsonl"
    for batch_size, epochs in ((8, 2), (16, 4), (16, 4)):  # 2 epochs of 5 batches; 2 more of 2; over
        step = make_step(optax.sgd(0.01), SAMPLES, batch_size)
        report = Report(show="plain", every_seconds=0, metrics=metrics)
        with (
            make_loader(step, batch_size=batch_size, epochs=epochs) as loader,
            Checkpointer(tmp_path / "saved", Every(3)) as saver,
        ):
            state = fit(step, step.init(jax.random.key(0)), loader, saver=saver, report=report)
    assert int(state.step) == 14
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [(line["step"], line.get("epoch")) for line in lines] == [
        *[(number, (number - 1) // 5) for number in range(1, 11)],
        (10, None),
        (11, 2),
        (12, 2),
        (13, 3),
        (14, 3),
    ]
    said = [line.partition("  loss")[0] for line in capsys.readouterr().out.splitlines()]
    assert said[9:] == [
        "step 10/10  epoch 2/2",
        "going on after step 10",
        "step 11/14  epoch 3/4",
        "step 12/14  epoch 3/4",
        "step 13/14  epoch 4/4",
        "step 14/14  epoch 4/4",
        "this run is over: it ended with step 14",
    ]


@pytest.mark.parametrize(("remainder", "num_steps"), [("drop", 5 + 5), ("pad", 5 + 6)])
def test_what_is_left_of_an_epoch_is_counted_in_whole_batches(remainder: Any, num_steps: int) -> None:
    step = make_step(optax.sgd(0.01), SAMPLES, 8)
    loader = make_loader(step, epochs=2, remainder=remainder)
    loader.cursor = Cursor(0, 0, 4)  # left by batches of 4: 40 samples
    length, first_step = fitting._length(loader, step.init(jax.random.key(0)), None)
    assert (length.num_steps, first_step) == (num_steps, 0)


def test_another_seed_than_the_run_has_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    step = make_step(optax.sgd(0.01), SAMPLES, 8)
    for seed in (3, 4):
        with make_loader(step, seed=seed, epochs=1) as loader, Checkpointer(tmp_path, Every(3)) as saver:
            fit(step, step.init(jax.random.key(0)), loader, saver=saver)
    assert loader.cursor == Cursor(3, 1, 0)
    assert [record.message for record in caplog.records] == [
        "fit: the loader has seed=4; the run goes on with its own, 3"
    ]


class Troubled:
    """Samples of which one is bad."""

    def __len__(self) -> int:
        return 44

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 5:
            raise ValueError("is torn")
        return {name: array[index] for name, array in SAMPLES.items()}


def test_what_was_skipped_is_said_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    step = make_step(optax.sgd(0.01), SAMPLES, 8)
    loader = make_loader(step, Troubled(), epochs=2, on_error="skip")
    fit(step, step.init(jax.random.key(0)), loader, report=Report(show="plain"))
    assert capsys.readouterr().out.splitlines()[-1].startswith("bad records: skipped, 1 of at most 100 in ")


def test_a_loader_has_events_after_a_loop_of_ones_own(tmp_path: Path) -> None:
    with DataLoader(SAMPLES, MESH, jax.P("data"), batch_size=8) as loader:
        assert len(list(loader)) == 5
        loader.trace.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    lanes = [event["cat"] for event in events if event["ph"] == "X"]
    num_bytes = sum(event["args"]["bytes"] for event in events if event["ph"] == "X" and event["cat"] == "read")
    assert (lanes.count("wait"), num_bytes) == (5, 40 * loader._plan.sample_bytes)  # several small batches are one read


def test_a_trace_of_the_report_gets_what_loader_and_checkpointer_do(tmp_path: Path) -> None:
    step = make_step(optax.sgd(0.01), SAMPLES, 8)
    trace = Trace()
    with make_loader(step) as loader, Checkpointer(tmp_path, Every(3)) as saver:
        fit(step, step.init(jax.random.key(0)), loader, saver=saver, report=Report(show="nothing", trace=trace))
        assert loader.stats().num_batches == 5
    trace.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    lanes = [event["cat"] for event in events if event["ph"] == "X"]
    assert {"read", "wait", "step", "checkpoint"} <= set(lanes)
    assert lanes.count("step") == 5


def test_a_second_interrupt_stops_at_once(tmp_path: Path) -> None:
    step = make_step(optax.adam(0.1), SAMPLES, 8)
    state = step.init(jax.random.key(0))
    with TwiceInterruptedSaver(tmp_path, Every(100)) as saver, pytest.raises(KeyboardInterrupt):
        fit(step, state, make_loader(step), saver=saver)
    assert list(tmp_path.glob("step-*")) == []


class InterruptedReport(Report):
    """Presses Ctrl-C in the second step."""

    def update(self, metrics: Any, *, epoch: int, state: Any = None) -> None:
        super().update(metrics, epoch=epoch, state=state)
        if int(state.step) == 2:
            signal.raise_signal(signal.SIGINT)


def test_an_interrupt_says_that_nothing_is_saved() -> None:
    step = make_step(optax.adam(0.1), SAMPLES, 8)
    with make_loader(step) as loader, pytest.raises(KeyboardInterrupt, match=r"no saver, and has saved nothing$"):
        fit(step, step.init(jax.random.key(0)), loader, report=InterruptedReport(show="nothing"))


def test_it_runs_on_any_thread() -> None:
    step = make_step(optax.sgd(0.1), SAMPLES, 8)
    states: list[Any] = []
    state = step.init(jax.random.key(0))
    thread = threading.Thread(target=lambda: states.append(fit(step, state, make_loader(step))))
    thread.start()
    thread.join(60)
    assert int(states[0].step) == 5


def test_the_test_loader_is_evaluated_after_each_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    step = make_step(optax.sgd(0.01), SAMPLES, 8)
    test = make_loader(step, seed=None, remainder="pad")
    report = Report(show="plain")
    state = fit(step, step.init(jax.random.key(0)), make_loader(step, epochs=2), report=report, test=test)
    loss = np.mean((SAMPLES["x"] @ np.asarray(state.params["w"]) - SAMPLES["y"]) ** 2)
    assert report.noted["test_loss"] == pytest.approx(loss, rel=1e-5)
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith(("epoch 1 done", "epoch 2 done")) for line in lines) == 2


def test_evaluation_weighs_a_padded_batch_by_its_valid_samples() -> None:
    step = make_step(optax.sgd(0.01), SAMPLES, 8)
    state = step.init(jax.random.key(0))
    test = make_loader(step, seed=None, remainder="pad")
    metrics = evaluate(step, state, test)
    assert metrics["loss"] == pytest.approx(np.mean(np.arange(44.0) ** 2), rel=1e-6)
    assert metrics["largest"] == pytest.approx(sum(8 * last for last in (7, 15, 23, 31, 39)) / 44 + 4 * 43 / 44)
    assert sorted(metrics) == ["largest", "loss"]
    assert evaluate(step, state, test) == metrics


NUM_TOKENS = np.arange(200, dtype=np.int32) % 7 * 1001  # of one batch of two none


def of_tokens(state: Any, batch: Any) -> dict[str, Any]:
    """The mean of `[0, ..., n - 1] / 1000 + state` over `n` tokens, no number where there are none."""
    num_tokens = jnp.sum(batch["n"])
    loss = jnp.where(num_tokens > 0, (num_tokens - 1) / 2000, jnp.nan) + state
    return {"loss": loss, "num_tokens": num_tokens, "each": batch["n"]}


@pytest.mark.parametrize("batch_size", [1, 40])
def test_evaluation_weighs_by_tokens_where_there_are_some(batch_size: int) -> None:
    loader = DataLoader({"n": NUM_TOKENS}, batch_size=batch_size, seed=None)
    counts = NUM_TOKENS.reshape(-1, batch_size).sum(1).astype(np.float64)
    loss = np.sum(counts * (counts - 1) / 2000) / np.sum(counts) - 1
    found = evaluate(of_tokens, -1.0, loader)
    assert found == {
        "loss": pytest.approx(loss, rel=1e-6),
        "perplexity": pytest.approx(np.exp(loss), rel=1e-5),
        "num_tokens": np.sum(NUM_TOKENS),
    }


def test_evaluation_of_no_token_is_no_number_and_of_a_huge_loss_no_overflow() -> None:
    loader = DataLoader({"n": np.zeros(4, np.int32)}, batch_size=2, seed=None)
    found = evaluate(of_tokens, 0.0, loader)
    assert (np.isnan(found["loss"]), np.isnan(found["perplexity"]), found["num_tokens"]) == (True, True, 0)
    loader = DataLoader({"n": np.ones(4, np.int32)}, batch_size=2, seed=None)
    assert evaluate(of_tokens, 1e6, loader)["perplexity"] == np.exp(700.0)


def test_a_perplexity_of_its_own_stays() -> None:
    loader = DataLoader({"n": np.array([1, 3], np.int32)}, batch_size=1, seed=None)

    def metrics(state: Any, batch: Any) -> dict[str, Any]:
        return {**of_tokens(state, batch), "perplexity": jnp.float32(batch["n"][0])}

    assert evaluate(metrics, 0.0, loader)["perplexity"] == pytest.approx((1 * 1 + 3 * 3) / 4)


def test_learning_rates_that_the_state_keeps_are_metrics(tmp_path: Path) -> None:
    schedule = optax.linear_schedule(1.0, 0.0, 4)
    step = make_step(optax.inject_hyperparams(optax.adam)(schedule), SAMPLES, 8)
    report = Report(show="nothing", metrics=tmp_path / "metrics.jsonl")
    fit(step, step.init(jax.random.key(0)), make_loader(step, epochs=1), report=report)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["learning_rate"] for line in lines] == [1.0, 0.75, 0.5, 0.25, 0.0]


def test_evaluation_takes_a_whole_epoch_and_leaves_the_cursor() -> None:
    step = make_step(optax.sgd(0.01), SAMPLES, 8)
    state = step.init(jax.random.key(0))
    expected = evaluate(step, state, make_loader(step, seed=None, remainder="pad"))
    begun = make_loader(step, seed=None, remainder="pad", epochs=2)
    begun.cursor = begun.cursor._replace(epoch=1, position=8)
    assert evaluate(step, state, begun) == expected
    assert begun.cursor == (None, 1, 8)


def test_evaluation_drops_no_samples() -> None:
    step = make_step(optax.sgd(0.01), SAMPLES, 8)
    state = step.init(jax.random.key(0))
    words = (
        r"the loader of an evaluation would drop the last 4 of its 44 samples, which fill no batch of batch_size=8; "
        r"make it with remainder='pad', .* or with a batch_size that divides them"
    )
    with pytest.raises(ArgumentError, match=words):
        evaluate(step, state, make_loader(step))
    with pytest.raises(ArgumentError, match=words):  # before the first step
        fit(step, step.init(jax.random.key(0)), make_loader(step), test=make_loader(step))
    assert int(state.step) == 0


def test_a_fault_in_the_data_reaches_the_caller() -> None:
    step = _by_rows()
    with pytest.raises(Exception, match="the disk is gone"):
        fit(step, step.init(jax.random.key(0)), make_loader(step, Faulty()))


def descending(state: Any, batch: Any) -> Any:
    def loss(w: Any) -> Any:
        return ((batch["x"] @ w - batch["y"]) ** 2).mean()

    value, gradients = jax.value_and_grad(loss)(state["w"])
    return {"w": state["w"] - 0.01 * gradients}, {"loss": value}


def test_a_decorated_step_is_trained_and_goes_on_where_it_was(tmp_path: Path) -> None:
    def run(epochs: int, folder: Path) -> Any:
        step = parallelize(MESH, {"data": FullySharded(min_bytes=0)})(descending)
        form = {"x": jax.ShapeDtypeStruct((8, 3), jnp.float32), "y": jax.ShapeDtypeStruct((8,), jnp.float32)}
        loader = DataLoader(SAMPLES, MESH, step.batch_shardings(form), batch_size=8, epochs=epochs)
        report = Report(show="nothing", metrics=folder.with_suffix(".jsonl"))
        with Checkpointer(folder, Every(2)) as saver:
            state = fit(step, {"w": jnp.zeros(3)}, loader, saver=saver, report=report)
        assert Plan.from_json(saver.notes["plan"]) == step.plan
        lines = [json.loads(line) for line in folder.with_suffix(".jsonl").read_text().splitlines()]
        return np.asarray(state["w"]), lines

    straight, lines = run(2, tmp_path / "straight")
    assert [line["step"] for line in lines] == [*range(1, 11)]
    run(1, tmp_path / "again")
    resumed, lines = run(2, tmp_path / "again")
    assert [line["step"] for line in lines if "loss" in line] == [*range(1, 11)]
    np.testing.assert_allclose(resumed, straight, rtol=1e-6)


def test_a_decorated_step_is_evaluated_by_a_function_of_its_state(capsys: pytest.CaptureFixture[str]) -> None:
    step = parallelize(MESH, {"data": FullySharded(min_bytes=0)})(descending)
    few = {name: array[:8] for name, array in SAMPLES.items()}
    loader = DataLoader(SAMPLES, MESH, step.batch_shardings(few), batch_size=8, epochs=2)
    padded = {**few, "mask": np.ones(8, bool)}
    test = DataLoader(SAMPLES, MESH, step.batch_shardings(padded), batch_size=8, epochs=1, seed=None, remainder="pad")

    @step.wrap
    def errors(state: Any, batch: Any) -> Any:
        squared = (batch["x"] @ state["w"] - batch["y"]) ** 2
        return {"error": (squared * batch["mask"]).sum() / batch["mask"].sum(), "each": squared}

    report = Report(show="plain")
    state = fit(step, {"w": jnp.zeros(3)}, loader, report=report, test=test, test_metrics=errors)
    expected = np.mean((SAMPLES["x"] @ np.asarray(state["w"]) - SAMPLES["y"]) ** 2)
    assert report.noted == {"test_error": pytest.approx(expected, rel=1e-5)}
    assert evaluate(errors, state, test) == {"error": report.noted["test_error"]}
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith(("epoch 1 done", "epoch 2 done")) for line in lines) == 2
    with pytest.raises(ArgumentError, match=r"test_metrics returned metrics of type .*, expected a dict by name"):
        evaluate(step.wrap(lambda state, batch: batch["y"].mean()), state, test)


def test_what_a_decorated_step_cannot_do_in_fit_is_said() -> None:
    step = parallelize(MESH, {"data": DataParallel()})(lambda state, batch: (descending(state, batch)[0], 1.0))
    few = {name: array[:8] for name, array in SAMPLES.items()}
    loader = DataLoader(SAMPLES, MESH, step.batch_shardings(few), batch_size=8)
    with pytest.raises(
        ArgumentError, match=r"test is given, and .* has no evaluate: give test_metrics=step\.wrap\(fn\)"
    ):
        fit(step, {"w": jnp.zeros(3)}, loader, test=loader)
    with pytest.raises(ArgumentError, match="test_metrics is given, and test is None: give the loader of what is"):
        fit(step, {"w": jnp.zeros(3)}, loader, test_metrics=lambda state, batch: {})
    with pytest.raises(ArgumentError, match=r"returned metrics of type .*, expected a dict by name"):
        fit(step, {"w": jnp.zeros(3)}, loader)


def test_the_ids_of_the_last_batches_are_looked_at() -> None:
    """By a run, and by an evaluation alone, though nothing comes behind them."""

    def loss(params: Any, batch: Any) -> Any:
        return (jnp.take(params["t"], batch["id"], axis=0, mode="clip") ** 2).mean()

    samples = {"id": np.arange(24, dtype=np.int32)}
    samples["id"][-1] = 5_000
    form = {"id": jax.ShapeDtypeStruct((8,), np.int32)}
    strategies = {"data": Hybrid(out_of_range="raise")}
    step = parallelize(loss, optax.sgd(0.1), MESH, strategies, init=lambda key: {"t": jnp.ones((5_000, 8))}, batch=form)
    state = step.init(jax.random.key(0))
    with make_loader(step, samples, epochs=1, seed=None) as loader, pytest.raises(DataError, match="ids out of range"):
        evaluate(step, state, loader)
    with (
        make_loader(step, samples, epochs=1, seed=None) as loader,
        pytest.raises(DataError, match="batch of update 3 "),
    ):
        fit(step, state, loader)


IDS = {"id": np.arange(44, dtype=np.int32) * 7 % 61, "y": SAMPLES["y"] / 44}


@functools.cache
def _by_rows() -> Step:
    """Adam moves rows on that no batch touches: what is read of them tells which update it was read behind."""

    def loss(params: Any, batch: Any) -> Any:
        return ((params["t"][batch["id"]].sum(-1) - batch["y"]) ** 2).mean()

    form = {"id": jax.ShapeDtypeStruct((8,), np.int32), "y": jax.ShapeDtypeStruct((8,), np.float32)}
    strategies = {"data": Hybrid({"params/t": Rows()})}
    return parallelize(loss, optax.adam(0.1), MESH, strategies, init=lambda key: {"t": jnp.ones((61, 4))}, batch=form)


class Faulty:
    """Samples of which one cannot be read."""

    def __len__(self) -> int:
        return 44

    def __getitem__(self, index: int) -> Any:
        if index == 20:
            raise OSError("the disk is gone")
        return {name: array[index] for name, array in IDS.items()}


def test_a_run_whose_updates_know_what_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, told, update = _by_rows(), list[bool](), Step.update

    def seen(step: Step, *args: Any, coming: Any = None, **options: Any) -> Any:
        told.append(coming is not None)
        return update(step, *args, coming=coming, **options)

    monkeypatch.setattr(Step, "update", seen)
    whole = fit(step, step.init(jax.random.key(0)), make_loader(step, IDS, epochs=2))
    assert told == [False] * 10  # CPUs hide nothing

    told.clear()
    with make_loader(step, IDS, epochs=2) as loader, InterruptedSaver(tmp_path, Every(100)) as saver:
        with pytest.raises(KeyboardInterrupt):
            fit(step, step.init(jax.random.key(0)), loader, saver=saver, coming="known")
        assert loader.cursor == Cursor(0, 1, 16)
    with make_loader(step, IDS, epochs=2) as loader, Checkpointer(tmp_path, Every(100)) as saver:
        state = fit(step, step.init(jax.random.key(1)), loader, saver=saver, coming="known")
        assert loader.cursor == Cursor(0, 2, 0)
    assert told == [True] * 9 + [False]
    for one, other in zip(jax.tree.leaves(step.to_dense(state)), jax.tree.leaves(step.to_dense(whole)), strict=True):
        if jnp.issubdtype(one.dtype, jnp.floating):
            np.testing.assert_allclose(one, other, rtol=1e-6)

    told.clear()
    with pytest.raises(Exception, match="the disk is gone"):
        fit(step, step.init(jax.random.key(0)), make_loader(step, Faulty(), seed=None), coming="known")
    assert told == [True, False]  # the two batches before are trained
    with pytest.raises(ArgumentError, match='coming is "known", and the step fetches nothing ahead'):
        fit(make_step(optax.sgd(0.1), SAMPLES, 8), None, make_loader(step, IDS), coming="known")


@pytest.mark.usefixtures("unchecked")
def test_what_is_known_of_a_coming_batch_is_one_of_three() -> None:
    wrong: Any = "maybe"
    step = make_step(optax.sgd(0.1), SAMPLES, 8)
    with pytest.raises(ArgumentError, match=r'^coming is \'maybe\', expected "auto", "known" or "unknown"$'):
        fit(step, None, make_loader(step), coming=wrong)
    with pytest.raises(ArgumentError, match=r'^coming is \'maybe\', expected "known" or "unknown"$'):
        step.compile_for("here", coming=wrong)
