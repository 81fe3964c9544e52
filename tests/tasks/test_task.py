"""The image task: loss, mask, metrics and schedule, by values."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from braidax.data import open as open_source
from braidax.tasks.resnet_model import WideResNet
from braidax.tasks.task import Task, image_task

MODEL = WideResNet(10, stage_sizes=(1,), num_filters=2, block="basic", stem="plain")


def make_task() -> Task:
    images = np.random.default_rng(0).integers(0, 256, (12, 8, 8, 1), np.uint8)
    source = open_source({"image": images, "label": np.arange(12, dtype=np.int32) % 10})
    return image_task(MODEL, source, source, batch_size=4, epochs=2, learning_rate=0.5)


def batch_of(task: Task, num_samples: int) -> dict[str, Any]:
    batch = {"image": np.zeros((num_samples, 8, 8, 1), np.uint8), "label": np.zeros(num_samples, np.int32)}
    task.train.read(np.arange(num_samples), batch)
    return jax.tree.map(jnp.asarray, batch)


@pytest.fixture(scope="module")
def drawn() -> tuple[Any, Any]:
    """Returns first parameters and variables."""
    with jax.default_prng_impl("unsafe_rbg"):  # as quickly_compiled does
        return jax.jit(make_task().init)(jax.random.key(0))


def loss_of(task: Task) -> Callable[..., Any]:
    """Returns the loss, compiled, as it is while testing."""
    return jax.jit(lambda params, batch, variables: task.loss(params, batch, variables, False))


def test_the_first_loss_is_that_of_a_guess(drawn: tuple[Any, Any]) -> None:
    task = make_task()
    params, variables = drawn
    params = {**params, "Dense_0": jax.tree.map(np.zeros_like, params["Dense_0"])}
    batch = batch_of(task, 8)
    loss, aux = loss_of(task)(params, batch, variables)
    assert float(loss) == pytest.approx(np.log(10))
    assert float(aux["accuracy"]) == 1 / 8  # all logits are equal, so the guess is class 0
    jax.tree.map(np.testing.assert_array_equal, aux["variables"], variables)


def test_a_mask_leaves_samples_out_of_the_means(drawn: tuple[Any, Any]) -> None:
    task = make_task()
    params, variables = drawn
    batch, loss = batch_of(task, 8), loss_of(task)
    few, _ = loss(params, batch_of(task, 5), variables)
    masked, aux = loss(params, {**batch, "mask": np.arange(8) < 5}, variables)
    assert float(masked) == pytest.approx(float(few), rel=1e-6)
    assert float(aux["accuracy"]) * 5 == pytest.approx(round(float(aux["accuracy"]) * 5))


def test_images_are_scaled_on_the_device(drawn: tuple[Any, Any]) -> None:
    task = make_task()
    params, variables = drawn
    batch = batch_of(task, 4)

    @jax.jit
    def expected(images: Any) -> Any:
        logits: Any = MODEL.apply({"params": params, **variables}, images, train=False)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    scaled = np.float32(np.asarray(batch["image"]) / 127.5 - 1.0)
    found = loss_of(task)(params, batch, variables)[0]
    assert float(found) == pytest.approx(float(expected(scaled)), rel=1e-5)


def test_the_learning_rate_rises_and_falls_to_nothing() -> None:
    optimizer = make_task().optimizer(20)
    params = {"w": jnp.zeros(1)}
    state, sizes = optimizer.init(params), list[float]()
    for _ in range(21):
        updates: Any
        updates, state = optimizer.update({"w": jnp.ones(1)}, state, params)
        sizes.append(-float(updates["w"][0]))
    assert sizes[0] == 0
    assert sizes[2] == pytest.approx(0.5, rel=1e-3)  # Adam's step of a constant gradient is the learning rate
    assert sizes[20] == pytest.approx(0, abs=1e-6)
