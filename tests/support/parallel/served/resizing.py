"""Runs in which the number of servers changes."""

import contextlib
import functools
import os
import random
import signal
import threading
from collections.abc import Callable, Generator, Mapping
from typing import Any

import jax
import optax

import braidax.parallel as bx
from braidax.errors import BraidaxError
from braidax.gang import LocalGang
from braidax.parallel.given.arrays import place
from braidax.parallel.rows import row_adagrad
from tests.support.parallel.models import copied, specs
from tests.support.parallel.served.losing import own_pid
from tests.support.parallel.served.models import ROWS, init, loss, zipf_batches

NUM_STEPS = 12
OPTIMIZERS: dict[str, Any] = {
    "adagrad": optax.adagrad(0.1),
    "adam": optax.adam(1e-2),
    "momentum": optax.sgd(0.1, 0.9),
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.adagrad(0.1)),
}


def make_step(gang: Any, optimizer: Any, *, own: Any = None, **served: Any) -> Any:
    """Returns a step on two devices whose table is on servers. **Arguments:** `own`: optimizer of its rows."""
    served.setdefault("spares", 2)
    rows = {} if own is None else {"params/table": own}
    strategies = {"data": bx.Hybrid({"params/table": bx.Served(**served)}, row_optimizers=rows)}
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    batch = specs(zipf_batches(1)[0])
    return bx.parallelize(loss, optimizer, mesh, strategies, init=init, batch=batch, servers=gang)


def losses_of(step: Any, before: Callable[[int], object], *, ahead: int) -> tuple[Any, list[float]]:
    """Trains, and returns the state and all losses. **Arguments:** `before`: is told of each step."""
    state, losses = step.init(jax.random.key(0)), list[float]()
    placed = [place(batch, step.batch_shardings) for batch in zipf_batches(NUM_STEPS)]
    for number, batch in enumerate(placed):
        for coming in placed[number + ahead : number + ahead + 1] if number else placed[1 : 1 + ahead]:
            step.prepare(coming)
        before(number)
        state, metrics = step.update(state, batch)
        losses.append(float(metrics["loss"]))
    return state, losses


def trained(step: Any, before: Callable[[int], object] = lambda number: None, *, ahead: int = 2) -> Any:
    """Trains, and returns all losses and the tables and what is kept of them. **Arguments:** `before`: each step."""
    state, losses = losses_of(step, before, ahead=ahead)
    step.finish()
    part = step._servers.whole.read("table", 0, ROWS)
    return losses, (copied(state.params), part.values, part.kept, part.shared)


@functools.lru_cache(maxsize=1)
def undisturbed(gang: LocalGang) -> Any:
    """What training by Adagrad comes to, on any number of servers: once for all tests that compare with it."""
    with make_step(gang, OPTIMIZERS["adagrad"]) as step:
        return trained(step)


def trained_while_one_is_killed(
    gang: LocalGang,
    seed: int,
    kills: tuple[int, int],
    sizes: Mapping[int, int],
    *,
    begins: Mapping[int, int] | None = None,
) -> Any:
    """Trains on two servers of a gang with copies, of which one is killed; what was not moved may be moved again.

    **Arguments:** `kills`: the steps of which one is drawn, soon behind whose begin that is. `sizes`, `begins`: steps
    in which other numbers of servers are wanted, or begun. Behind step 9 there are 3. **Returns:** as `trained`.
    """
    drawn, pids = random.Random(seed), gang.run(own_pid)
    first, at, timers = drawn.randrange(gang.size - 1), drawn.choice(kills), list[threading.Timer]()
    with make_step(gang, OPTIMIZERS["adagrad"], copies=2, spares=gang.size - 2) as step:

        def change(number: int) -> None:
            if number == at:
                timers.append(threading.Timer(drawn.uniform(0, 0.25), os.kill, (pids[first], signal.SIGKILL)))
                timers[-1].start()
            if number in (begins or {}):
                step.prepare_resize((begins or {})[number])
            if number in sizes:
                with may_raise(BraidaxError, match="they stay on"):
                    step.resize(sizes[number])
            if number == 9:
                step.resize(3)

        found = trained(step, change)
        assert step._servers.num_servers == 3
    for timer in timers:
        timer.join()
    return found


CASES: dict[str, dict[str, Any]] = {
    "adagrad": {},
    "adam": {},
    "momentum": {},
    "clipped": {},
    "own rows": {"own": row_adagrad(0.1)},
    "late": {"staleness": 1},
    "two copies": {"copies": 2},
    "disk": {"disk": "here"},
}


@contextlib.contextmanager
def may_raise(kind: type[Exception], match: str) -> Generator[None]:
    """Lets an error of these words pass, and none at all."""
    try:
        yield
    except kind as error:
        if match not in str(error):
            raise
