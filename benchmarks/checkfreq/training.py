"""What is trained: a residual network under Adam, by a step of `bx.parallelize` that donates its state."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import braidax as bx

NUM_CLASSES = 2048


class Size(NamedTuple):
    """Of the network and its batch. **Fields:** `width`, four times that inside a block; `num_blocks`."""

    width: int
    num_blocks: int
    batch_size: int


FULL = Size(1024, 5, 128)
QUICK = Size(256, 4, 64)


class Trainer:
    """A training run, one step after the other; a step is over when its state is there.

    All systems continue the same run: what a checkpoint costs does not depend on what the numbers are.

    **Arguments:** `size`: of what is trained. **Fields:** `num_bytes`: of `tree`. `num_updates`: so far.
    """

    def __init__(self, size: Size) -> None:
        self._batch = _batch(size)
        mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
        self._step = bx.parallelize(
            _loss, optax.adam(1e-4), mesh, {"data": bx.DataParallel()}, init=_initial(size), batch=self._batch
        )
        self._batch = jax.device_put(self._batch, self._step.batch_shardings)
        self._state: Any = jax.block_until_ready(self._step.init(jax.random.key(0)))
        self.num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(self.tree))
        self.num_updates = 0
        for _ in range(2):  # the first compiles
            self.advance()

    @property
    def tree(self) -> Any:
        """What is saved: parameters, optimizer state and step count; the next `advance` gives it up."""
        return {"params": self._state.params, "opt_state": self._state.opt_state, "step": self._state.step}

    def advance(self, before_apply: Callable[[], object] | None = None) -> float:
        """Takes a step. **Returns:** its seconds."""
        start = time.perf_counter()
        self._state, _ = self._step.update(self._state, self._batch, before_apply=before_apply)
        jax.block_until_ready(self._state)
        self.num_updates += 1
        return time.perf_counter() - start


def _batch(size: Size) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((size.batch_size, size.width)).astype(np.float32)
    return {"inputs": inputs, "labels": rng.integers(0, NUM_CLASSES, size.batch_size).astype(np.int32)}


def _initial(size: Size) -> Callable[[jax.Array], Any]:
    def init(key: jax.Array) -> Any:
        shapes = {
            f"block_{number}": {"up": (size.width, 4 * size.width), "down": (4 * size.width, size.width)}
            for number in range(size.num_blocks)
        }
        leaves, structure = jax.tree.flatten(
            {**shapes, "head": (size.width, NUM_CLASSES)}, is_leaf=lambda node: isinstance(node, tuple)
        )
        keys = jax.random.split(key, len(leaves))
        return structure.unflatten(
            [jax.random.normal(each, shape) / shape[0] ** 0.5 / 4 for each, shape in zip(keys, leaves, strict=True)]
        )

    return init


def _loss(params: Any, batch: Any) -> jax.Array:
    hidden = batch["inputs"]
    for number in range(len(params) - 1):
        block = params[f"block_{number}"]
        hidden = hidden + jax.nn.gelu(hidden @ block["up"]) @ block["down"]
    logits: jax.Array = hidden @ params["head"]
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]))
