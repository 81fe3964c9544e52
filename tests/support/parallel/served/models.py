"""A small model with one table, and batches that ask for few of its rows often."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ROWS, WIDTH, BATCH = 500, 4, 16


def init(key: jax.Array) -> Any:
    """Returns the first parameters."""
    first, second = jax.random.split(key)
    return {"table": jax.random.normal(first, (ROWS, WIDTH)), "kernel": jax.random.normal(second, (WIDTH,))}


def loss(params: Any, batch: Any) -> jax.Array:
    """Returns the squared error of one row a sample."""
    return ((jnp.tanh(params["table"][batch["ids"]] @ params["kernel"]) - batch["target"]) ** 2).mean()


def zipf_batches(count: int) -> list[dict[str, np.ndarray]]:
    """Batches most of whose ids are the same few, as those of words are."""
    random = np.random.default_rng(0)
    made = [(random.zipf(1.2, BATCH), random.normal(size=BATCH)) for _ in range(count)]
    return [{"ids": (ids % ROWS).astype(np.int32), "target": target.astype(np.float32)} for ids, target in made]
