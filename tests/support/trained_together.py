"""A whole run in several processes: `braidax launch --module tests.support.trained_together FOLDER [STEP]` trains.

Rank 1 of the first generation is killed before that step.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from braidax.checkpoint import Checkpointer, Every
from braidax.data import DataLoader
from braidax.data import open as open_source
from braidax.loop import fit
from braidax.parallel import DataParallel, parallelize
from braidax.report import Report


def init(key: jax.Array) -> Any:
    """Makes the parameters of a line in 4 dims."""
    return {"weight": jax.random.normal(key, (4,)), "bias": jnp.zeros(())}


def loss(params: Any, batch: Any) -> Any:
    """Returns the mean squared error."""
    return jnp.mean((batch["x"] @ params["weight"] + params["bias"] - batch["y"]) ** 2)


def train(folder: Path, die_at: int | None) -> None:
    """Trains for 3 epochs of 6 steps, with a checkpoint every 2; goes on where it was."""
    random = np.random.default_rng(0)
    source = open_source({"x": random.normal(size=(48, 4)).astype(np.float32), "y": np.arange(48, dtype=np.float32)})
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    data = {"data": DataParallel()}
    step = parallelize(loss, optax.adam(0.1), mesh, data, init=init, batch=source.batch_spec(8))
    report = Report(show="nothing", metrics=folder / "metrics.jsonl")
    with (
        DataLoader(source, mesh, step.batch_shardings, batch_size=8, seed=1, epochs=3) as loader,
        Checkpointer(folder / "checkpoints", Every(2)) as saver,
    ):
        update = step.update

        def update_or_die(state: Any, batch: Any, **options: Any) -> Any:
            if die_at == saver.num_updates and os.environ["BRAIDAX_GENERATION"] == "0" and jax.process_index() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return update(state, batch, **options)

        step.update = update_or_die
        state = fit(step, step.init(jax.random.key(2)), loader, saver=saver, report=report)
        end = f"{saver.num_updates} {np.asarray(state.params['bias']):.6f}"
        (folder / f"end-{jax.process_index()}").write_text(end)


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None)
