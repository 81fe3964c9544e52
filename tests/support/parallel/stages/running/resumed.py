"""A run that saves as it goes, in stages of any cut: `launch` has two processes, of which one may kill itself."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import braidax as bx
from tests.support.parallel.stages.running.of_two import SAMPLES, WIDTH, init, loss_fn

EVERY, KILLED_IN = 2, 6
SOURCE = {
    "x": np.random.default_rng(0).normal(size=(7 * SAMPLES, WIDTH)).astype(np.float32),
    "mask": (np.arange(7 * SAMPLES) % 3 != 0).astype(np.float32),
    "y": np.ones(7 * SAMPLES, np.float32),
}


def make(schedule: str, num_devices: int) -> Any:
    """The step, on so many devices."""
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
    mesh = jax.make_mesh((num_devices,), ("stage",), devices=jax.devices()[:num_devices])
    return bx.parallelize(
        loss_fn, tx, mesh, {"stage": bx.parallel.Pipeline(schedule, clock="counted")}, init=init,
        batch=bx.open(SOURCE).batch_spec(SAMPLES), microbatches=4,
    )  # fmt: skip


class Saver(bx.Checkpointer):
    """Calls something in each update, between its gradients and the apply."""

    in_update: Callable[[int], None] = staticmethod(lambda number: None)

    def wait(self) -> None:
        super().wait()
        self.in_update(self.num_updates + 1)


def run(step: Any, root: Path, victim: bool = False) -> Any:
    """Trains to the end, from the newest checkpoint on. **Returns:** the last state."""
    loader = bx.DataLoader(bx.open(SOURCE), step.mesh, step.batch_shardings, batch_size=SAMPLES, seed=0, epochs=1)
    report = bx.Report(show="nothing", metrics=root / "metrics.jsonl")
    saver = Saver(root / "saved", bx.Every(EVERY), keep=9)
    with saver:

        def kill(number: int) -> None:
            if number == KILLED_IN - EVERY:
                saver.limit_bytes_per_second = 1.0  # what is saved now is never done
            if number == KILLED_IN:
                sys.stdout.write(f"{time.monotonic()}\n")
                sys.stdout.flush()
                os.kill(os.getpid(), signal.SIGKILL)

        saver.in_update = kill if victim else saver.in_update
        return bx.fit(step, step.init(jax.random.key(3)), loader, saver=saver, report=report)


def main(root: Path, port: str, process: int, victim: int) -> None:
    """Trains in two stages of two processes, and says what ends it, and when."""
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, process, cluster_detection_method="deactivate")
    try:
        run(make("1F1B", 2), root, process == victim)
    except bx.errors.PeerLost as error:
        sys.stdout.write(json.dumps([time.monotonic(), error.rank, str(error)]) + "\n")
        sys.stdout.flush()
        os._exit(1)  # or JAX waits for the other one


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
