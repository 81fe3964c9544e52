"""A step and a loader for tests of the loop."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from braidax.data import DataLoader
from braidax.parallel import DataParallel, Step, parallelize

MESH = jax.make_mesh((4, 2), ("data", "model"))
SAMPLES = {"x": np.random.default_rng(0).normal(size=(44, 3)).astype(np.float32), "y": np.arange(44, dtype=np.float32)}


def make_step(optimizer: optax.GradientTransformation, samples: dict[str, Any], batch_size: int) -> Step:
    """Returns a step that fits a linear model, on 4x2 devices."""

    def loss(params: Any, batch: Any) -> Any:
        mask = batch.get("mask", jnp.ones_like(batch["y"], bool))
        errors = jnp.where(mask, (batch["x"] @ params["w"] - batch["y"]) ** 2, 0.0)
        return jnp.sum(errors) / jnp.sum(mask), {"largest": jnp.max(batch["y"]), "errors": errors}

    batch = {name: jax.ShapeDtypeStruct((batch_size, *array.shape[1:]), array.dtype) for name, array in samples.items()}
    strategies = {"data": DataParallel(), "model": DataParallel()}

    def init(key: Any) -> Any:
        return {"w": jnp.zeros(samples["x"].shape[1])}

    return parallelize(loss, optimizer, MESH, strategies, init=init, batch=batch)


def make_loader(step: Step, samples: Any = SAMPLES, *, batch_size: int = 8, **options: Any) -> DataLoader:
    """Returns a loader of samples for such a step."""
    return DataLoader(samples, MESH, step.batch_shardings, batch_size=batch_size, **options)
