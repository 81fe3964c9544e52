"""The loss that all systems train: GPT-2's shape, of which first and last stage have leaves of their own in a batch."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks.harness.gpt2 import Shape

RATE = 0.1
"""Of SGD: an optimizer that costs next to nothing, so that steps are those of the schedules."""


def init(shape: Shape) -> Callable[[jax.Array], Any]:
    """Returns what makes the first parameters, the same for every key."""
    return lambda _: apart(shape.init(jax.random.key(0)))


def spec(shape: Shape) -> dict[str, Any]:
    """Of a batch: words, and the same again for those who compare them with what was predicted."""
    found = shape.spec()["ids"]
    return {"ids": found, "labels": found}


def samples(shape: Shape, seed: int) -> dict[str, np.ndarray]:
    """A batch."""
    found = shape.samples(seed)["ids"]
    return {"ids": found, "labels": found}


def loss(shape: Shape, marked: Callable[[Any], Any] = lambda x: x) -> Callable[..., Any]:
    """Returns the loss of parameters and a batch.

    **Arguments:** `marked`: is given what goes into the second half of the layers, for who cuts by markers.
    """

    def through(x: jax.Array, layers: Any) -> jax.Array:
        for number, w in enumerate(layers):
            x = marked(x) if number == shape.layers // 2 else x
            x, _ = shape.kept(shape.layer)(x, w)
        return x

    return _loss(shape, through)


def scanned(shape: Shape) -> Callable[..., Any]:
    """Returns the same loss of stacked layers, as `Shape.init` makes them."""
    return _loss(shape, lambda x, layers: jax.lax.scan(shape.kept(shape.layer), x, layers)[0])


def _loss(shape: Shape, through: Callable[[jax.Array, Any], jax.Array]) -> Callable[..., Any]:
    def run(params: Any, batch: Any) -> jax.Array:
        x = through(params["wte"][batch["ids"]] + params["wpe"], params["layers"])
        return shape.head(x, params["last"], params["head"], batch["labels"])

    return run


def apart(params: Any) -> Any:
    """Returns parameters in which each layer has its own, as torch's have."""
    stacked = params["layers"]
    layers = tuple({name: leaf[at] for name, leaf in stacked.items()} for at in range(len(stacked["up"])))
    return {**params, "layers": layers}
