"""One of the processes that train over links: it takes the steps that a line of its input names."""

import json
import os
import sys
from contextlib import ExitStack

import jax

import braidax as bx
from benchmarks.harness import models
from benchmarks.servers.steps import DENSE, ROWS, SERVERS, Steps, make_step
from braidax.gang import LocalGang

NUM_BATCHES = 3


def main() -> None:
    """Says `ready`, and then, for each system that a line names, what a step of it took."""
    given = json.loads(sys.argv[1])
    told = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # where gloo says who is connected
    address, size, rank = given["coordinator"], given["size"], given["rank"]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, size, rank, cluster_detection_method="deactivate")
    mesh, model = jax.make_mesh((size,), ("data",)), models.lm1b(*given["model"])
    with ExitStack() as stack:
        gang = stack.enter_context(LocalGang(given["servers"])) if rank == 0 else None
        steps = {
            ROWS: make_step(model, bx.Hybrid(), mesh, None, stack),
            SERVERS: make_step(model, bx.Hybrid(tables="servers"), mesh, gang, stack),
            DENSE: make_step(model, bx.DataParallel(), mesh, None, stack),
        }
        systems = {name: Steps(step, model.batches(NUM_BATCHES)) for name, step in steps.items()}
        print("ready", file=told)
        for line in sys.stdin:
            print(systems[line.strip()].take(), file=told)


if __name__ == "__main__":
    main()
