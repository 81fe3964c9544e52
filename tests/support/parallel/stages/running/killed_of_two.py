"""What is left of two processes with stages when one is killed: it prints the error, and how long that took."""

import itertools
import json
import os
import signal
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import braidax as bx

_STEPS = 10


def main(victim: int) -> None:
    """Trains until a process is killed, and says so."""

    def loss_fn(params: Any, batch: Any) -> Any:
        x, _ = jax.lax.scan(lambda x, weights: (jnp.tanh(x @ weights), None), batch["x"], params["layers"])
        return ((x - 1) ** 2).mean()

    batch = {"x": np.ones((8, 4), np.float32)}
    step = bx.parallelize(
        loss_fn,
        optax.sgd(0.1),
        jax.make_mesh((2,), ("stage",)),
        {"stage": bx.parallel.Pipeline(clock="counted")},
        init=lambda key: {"layers": jax.random.normal(key, (4, 4, 4))},
        batch={"x": jax.ShapeDtypeStruct((8, 4), np.float32)},
        microbatches=4,
    )
    state, begun = step.init(jax.random.key(0)), 0.0
    try:
        for number in itertools.count():
            state, metrics = step.update(state, batch)
            if number == _STEPS:
                begun = time.monotonic()
                if jax.process_index() == victim:
                    float(metrics["loss"])
                    os.kill(os.getpid(), signal.SIGKILL)
    except bx.errors.PeerLost as error:
        sys.stdout.write(json.dumps([time.monotonic() - begun, error.rank, str(error)]) + "\n")
        sys.stdout.flush()
        os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]))
