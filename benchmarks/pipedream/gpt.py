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
    return lambda _: shape.init(jax.random.key(0))


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

    **Arguments:** `marked`: is given what goes from one stack of layers to the next, for who cuts by markers.
    """

    def run(params: Any, batch: Any) -> jax.Array:
        x = params["wte"][batch["ids"]] + params["wpe"]
        stacks = params["layers"]
        for number, stack in enumerate(stacks if isinstance(stacks, tuple) else (stacks,)):
            x = marked(x) if number else x
            x, _ = jax.lax.scan(shape.kept(lambda x, w: shape.layer(x, w)), x, stack)
        return shape.head(x, params["last"], params["head"], batch["labels"])

    return run


def in_stacks(params: Any, num_stacks: int) -> Any:
    """Returns parameters with as many stacks of layers, one a stage."""
    layers = params["layers"]
    each = len(layers["up"]) // num_stacks
    stacks = tuple(
        {name: leaf[at * each : (at + 1) * each] for name, leaf in layers.items()} for at in range(num_stacks)
    )
    return {**params, "layers": stacks}
