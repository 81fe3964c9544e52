"""A loss with a table most of whose rows are touched rarely."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import braidax.parallel as bx

ROWS, WIDTH, BATCH = 61, 4, 8


def init(key: jax.Array) -> Any:
    """Returns the first parameters."""
    keys = jax.random.split(key, 3)
    return {
        "bias": 0.1 * jax.random.normal(keys[0], (WIDTH,)),
        "kernel": jax.random.normal(keys[1], (WIDTH, WIDTH)) / 2,
        "words": jax.random.normal(keys[2], (ROWS, WIDTH)),
    }


def loss(params: Any, batch: Any) -> jax.Array:
    """Returns the squared error of one row a sample."""
    rows = params["words"][batch["ids"]].astype(jnp.float32)
    hidden = jnp.tanh(rows @ params["kernel"].astype(jnp.float32) + params["bias"].astype(jnp.float32))
    return ((hidden.sum(-1) - batch["target"]) ** 2).mean()


def make_batch(seed: int) -> dict[str, np.ndarray]:
    """Rows of which most are touched rarely: a batch has few of them, and each window of batches its own."""
    random = np.random.default_rng(seed)
    ids = random.integers(0, 7, BATCH) + 9 * (seed % 6)
    ids[0] = 60  # in each of them
    return {"ids": ids.astype(np.int32), "target": random.normal(size=BATCH).astype(np.float32)}


BY_HAND = bx.Hybrid({"params/words": bx.Rows()})  # so few rows are not worth it where missed steps are replayed
