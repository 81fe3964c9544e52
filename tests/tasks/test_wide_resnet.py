"""The seed's model on CIFAR-100 and MNIST: sizes, classes, parameters, wrong input."""

import math
from pathlib import Path

import jax
import numpy as np
import pytest

from braidax.errors import ArgumentError, FormatError
from braidax.tasks.wide_resnet import wide_resnet
from tests.support.tasks.archives import write_cifar100, write_mnist


def test_cifar_100_is_resized_to_224_and_has_100_classes(tmp_path: Path) -> None:
    task = wide_resnet(write_cifar100(tmp_path / "cifar-100-python.tar.gz"))
    assert task.train.sample_spec["image"].shape == (224, 224, 3)
    assert (len(task.train), len(task.test)) == (16, 12)
    params, variables = jax.eval_shape(task.init, jax.random.key(0))
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)) == 1_069_235_556
    assert params["Dense_0"]["kernel"].shape == (8192, 100)
    assert list(variables) == ["batch_stats"]


def test_mnist_is_resized_to_30_and_has_10_classes(tmp_path: Path) -> None:
    task = wide_resnet(write_mnist(tmp_path), preset="tiny")
    assert task.train.sample_spec["image"].shape == (30, 30, 1)
    params, _ = jax.eval_shape(task.init, jax.random.key(0))
    assert params["Dense_0"]["kernel"].shape == (128, 10)


def test_the_image_size_can_be_chosen(tmp_path: Path) -> None:
    task = wide_resnet(write_mnist(tmp_path), preset="tiny", image_size=12)
    assert task.test.sample_spec["image"].shape == (12, 12, 1)


def test_wrong_input_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="preset='huge' is unknown; the presets are full, small, tiny"):
        wide_resnet(tmp_path, preset="huge")
    with pytest.raises(ArgumentError, match="image_size=0 must be"):
        wide_resnet(tmp_path, image_size=0)
    with pytest.raises(FormatError, match="no such file"):
        wide_resnet(tmp_path / "missing.tar.gz")
    np.save(tmp_path / "x.npy", np.zeros((4, 2)))
    with pytest.raises(ArgumentError, match=r"split"):
        wide_resnet(tmp_path / "x.npy")
