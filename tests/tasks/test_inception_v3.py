"""Inception v3: as large as published, the sizes of its features, the auxiliary loss, and that the loss falls."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from braidax.data import open as open_source
from braidax.errors import ArgumentError
from braidax.tasks.inception_model import InceptionV3
from braidax.tasks.inception_v3 import inception_v3
from braidax.tasks.task import Task, image_task
from tests.support.tasks.updates import batch_of, count, losses_of


@pytest.fixture(scope="module")
def task() -> Task:
    return inception_v3(preset="tiny")


@pytest.mark.parametrize(("head", "published"), [("single", 23_834_568), ("auxiliary", 27_161_264)])
def test_it_has_as_many_parameters_as_published(head: Any, published: int) -> None:
    model, images = InceptionV3(1000, head=head), jnp.zeros((1, 299, 299, 3))
    variables = jax.eval_shape(lambda key: model.init(key, images, train=False), jax.random.key(0))
    assert count(variables["params"]) == published


def test_features_have_the_published_sizes() -> None:
    model, images = InceptionV3(1000, width=1 / 8), jnp.zeros((2, 299, 299, 3))

    def features(key: Any) -> Any:
        return model.init_with_output(key, images, train=False, capture_intermediates=True)[1]["intermediates"]

    found = jax.eval_shape(features, jax.random.key(0))
    sizes = {name: leaf["__call__"][0].shape[1:3] for name, leaf in found.items() if name.startswith(("_B", "_R"))}
    expected = [*[(35, 35)] * 3, *[(17, 17)] * 4, *[(8, 8)] * 2]
    assert [sizes[f"_Branches_{number}"] for number in range(9)] == expected
    assert [sizes[f"_Reduction_{number}"] for number in range(2)] == [(17, 17), (8, 8)]
    assert found["_Branches_8"]["__call__"][0].shape[3] == 2048 // 8
    assert found["_Auxiliary_0"]["_ConvNorm_1"]["__call__"][0].shape[1:3] == (1, 1)


@pytest.mark.usefixtures("quickly_compiled")
def test_the_auxiliary_loss_is_added_only_while_training() -> None:
    class TwoHeads(nn.Module):
        @nn.compact
        def __call__(self, images: Any, *, train: bool) -> Any:
            logits = jnp.broadcast_to(jnp.arange(3.0), (len(images), 3)) + self.param("bias", nn.zeros, (3,))
            return logits, 2 * logits

    samples = open_source({"image": np.zeros((4, 2, 2, 1), np.uint8), "label": np.array([0, 1, 2, 1], np.int32)})
    task = image_task(TwoHeads(), samples, samples, batch_size=4, epochs=1, learning_rate=0.1, auxiliary_weight=0.5)
    batch, params = batch_of(samples, 4), {"bias": jnp.zeros(3)}
    logits = jnp.broadcast_to(jnp.arange(3.0), (4, 3))
    first, second = (
        float(optax.softmax_cross_entropy_with_integer_labels(scale * logits, batch["label"]).mean())
        for scale in (1, 2)
    )
    assert float(task.loss(params, batch, {}, False)[0]) == pytest.approx(first)
    assert float(task.loss(params, batch, {}, True)[0]) == pytest.approx(first + 0.5 * second)


def test_digits_are_resized(task: Task) -> None:
    assert task.train.sample_spec["image"].shape == (75, 75, 1)
    assert inception_v3(preset="tiny", image_size=80).test.sample_spec["image"].shape == (80, 80, 1)
    assert (len(task.train), len(task.test)) == (1500, 297)


# By day the sizes of all that its parts make, above, and that such a task learns, in test_resnet.py.
@pytest.mark.slow
@pytest.mark.usefixtures("quickly_compiled")
def test_a_few_updates_lower_the_loss(task: Task) -> None:
    # Each block takes seconds to compile: the stem, one of them, both reductions and both heads will do.
    model = InceptionV3(10, 1 / 32, (1, 0, 0))
    less = image_task(model, task.train, task.test, batch_size=16, epochs=1, learning_rate=1e-2)
    losses = losses_of(less, [batch_of(task.train, 16)] * 12)
    assert losses[-1] < losses[0] - 0.3


def test_wrong_input_is_named() -> None:
    with pytest.raises(ArgumentError, match="preset='huge' is unknown; the presets are full, small, tiny"):
        inception_v3(preset="huge")
    with pytest.raises(ArgumentError, match="image_size=74: Inception v3 needs at least 75 pixels"):
        inception_v3(image_size=74)
