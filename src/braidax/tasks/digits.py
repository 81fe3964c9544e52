"""Handwritten digits: 1,797 real 8×8 images that scikit-learn ships, so that nothing has to be downloaded."""

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from braidax.data import open as open_source
from braidax.errors import import_extra
from braidax.tasks.resnet_model import WideResNet
from braidax.tasks.task import Task, image_task

_NUM_CLASSES = 10
_NUM_TEST = 297
_FILL = 255 / 16  # the images hold 0 to 16
_SPLIT_SEED = 0


def digits(folder: str | Path) -> Task:
    """Returns the task to tell handwritten digits apart, by a small wide residual network.

    **Arguments:** `folder`: where `train.npz` (1,500 samples) and `test.npz` (297) are, or are written if missing.
    """
    files = write_digits(folder)
    train, test = (open_source(file, transform=_stretch) for file in files)
    model = WideResNet(_NUM_CLASSES, stage_sizes=(1, 1, 1), num_filters=8, block="basic", stem="plain")
    return image_task(model, train, test, batch_size=128, epochs=16, learning_rate=1e-2)


def write_digits(folder: str | Path) -> tuple[Path, Path]:
    """Writes the digits to two files, each class in the same share in both; a file that is there is left as it is.

    A file is whole once it has its name, whichever process wrote it.

    **Returns:** the paths of `train.npz` and `test.npz`: `image` uint8 `[n, 8, 8, 1]` of 0 to 16, `label` int32 `[n]`.
    """
    train, test = Path(folder) / "train.npz", Path(folder) / "test.npz"
    if not (train.exists() and test.exists()):
        datasets = import_extra("sklearn.datasets", "tasks", purpose="the handwritten digits")
        images, labels = datasets.load_digits(return_X_y=True)
        images, labels = images.reshape(-1, 8, 8, 1).astype(np.uint8), labels.astype(np.int32)
        chosen = _stratified(labels, _NUM_TEST)
        Path(folder).mkdir(parents=True, exist_ok=True)
        for path, rows in ((train, ~chosen), (test, chosen)):
            if not path.exists():
                _write(path, image=images[rows], label=labels[rows])
    return train, test


def _write(path: Path, **arrays: Any) -> None:
    descriptor, part = tempfile.mkstemp(prefix=".", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            np.savez(file, **arrays)
        Path(part).chmod(0o644)
        Path(part).replace(path)
    finally:
        Path(part).unlink(missing_ok=True)


def _stratified(labels: Any, num_chosen: int) -> Any:
    """Returns a mask of `num_chosen` samples, spread over the samples sorted by class, at random within a class."""
    shuffled = np.random.default_rng(_SPLIT_SEED).permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    chosen = np.zeros(len(labels), bool)
    chosen[by_class[np.linspace(0, len(labels), num_chosen, endpoint=False).astype(int)]] = True
    return chosen


def _stretch(window: Any) -> Any:
    """Stretches the values 0 to 16 to 0 to 255, as other images have them."""
    return {**window, "image": np.round(window["image"] * _FILL).astype(np.uint8)}
