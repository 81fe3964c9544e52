"""Residual networks of 18 and 50 layers: parameters, stems, data, and that the loss falls."""

from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image

from braidax.errors import ArgumentError, FormatError
from braidax.tasks.resnet import resnet
from tests.support.tasks.archives import write_cifar100
from tests.support.tasks.updates import batch_of, count, losses_of


def write_folders(folder: Path, num_classes: int, names: tuple[str, ...] = ("train", "val")) -> Path:
    rng = np.random.default_rng(0)
    for name in names:
        for number in range(num_classes):
            (folder / name / f"class{number}").mkdir(parents=True)
            pixels = rng.integers(0, 256, (40, 50, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"class{number}" / "0.png")
    return folder


@pytest.mark.parametrize(("num_layers", "published"), [(18, 11_689_512), (50, 25_557_032)])
def test_it_has_as_many_parameters_as_published(tmp_path: Path, num_layers: int, published: int) -> None:
    task = resnet(write_folders(tmp_path, 3), num_layers=num_layers)
    params, variables = jax.eval_shape(task.init, jax.random.key(0))
    kernel = params["Dense_0"]["kernel"]
    assert task.train.sample_spec["image"].shape == (224, 224, 3)
    assert count(params) + (kernel.shape[0] + 1) * (1000 - 3) == published
    assert kernel.shape == (512 if num_layers == 18 else 2048, 3)
    assert list(variables) == ["batch_stats"]


def test_small_images_go_through_a_small_window(tmp_path: Path) -> None:
    archive = write_cifar100(tmp_path / "cifar-100-python.tar.gz")
    for size, window in ((None, 3), (64, 3), (65, 7)):
        task = resnet(archive, preset="tiny", num_layers=18, image_size=size)
        assert task.train.sample_spec["image"].shape == (size or 32, size or 32, 3)
        stem = jax.eval_shape(task.init, jax.random.key(0))[0]["_ConvNorm_0"]["Conv_0"]["kernel"]
        assert stem.shape == (window, window, 3, 4)


def test_images_of_folders_are_cut_at_random_to_train_and_at_the_center_to_test(tmp_path: Path) -> None:
    task = resnet(write_folders(tmp_path, 2, ("train", "test")), preset="tiny", image_size=24)
    first, again = batch_of(task.train, 2), batch_of(task.train.at(0, 1), 2)  # pyright: ignore
    assert first["image"].shape == (2, 24, 24, 3)
    assert (first["image"] != again["image"]).any()
    assert "crop" in " ".join(task.test.describe())
    assert batch_of(task.test, 2)["label"].tolist() == [0, 1]


@pytest.mark.usefixtures("quickly_compiled")
def test_a_few_updates_on_digits_lower_the_loss() -> None:
    task = resnet(preset="tiny", num_layers=18)
    assert (len(task.train), len(task.test)) == (1500, 297)
    losses = losses_of(task, [batch_of(task.train, 128, at) for at in range(0, 1280, 128)] * 3)
    assert np.mean(losses[-5:]) < losses[0] - 0.5


def test_wrong_input_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="preset='huge' is unknown; the presets are full, small, tiny"):
        resnet(preset="huge")
    with pytest.raises(ArgumentError, match="num_layers=34: expected one of 18, 50"):
        resnet(num_layers=34)
    with pytest.raises(ArgumentError, match="image_size=0 must be a positive number"):
        resnet(image_size=0)
    with pytest.raises(FormatError, match="no such file"):
        resnet(tmp_path / "missing.tar.gz")
    write_folders(tmp_path, 3)
    (tmp_path / "val" / "class2" / "0.png").unlink()
    (tmp_path / "val" / "class2").rmdir()
    with pytest.raises(ArgumentError, match="has other classes to test than the 3 to train"):
        resnet(tmp_path)
