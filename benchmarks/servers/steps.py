"""Steps of LM1B in one process: tables on servers, on the devices by rows, and all gradients whole."""

import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import jax
import numpy as np

import braidax as bx
from benchmarks.harness import Report, models, take_turns
from braidax.gang import LocalGang

SERVERS, AHEAD, LATE, ROWS, DENSE = "servers", "servers, prepared", "servers, one late", "rows on devices", "all-reduce"
_NUM_BATCHES = 6


def step_case(report: Report, model: models.Model, *, num_servers: int, rounds: int) -> None:
    """Measures steps of one device, whose servers share the cores with it."""
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    strategies: dict[str, Any] = {
        SERVERS: bx.Hybrid(tables="servers"),
        AHEAD: bx.Hybrid(tables="servers"),
        LATE: bx.Hybrid(tables=bx.parallel.Served(staleness=1)),
        ROWS: bx.Hybrid(),
        DENSE: bx.DataParallel(),
    }
    with ExitStack() as stack:
        systems: dict[str, Callable[[], float]] = {}
        for name, strategy in strategies.items():
            served = isinstance(strategy, bx.Hybrid) and strategy.tables != "rows"
            gang = stack.enter_context(LocalGang(num_servers)) if served else None
            step = make_step(model, strategy, mesh, gang, stack)
            systems[name] = Steps(step, model.batches(_NUM_BATCHES), tells=name in (AHEAD, LATE)).take
        for name, seconds in take_turns(systems, rounds=rounds).items():
            report.add(f"step, {model.name}", name, "time", "ms", [1e3 * one for one in seconds[1:]])


def parts_case(report: Report, model: models.Model, *, sizes: Sequence[int], rounds: int) -> None:
    """Measures steps of one device whose tables are in so many parts, each on a server of its own that shares the cores
    with the others. **Arguments:** `sizes`: how many parts."""
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    with ExitStack() as stack:
        systems: dict[str, Callable[[], float]] = {}
        for size in sizes:
            gang = stack.enter_context(LocalGang(size))
            step = make_step(model, bx.Hybrid(tables="servers"), mesh, gang, stack)
            systems[str(size)] = Steps(step, model.batches(_NUM_BATCHES)).take
        for size, seconds in take_turns(systems, rounds=rounds).items():
            found = [1e3 * one for one in seconds[1:]]
            report.add(f"step by parts of a table, {model.name}", SERVERS, "time", "ms", found, at=f"{size} parts")


def make_step(model: models.Model, strategy: Any, mesh: jax.sharding.Mesh, gang: Any, stack: ExitStack) -> Any:
    """Returns a step of a model. **Arguments:** `gang`: has its tables, or the meeting. `stack`: closes it."""
    changes = bool(jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))[1]))
    made: Any = bx.parallelize(
        model.loss if changes else lambda params, batch, key: model.loss(params, batch, key, {})[0],
        model.optimizer,
        mesh,
        {"data": strategy},
        init=model.init if changes else lambda key: model.init(key)[0],
        batch=model.spec,
        servers=gang,
    )
    return stack.enter_context(made) if isinstance(made, AbstractContextManager) else made


class Steps:
    """Takes some steps, and returns what one of them took.

    **Arguments:** `batches`: global ones, on the host. `tells`: whether a step is told the next batch. `wait`: seconds
    in which a step does nothing, as one whose work is an accelerator's. `num_steps`: that are timed, of the same
    batches again and again; None: one for each.
    """

    def __init__(
        self,
        step: Any,
        batches: list[Any],
        *,
        tells: bool = False,
        wait: float = 0.0,
        num_steps: int | None = None,
    ) -> None:
        self._step, self._tells, self._wait = step, tells, wait
        self._num_steps = num_steps or len(batches)
        self._batches = [jax.tree.map(placed, batch, step.batch_shardings) for batch in batches]
        self._state = step.init(jax.random.key(0))
        self._take_all()

    def take(self) -> float:
        """Returns seconds a step, pushing included."""
        start = time.perf_counter()
        self._take_all()
        return (time.perf_counter() - start) / self._num_steps

    def _take_all(self) -> None:
        metrics: Any = None
        following = itertools.islice(itertools.cycle(self._batches), self._num_steps + 1)
        for batch, coming in itertools.pairwise(following):
            told: dict[str, Any] = {"coming": coming} if self._tells else {}
            if self._wait:
                told["before_apply"] = lambda: time.sleep(self._wait)
            self._state, metrics = self._step.update(self._state, batch, **told)
        if hasattr(self._step, "finish"):
            self._step.finish()
        jax.block_until_ready((self._state, metrics))


def placed(array: Any, sharding: Any) -> jax.Array:
    """Returns a global array of a host array that all processes have."""
    host = np.asarray(array)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])
