"""Handwritten digits: the files, the split, and that the loss falls."""

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from braidax.data import DataLoader
from braidax.loop import evaluate, fit
from braidax.parallel import DataParallel, parallelize
from braidax.report import Report
from braidax.tasks.digits import digits, write_digits


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits")
    write_digits(folder)
    return folder


def test_every_class_has_its_share_of_both_files(folder: Path) -> None:
    train, test = (np.load(folder / name) for name in ("train.npz", "test.npz"))
    assert train["image"].shape == (1500, 8, 8, 1)
    assert test["image"].shape == (297, 8, 8, 1)
    assert (train["image"].dtype, train["label"].dtype, train["image"].max()) == (np.uint8, np.int32, 16)
    share = np.bincount(test["label"]) / (np.bincount(train["label"]) + np.bincount(test["label"]))
    assert share.shape == (10,)
    np.testing.assert_allclose(share, 297 / 1797, atol=0.01)


def test_no_sample_is_in_both_files_or_in_none(folder: Path) -> None:
    from sklearn.datasets import load_digits

    written = np.concatenate([np.load(folder / name)["image"] for name in ("train.npz", "test.npz")])
    shipped: Any = load_digits(return_X_y=True)[0]
    rows = {row.tobytes() for row in written.reshape(1797, 64)}
    assert rows == {row.tobytes() for row in shipped.astype(np.uint8)}
    assert len(rows) == 1797  # no two are alike


def test_files_that_are_there_are_not_written_again(folder: Path) -> None:
    before = [path.stat().st_mtime_ns for path in sorted(folder.iterdir())]
    write_digits(folder)
    assert [path.stat().st_mtime_ns for path in sorted(folder.iterdir())] == before


def test_several_may_write_at_once_and_a_file_that_is_there_stays(tmp_path: Path) -> None:
    (tmp_path / "train.npz").write_bytes(b"somebody's own")
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda number: write_digits(tmp_path / f"{number % 2}"), range(16)))
    for number in range(2):
        assert sorted(path.name for path in (tmp_path / f"{number}").iterdir()) == ["test.npz", "train.npz"]
        assert len(np.load(tmp_path / f"{number}" / "train.npz")["label"]) == 1500
    write_digits(tmp_path)
    assert (tmp_path / "train.npz").read_bytes() == b"somebody's own"
    assert len(np.load(tmp_path / "test.npz")["label"]) == 297


def test_values_are_stretched_to_a_full_byte(folder: Path) -> None:
    task = digits(folder)
    batch = {"image": np.zeros((20, 8, 8, 1), np.uint8), "label": np.zeros(20, np.int32)}
    task.test.read(np.arange(20), batch)
    stored = np.load(folder / "test.npz")["image"][:20]
    np.testing.assert_array_equal(batch["image"], np.round(stored * (255 / 16)))
    assert batch["image"].max() == 255


@pytest.mark.usefixtures("quickly_compiled")
def test_an_epoch_teaches_more_than_guessing(folder: Path) -> None:
    task = digits(folder)
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    strategies = {axis: DataParallel() for axis in mesh.axis_names}
    step = parallelize(task.loss, task.optimizer(33), mesh, strategies, init=task.init, batch=task.train.batch_spec(64))
    state = step.init(jax.random.key(0))
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state.params)) == 76_674
    loader = DataLoader(task.train, mesh, step.batch_shardings, batch_size=64, epochs=1)
    test = DataLoader(task.test, mesh, step.batch_shardings, batch_size=64, seed=None, remainder="pad")
    before = evaluate(step, state, test)
    after = evaluate(step, fit(step, state, loader, report=Report(show="nothing")), test)
    assert before["accuracy"] < 0.3
    assert after["accuracy"] > 0.8
    assert after["loss"] < before["loss"] / 2
