"""DLRM: as large as published, its dot products by value, Criteo's lines, and that the loss falls."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braidax.errors import ArgumentError, FormatError, RecordError
from braidax.program import find_uses, trace
from braidax.tasks.dlrm import dlrm, make_clicks
from braidax.tasks.dlrm_model import Sizes, init_dlrm, predict_clicks
from braidax.tasks.task import Task
from tests.support.tasks.criteo import line_of, write_criteo
from tests.support.tasks.updates import batch_of, count, losses_of


@pytest.fixture(scope="module")
def task() -> Task:
    return dlrm(preset="tiny")


def test_it_has_as_many_parameters_as_published(tmp_path: Path) -> None:
    task = dlrm(write_criteo(tmp_path / "train.txt"))
    params = jax.eval_shape(task.init, jax.random.key(0))
    assert count(params["tables"]) == 33_762_577 * 16
    assert count((params["bottom"], params["top"])) == 475_985
    assert list(params["tables"]) == [f"table_{number:02}" for number in range(26)]


def test_smaller_presets_cap_the_tables(task: Task) -> None:
    tables = jax.eval_shape(task.init, jax.random.key(0))["tables"]
    rows = [table.shape[0] for table in tables.values()]
    assert rows[:10] == [200, 200, 200, 200, 200, 24, 200, 200, 3, 200]


def test_only_rows_of_the_tables_are_read(task: Task) -> None:
    params = jax.eval_shape(task.init, jax.random.key(0))
    verdicts = {uses.name: uses.verdict for uses in find_uses(trace(task.loss, params, task.train.batch_spec(8)))}
    assert sum("table" in name for name in verdicts) == 26
    assert all((verdict == "sparse") == ("table" in name) for name, verdict in verdicts.items())


@pytest.mark.usefixtures("quickly_compiled")
def test_the_logit_is_made_of_all_dot_products() -> None:
    sizes = Sizes((5, 3), num_dense=2, bottom=(4,), top=())
    params = init_dlrm(jax.random.key(0), sizes)
    dense, ids = np.array([[0.5, 2.0], [1.0, -1.0]], np.float32), np.array([[4, 0], [1, 2]], np.int32)
    bottom, top = (jax.tree.map(np.asarray, params[name]["layer_0"]) for name in ("bottom", "top"))
    tables = [np.asarray(table) for table in params["tables"].values()]
    for row in range(2):
        x = np.maximum(dense[row] @ bottom["kernel"] + bottom["bias"], 0)
        first, second = tables[0][ids[row, 0]], tables[1][ids[row, 1]]
        features = np.concatenate([x, [x @ first, x @ second, first @ second]])
        logit = predict_clicks(params, jnp.asarray(dense), jnp.asarray(ids))[row]
        assert float(logit) == pytest.approx(float((features @ top["kernel"])[0]), rel=1e-4)


@pytest.mark.usefixtures("quickly_compiled")
def test_the_first_loss_is_that_of_a_guess_and_the_mask_leaves_samples_out(task: Task) -> None:
    params, batch = jax.jit(task.init)(jax.random.key(0)), batch_of(task.train, 64)
    loss = jax.jit(task.loss)
    blind = {**params, "top": jax.tree.map(np.zeros_like, params["top"])}
    value, aux = loss(blind, batch)
    assert float(value) == pytest.approx(np.log(2))
    assert float(aux["accuracy"]) == pytest.approx(float((batch["label"] == 0).mean()))
    few, seen = loss(params, batch_of(task.train, 48))
    masked, also = loss(params, {**batch, "mask": np.arange(64) < 48})
    assert float(masked) == pytest.approx(float(few), rel=1e-5)
    assert float(also["accuracy"]) == pytest.approx(float(seen["accuracy"]))


def test_made_up_samples_follow_a_power_law_and_depend_on_their_features() -> None:
    samples = make_clicks([1000] * 26, 20_000)
    share = np.bincount(samples["ids"][:, 9], minlength=1000) / 20_000
    expected = np.log1p(1 / np.arange(1.0, 1001)) / np.log(1001)
    np.testing.assert_allclose(share[:10], expected[:10], rtol=0.15)
    assert samples["ids"].max() == 999
    assert 0.25 < samples["label"].mean() < 0.45
    clicks = [samples["label"][samples["ids"][:, 0] == i].mean() for i in range(20)]
    assert max(clicks) - min(clicks) > 0.2
    np.testing.assert_array_equal(make_clicks([1000] * 26, 20_000)["label"], samples["label"])


@pytest.mark.usefixtures("quickly_compiled")
def test_updates_lower_the_loss_below_what_the_share_of_clicks_tells(task: Task) -> None:
    everything = jax.tree.map(np.asarray, batch_of(task.train, 3584))
    batches = [
        jax.tree.map(lambda leaf, at=at: jnp.asarray(leaf[at : at + 256]), everything) for at in range(0, 3584, 256)
    ]
    losses = losses_of(task, batches * 3)
    clicks = float(everything["label"].mean())
    entropy = -clicks * np.log(clicks) - (1 - clicks) * np.log(1 - clicks)
    assert np.mean(losses[:4]) > 0.95 * entropy
    assert np.mean(losses[-14:]) < entropy - 0.1


@pytest.mark.usefixtures("quickly_compiled")
def test_lines_of_criteo_become_samples(tmp_path: Path) -> None:
    write_criteo(tmp_path / "train.txt")
    task = dlrm(tmp_path, preset="tiny")
    assert (len(task.train), len(task.test)) == (13, 2)
    batch = batch_of(task.test, 2)
    assert batch["label"].tolist() == [1, 0]
    assert batch["dense"].tolist() == [[number, 0, -3, *range(10)] for number in (13, 14)]
    assert batch["ids"][0, :6].tolist() == [0x68FD1E64 % 200, 0x80E26C9B % 200, 0, 0, 1, 2]
    assert batch["ids"][0, 8] == 5 % 3
    assert task.test.describe()["samples"] == "2, from number 13 on"
    loss = jax.jit(lambda key, batch: task.loss(task.init(key), batch)[0])
    assert np.isfinite(loss(jax.random.key(0), batch_of(task.train, 13)))  # of −3, too


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (line_of(0, [1] * 13, ["a"] * 25), r"39 fields, label b'0'.*expected 40 fields between tabs"),
        (line_of(2, [1] * 13, ["a"] * 26), r"40 fields, label b'2'"),
        (line_of(0, ["x"] + [1] * 12, ["a"] * 26), r"invalid literal.*b'x'"),
        (line_of(0, [1 << 40] + [1] * 12, ["a"] * 26), "out of bounds"),
        (line_of(0, [1] * 13, ["zz"] * 26), "base 16"),
    ],
)
def test_other_lines_are_named(tmp_path: Path, line: str, message: str) -> None:
    path = write_criteo(tmp_path / "train.txt")
    path.write_text(line + path.read_text())
    task = dlrm(path, preset="tiny")
    with pytest.raises(RecordError, match=rf"train.txt, record 0 .*is no sample of Criteo's .*{message}"):
        batch_of(task.train, 1)


def test_wrong_input_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="preset='huge' is unknown; the presets are full, small, tiny"):
        dlrm(preset="huge")
    with pytest.raises(FormatError, match=r"train.txt: there is no such file; expected Criteo's train.txt"):
        dlrm(tmp_path)
    with pytest.raises(FormatError, match="holds 3 lines, expected at least 7"):
        dlrm(write_criteo(tmp_path / "train.txt", 3))
    task = dlrm(write_criteo(tmp_path / "more.txt"), preset="tiny")
    with pytest.raises(RecordError, match="there is no record 2; it holds 2 samples"):
        batch_of(task.test, 3)
