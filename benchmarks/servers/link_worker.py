"""One of the processes that train over links: it takes the steps that a line of its input names."""

import json
import os
import sys
import time
from contextlib import ExitStack
from typing import Any

import jax
import numpy as np

import braidax as bx
from benchmarks.harness import models
from braidax.gang import LocalGang

ROWS, SERVERS, DENSE = "rows on devices", "servers", "all-reduce"
NUM_BATCHES = 3


class Steps:
    """Steps of one system. **Arguments:** `gang`: has the tables, in process 0."""

    def __init__(self, strategy: Any, model: models.Model, gang: LocalGang | None, stack: ExitStack) -> None:
        mesh = jax.make_mesh((jax.process_count(),), ("data",))
        made: Any = bx.parallelize(
            lambda params, batch, key: model.loss(params, batch, key, {})[0],
            model.optimizer,
            mesh,
            {"data": strategy},
            init=lambda key: model.init(key)[0],
            batch=model.spec,
            servers=gang,
        )
        self._step = stack.enter_context(made) if hasattr(made, "close") else made
        self._batches = [
            jax.tree.map(_placed, model.batch(at), self._step.batch_shardings) for at in range(NUM_BATCHES)
        ]
        self._state = self._step.init(jax.random.key(0))
        self.take()

    def take(self) -> float:
        """Returns seconds a step, pushing included."""
        start, metrics = time.perf_counter(), None
        for batch in self._batches:
            self._state, metrics = self._step.update(self._state, batch)
        self._step.finish()
        jax.block_until_ready((self._state, metrics))
        return (time.perf_counter() - start) / len(self._batches)


def _placed(array: Any, sharding: Any) -> jax.Array:
    host = np.asarray(array)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def main() -> None:
    """Says `ready`, and then, for each system that a line names, what a step of it took."""
    given = json.loads(sys.argv[1])
    told = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # where gloo says who is connected
    address, size, rank = given["coordinator"], given["size"], given["rank"]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, size, rank, cluster_detection_method="deactivate")
    model = models.lm1b(*given["model"])
    with ExitStack() as stack:
        gang = stack.enter_context(LocalGang(given["servers"])) if rank == 0 else None
        systems = {
            ROWS: Steps(bx.Hybrid(), model, None, stack),
            SERVERS: Steps(bx.Hybrid(tables="servers"), model, gang, stack),
            DENSE: Steps(bx.DataParallel(), model, None, stack),
        }
        print("ready", file=told)
        for line in sys.stdin:
            print(systems[line.strip()].take(), file=told)


if __name__ == "__main__":
    main()
