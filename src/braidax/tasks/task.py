"""What a task is, and the one that classifies images."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from braidax.data import Source
from braidax.tasks.resnet_model import WideResNet

_WEIGHT_DECAY = 1e-2


@dataclass(frozen=True)
class Task:
    """All that a training run needs to know, apart from machine and mesh.

    **Arguments:** `train`, `test`: the samples. `init`: from a key to `(params, variables)`. `loss`: as
    `braidax.parallelize` takes it; its auxiliary result has the metric `"accuracy"`. `optimizer`: from the number of
    steps of the whole run to the optimizer. `batch_size`: in samples. `epochs`: passes over `train`.
    """

    train: Source
    test: Source
    init: Callable[[jax.Array], Any]
    loss: Callable[..., Any]
    optimizer: Callable[[int], optax.GradientTransformation]
    batch_size: int
    epochs: int


def image_task(
    model: WideResNet, train: Source, test: Source, *, batch_size: int, epochs: int, learning_rate: float
) -> Task:
    """Returns the task to classify images by a network.

    The images, uint8 of 0 to 255, are scaled to −1 to 1 on the devices, which a quarter of the bytes reaches that
    floats would need. A batch with the leaf `"mask"` is averaged over the samples that it marks.

    **Arguments:** `train`, `test`: samples `{"image": uint8 [H, W, C], "label": int32 []}`. `learning_rate`: the
    highest of a schedule that rises over a tenth of the steps and then falls to 0 along a cosine.
    """
    spec = train.sample_spec["image"]

    def init(key: jax.Array) -> Any:
        variables = dict(model.init(key, jnp.zeros((1, *spec.shape), jnp.float32), train=False))
        return variables.pop("params"), variables

    def loss(params: Any, batch: Any, variables: Any, train: bool) -> Any:
        images = batch["image"].astype(jnp.float32) / 127.5 - 1
        logits, updated = model.apply({"params": params, **variables}, images, train=train, mutable=list(variables))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        hits = jnp.argmax(logits, axis=-1) == batch["label"]
        mask = batch.get("mask", jnp.ones_like(hits))
        return _masked_mean(losses, mask), {"accuracy": _masked_mean(hits, mask), "variables": updated}

    def optimizer(num_steps: int) -> optax.GradientTransformation:
        schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, max(1, num_steps // 10), max(2, num_steps))
        return optax.adamw(schedule, weight_decay=_WEIGHT_DECAY)

    return Task(train, test, init, loss, optimizer, batch_size, epochs)


def _masked_mean(values: Array, mask: Array) -> Float[Array, ""]:
    return jnp.sum(jnp.where(mask, values, 0), dtype=jnp.float32) / jnp.sum(mask, dtype=jnp.float32)
