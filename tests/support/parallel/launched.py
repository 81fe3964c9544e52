"""Steps whose servers the launcher has: `braidax launch --servers N --module tests.support.parallel.launched CASE`.

Servers and ranks are killed where a case says so; the first rank tells what training came to.
"""

import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

import braidax.parallel as bx
from braidax.checkpoint import Checkpointer, Every
from braidax.errors import ArgumentError
from braidax.parallel.given.arrays import place
from tests.support.gang.clusters import until
from tests.support.gang.programs import is_gone
from tests.support.parallel.workers.teams import BATCH, batches, make_step, own_part

NUM_STEPS, SAVED, DEADLY = 8, 4, 6
WORKERS = 2
KILLED = {2: 1, 7: 0}  # servers, by step


def pid_of_server(number: int) -> int:
    """Returns the process of a server of this job."""
    told_by = {int(environ.parent.name): environ for environ in Path("/proc").glob("[0-9]*/environ")}
    if folder := os.environ.get("BRAIDAX_TESTED_FORKS"):
        told_by |= {int(note.stem): note for note in Path(folder).glob("*.environ")}
    for pid, environ in told_by.items():
        with contextlib.suppress(OSError):
            told = environ.read_text().split("\0")
            is_it = f"BRAIDAX_SERVER={number}" in told and f"BRAIDAX_JOB={os.environ['BRAIDAX_JOB']}" in told
            if is_it and not is_gone(pid):
                return pid
    raise LookupError(f"server {number} is not there")


def kill(pid: int) -> None:
    """Kills a process."""
    os.kill(pid, signal.SIGKILL)


def tell(**found: Any) -> None:
    """Prints what was found."""
    sys.stdout.write(json.dumps(found) + "\n")


def saved(folder: str, lost: str) -> None:
    """Trains on two devices, of one process or of two; behind a checkpoint of the first generation a server is killed,
    and where "server and rank" are `lost`, rank 1 of the second one."""
    generation, rank = int(os.environ["BRAIDAX_GENERATION"]), jax.process_index()
    mesh = jax.make_mesh((2,), ("data",))
    with (
        make_step(None, bx.Hybrid(tables="servers"), mesh=mesh) as step,
        Checkpointer(folder, Every(NUM_STEPS)) as saver,
    ):
        state, _ = saver.restore((step.init(jax.random.key(0)), step.tables))
        begun, losses = int(state.step), list[float]()
        for number, batch in enumerate(batches(NUM_STEPS)[begun:], begun):
            if number == DEADLY and generation == 0 and rank == 0:
                kill(pid_of_server(0))
            if number == DEADLY and generation == 1 and rank == 1 and lost == "server and rank":
                kill(os.getpid())
            state, metrics = step.update(state, place(batch, step.batch_shardings))
            losses.append(float(metrics["loss"]))
            if number + 1 == SAVED:
                saver.save((state, step.tables))
        words = step.table("words")
        if rank == 0:
            tell(begun=begun, losses=losses, words=words.tolist())


def workers() -> None:
    """Trains twice as one of two workers, each with a JAX of its own."""
    data = batches(NUM_STEPS)
    for _ in range(2):
        with make_step(None, size=BATCH // WORKERS) as step:
            state, losses, refused = step.init(jax.random.key(0)), list[float](), ""
            try:
                make_step(None, size=BATCH // WORKERS)
            except ArgumentError as error:
                refused = str(error)
            for batch in data:
                state, metrics = step.update(state, own_part(batch, step.worker, WORKERS))
                losses.append(float(metrics["loss"]))
            tell(losses=losses, words=step.params()["words"].tolist(), refused=refused)


def copies() -> None:
    """Trains while one of two servers is killed, that have copies of one another's rows."""
    with make_step(None, bx.Hybrid(tables=bx.Served(copies=2))) as step:
        state, losses = step.init(jax.random.key(0)), list[float]()
        for number, batch in enumerate(batches(NUM_STEPS)):
            if number == DEADLY:
                kill(pid_of_server(1))
            state, metrics = step.update(state, place(batch, step.batch_shardings))
            losses.append(float(metrics["loss"]))
        tell(losses=losses, words=step.table("words").tolist())


def replaced() -> None:
    """Trains in one process, or two, while both servers are killed that have copies of one another's rows: the second
    one when the first is there again."""
    mesh, is_first = jax.make_mesh((jax.device_count(),), ("data",)), jax.process_index() == 0
    with make_step(None, bx.Hybrid(tables=bx.Served(copies=2)), mesh=mesh) as step:
        state, losses = step.init(jax.random.key(0)), list[float]()
        for number, batch in enumerate(batches(NUM_STEPS)):
            if number == SAVED and is_first:
                until(lambda: bool(step._servers._asking.wanted()))
            if number in KILLED and is_first:
                kill(pid_of_server(KILLED[number]))
            state, metrics = step.update(state, place(batch, step.batch_shardings))
            losses.append(float(metrics["loss"]))
        words = step.table("words")
        if is_first:
            tell(losses=losses, words=words.tolist())


def stopped() -> None:
    """Waits to be stopped, and reads variables from the servers then."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    with make_step(None) as step:
        step.init(jax.random.key(0))
        try:
            with pytest.raises(ArgumentError) as refused:
                make_step(None)
            tell(pids=[os.getpid(), pid_of_server(0)], refused=str(refused.value))
            sys.stdout.flush()
            while True:
                signal.pause()
        finally:
            tell(bias=float(step.params()["bias"]))


if __name__ == "__main__":
    {"saved": saved, "workers": workers, "copies": copies, "replaced": replaced, "stopped": stopped}[sys.argv[1]](
        *sys.argv[2:]
    )
