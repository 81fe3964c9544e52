"""A study that is over in seconds: a small network on samples in memory."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from braidax.data import open as open_source
from braidax.tune.study import Case, Design, Levels, Workload

WIDTH = 16


def init(key: jax.Array) -> Any:
    """Returns two layers."""
    return {f"w{at}": 0.1 * jax.random.normal(key, (WIDTH, WIDTH)) for at in range(2)}


def loss(params: Any, batch: Any) -> jax.Array:
    """Returns how far the second layer's output is from the input."""
    hidden = jnp.tanh(batch["x"] @ params["w0"])
    return jnp.mean((hidden @ params["w1"] - batch["x"]) ** 2)


def make() -> Workload:
    """Returns what is trained."""
    samples = {"x": np.random.default_rng(0).normal(size=(96, WIDTH)).astype(np.float32)}
    return Workload(loss, init, optax.sgd(0.1), open_source(samples))


def fail() -> Workload:
    """Raises."""
    raise ValueError("no samples today")


CASE = Case("tiny", "two layers", {"model": "two layers of 16"}, make, 8)
DESIGN = Design(("checkfreq-ddp",), Levels(checkpoint_every=2), num_blocks=2, num_steps=4)
ABOUT = {"case": {"name": "tiny"}, "design": {"blocks": 2}, "machine": {"cores": 2}}
