"""One of the processes that train over links: it takes the steps that a line of its input names."""

import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import jax

import braidax as bx
from benchmarks.harness import models
from benchmarks.servers.steps import AHEAD, DENSE, LATE, ROWS, SERVERS, Steps, make_step
from braidax.gang import LocalGang
from braidax.parallel import Meeting, Served, open_meeting

NUM_BATCHES = 3
PS, PS_ASYNC = "parameter servers", "parameter servers, asynchronous"
WAIT_SECONDS = 0.5
_MODELS: Mapping[str, Callable[..., models.Model]] = {
    "lm1b": models.lm1b,
    "dlrm": models.dlrm,
    "resnet": models.resnet,
}
_PACES = {PS: 0, PS_ASYNC: None}


def main() -> None:
    """Says `ready`, and then, for each system that a line names, what a step of it took."""
    given = json.loads(sys.argv[1])
    told = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # where gloo says who is connected
    with ExitStack() as stack:
        make = _apart if given["systems"][0] in _PACES else _together
        systems = make(given, told, stack)
        print("ready", file=told)
        for line in sys.stdin:
            print(systems[line.strip()].take(), file=told)


def _model(given: Mapping[str, Any], num_parts: int) -> models.Model:
    name, sizes, options = given["model"]
    *others, batch = sizes
    return _MODELS[name](
        *(tuple(one) if isinstance(one, list) else one for one in others), batch * num_parts, **options
    )


def _together(given: Mapping[str, Any], told: Any, stack: ExitStack) -> dict[str, Steps]:
    """Processes of one JAX."""
    size, rank = given["size"], given["rank"]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(given["coordinator"], size, rank, cluster_detection_method="deactivate")
    mesh, model = jax.make_mesh((size,), ("data",)), _model(given, size)
    strategies: dict[str, Any] = {
        ROWS: bx.Hybrid(),
        SERVERS: bx.Hybrid(tables="servers"),
        AHEAD: bx.Hybrid(tables="servers"),
        LATE: bx.Hybrid(tables=Served(staleness=1)),
        DENSE: bx.DataParallel(),
    }
    found: dict[str, Steps] = {}
    for name in given["systems"]:
        served = isinstance(strategies[name], bx.Hybrid) and strategies[name].tables != "rows"
        gang = stack.enter_context(LocalGang(given["servers"])) if served and rank == 0 else None
        step = make_step(model, strategies[name], mesh, gang, stack)
        options: dict[str, Any] = {"tells": name in (AHEAD, LATE), "wait": WAIT_SECONDS if given["waits"] else 0.0}
        options["num_steps"] = given["num_steps"]
        found[name] = Steps(step, model.batches(NUM_BATCHES), **options)
    return found


def _apart(given: Mapping[str, Any], told: Any, stack: ExitStack) -> dict[str, Steps]:
    """Workers that each have a JAX of their own: the first one has the servers, and tells the others where."""
    size, rank = given["size"], given["rank"]
    model, found = _model(given, 1), dict[str, Steps]()
    for name in given["systems"]:
        if rank == 0:
            gang = stack.enter_context(LocalGang(given["servers"]))
            meeting = stack.enter_context(open_meeting(gang, workers=size, reach="all"))
            print(meeting.to_json().decode(), file=told)
        else:
            meeting = Meeting.from_json(sys.stdin.readline().encode())
        strategy = bx.ParameterServers(staleness=_PACES[name])
        step = make_step(model, strategy, jax.make_mesh((1,), ("data",)), meeting.of_worker(rank), stack)
        found[name] = Steps(
            step, [model.batch(size * number + rank) for number in range(NUM_BATCHES)], num_steps=given["num_steps"]
        )
    return found


if __name__ == "__main__":
    main()
