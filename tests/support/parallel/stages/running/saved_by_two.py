"""Stages of two processes go on from a checkpoint of one device, and save: `launch` prints the loss that each reads."""

import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import braidax as bx
from tests.support.parallel.stages.running.of_two import SAMPLES, WIDTH, init, loss_fn

BATCH = {
    "x": np.random.default_rng(0).normal(size=(SAMPLES, WIDTH)).astype(np.float32),
    "mask": (np.arange(SAMPLES) % 3 != 0).astype(np.float32),
    "y": np.ones(SAMPLES, np.float32),
}


def make(mesh: jax.sharding.Mesh, strategies: Any) -> Any:
    """The step; on any mesh."""
    batch = bx.open(BATCH).batch_spec(SAMPLES)
    return bx.parallelize(loss_fn, optax.adamw(1e-2), mesh, strategies, init=init, batch=batch, microbatches=4)


def go_on(root: Path) -> float:
    """Restores, saves the same, takes an update, and saves that. **Returns:** its loss."""
    step = make(jax.make_mesh((4,), ("stage",)), {"stage": bx.parallel.Pipeline("ZB-V", clock="counted")})
    with bx.Checkpointer(root / "one", bx.Every(1)) as saver:
        state, epoch = saver.restore((step.state_specs, 0))
    with bx.Checkpointer(root / "same", bx.Every(1)) as saver:
        saver.save((state, epoch))
    with bx.Checkpointer(root / "two", bx.Every(1)) as saver:
        state, metrics = step.update(state, BATCH, before_apply=saver.wait)
        saver.save((state, epoch + 1))
    return float(metrics["loss"])


if __name__ == "__main__":
    sys.stdout.write(f"loss {go_on(Path(sys.argv[1]))}\n")
