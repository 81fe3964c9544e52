"""What a task is, the one that classifies images, and what losses of all tasks are made of."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from braidax.data import Source
from braidax.errors import import_extra

if TYPE_CHECKING:
    from flax import linen as nn
else:
    nn = import_extra("flax.linen", "tasks", purpose="a model of braidax's tasks")

_WEIGHT_DECAY = 1e-2


def tell_accuracy(metrics: Mapping[str, float]) -> str:
    """Returns the accuracy in words, such as `accuracy 97.31 %`."""
    return f"accuracy {100 * metrics['accuracy']:.2f} %"


def tell_perplexity(metrics: Mapping[str, float]) -> str:
    """Returns in words the perplexity that belongs to the loss, such as `perplexity 88.1`.

    It is taken of the mean loss of all samples: the mean of the perplexities of batches would be larger.
    """
    return f"perplexity {math.exp(min(metrics['loss'], 700.0)):.4g}"


@dataclass(frozen=True)
class Task:
    """All that a training run needs to know, apart from machine and mesh.

    **Arguments:** `train`, `test`: the samples. `init`: from a key to the parameters, or to `(params, variables)` where
    the loss asks for `variables`. `loss`: as `braidax.parallelize` takes it; it averages over samples, those that the
    leaf `"mask"` marks where there is one. `optimizer`: from the number of steps of the whole run to the optimizer.
    `batch_size`: in samples. `epochs`: passes over `train`. `tell`: from the metrics over `test` to what people want to
    know of them.
    """

    train: Source
    test: Source
    init: Callable[[jax.Array], Any]
    loss: Callable[..., Any]
    optimizer: Callable[[int], optax.GradientTransformation]
    batch_size: int
    epochs: int
    tell: Callable[[Mapping[str, float]], str] = tell_accuracy


def image_task(
    model: nn.Module,
    train: Source,
    test: Source,
    *,
    batch_size: int,
    epochs: int,
    learning_rate: float,
    auxiliary_weight: float = 0.4,
) -> Task:
    """Returns the task to classify images by a network.

    The images, uint8 of 0 to 255, are scaled to −1 to 1 on the devices, which a quarter of the bytes reaches that
    floats would need. A batch with the leaf `"mask"` is averaged over the samples that it marks.

    **Arguments:** `model`: from float32 `[n, H, W, C]` and `train` to logits, or to a pair of them, of which those of
    an auxiliary head come second. `train`, `test`: samples `{"image": uint8 [H, W, C], "label": int32 []}`.
    `learning_rate`: the highest of a schedule that rises over a tenth of the steps and then falls to 0 along a cosine.
    `auxiliary_weight`: of the auxiliary head's loss, which is added while training.
    """
    spec = train.sample_spec["image"]

    def init(key: jax.Array) -> Any:
        variables = dict(model.init(key, jnp.zeros((1, *spec.shape), jnp.float32), train=False))
        return variables.pop("params"), variables

    def loss(params: Any, batch: Any, variables: Any, train: bool, key: Any = None) -> Any:
        images = batch["image"].astype(jnp.float32) / 127.5 - 1
        rngs = {} if key is None else {"dropout": key}
        given = {"params": params, **variables}
        outputs, updated = model.apply(given, images, train=train, mutable=list(variables), rngs=rngs)
        logits, auxiliary = outputs if isinstance(outputs, tuple) else (outputs, None)
        mean, metrics = classification(logits, batch)
        if train and auxiliary is not None:
            mean += auxiliary_weight * classification(auxiliary, batch)[0]
        return mean, {**metrics, "variables": updated}

    return Task(train, test, init, loss, rising_and_falling(learning_rate), batch_size, epochs)


def classification(
    logits: Float[Array, "n classes"], batch: Mapping[str, Any]
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Returns the mean cross-entropy and the metric `"accuracy"` of the marked samples of a batch.

    **Arguments:** `batch`: with `"label"`, int32 `[n]`, and perhaps `"mask"`, bool `[n]`.
    """
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    hits = jnp.argmax(logits, axis=-1) == batch["label"]
    return masked_mean(losses, batch), {"accuracy": masked_mean(hits, batch)}


def masked_mean(values: Float[Array, "n"] | Int[Array, "n"] | Bool[Array, "n"], batch: Any) -> Float[Array, ""]:
    """Returns the mean of one value a sample, over the samples that `batch["mask"]` marks, or all if there is none."""
    mask = batch.get("mask", jnp.ones(values.shape, bool))
    return jnp.sum(jnp.where(mask, values, 0), dtype=jnp.float32) / jnp.sum(mask, dtype=jnp.float32)


def rising_and_falling(learning_rate: float) -> Callable[[int], optax.GradientTransformation]:
    """Returns AdamW, given a number of steps; its rate rises over a tenth of them, then falls to 0 along a cosine."""

    def optimizer(num_steps: int) -> optax.GradientTransformation:
        schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, max(1, num_steps // 10), max(2, num_steps))
        return optax.adamw(schedule, weight_decay=_WEIGHT_DECAY)

    return optimizer
