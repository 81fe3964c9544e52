"""Steps whose tables are on disk, rows ahead, beside steps whose tables are in memory."""

import itertools
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, final

import jax

import braidax as bx
from benchmarks.harness import Report, models, take_turns
from benchmarks.harness.memory import NoLimitError, memory_limit
from benchmarks.servers.disk import DISK, MEMORY, rows_bytes
from benchmarks.servers.recovering import own_pid
from benchmarks.servers.steps import make_step, placed
from braidax.gang import LocalGang
from braidax.parallel import Served

_AHEAD = 4  # batches whose rows are pulled while others are trained


def disk_steps_case(
    report: Report,
    folder: Path,
    model: models.Model,
    *,
    num_rows: int,
    limit_bytes: int,
    warm: int,
    count: int,
    rounds: int,
) -> None:
    """Measures steps of a device beside one server.

    **Arguments:** `folder`: on the disk. `num_rows`: of all tables. `limit_bytes`: for all that the server takes whose
    tables are there. `warm`: steps before. `count`: steps that are timed together, each with a new batch.
    """
    case = f"disk, steps, {model.name}, memory limit {limit_bytes >> 20:,} MiB"
    with tempfile.TemporaryDirectory(dir=folder, prefix=".braidax-disk-") as place, ExitStack() as stack:
        try:
            group = stack.enter_context(memory_limit(limit_bytes))
        except NoLimitError as error:
            report.missing(case, DISK, str(error))
            report.not_measured("disk", ">= 0.5", str(error))
            return
        found: dict[str, _Training] = {}
        memory_bytes = rows_bytes(limit_bytes, num_rows)
        for name, served in {DISK: Served(disk=place, memory_bytes=memory_bytes), MEMORY: Served()}.items():
            gang = stack.enter_context(LocalGang(1))
            if name == DISK:
                group.add(gang.run(own_pid)[0])
            mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
            step = make_step(model, bx.Hybrid(tables=served), mesh, gang, stack)
            found[name] = _Training(step, map(model.batch, itertools.count()))
            found[name].take(warm)
        systems = {name: (lambda one=one: one.take(count)) for name, one in found.items()}
        for name, seconds in take_turns(systems, rounds=rounds).items():
            report.add(case, name, "time", "ms", [1e3 * one for one in seconds])
        report.add(case, DISK, "memory taken", "MiB", [group.peak_bytes / (1 << 20)])
    report.against("disk", case, "time", ours=DISK, peers=[MEMORY], at_least=0.5)


@final
class _Training:
    """A step, and the batches that it is told ahead. **Arguments:** `batches`: on the host, without end."""

    def __init__(self, step: Any, batches: Iterator[Any]) -> None:
        self._step, self._batches = step, batches
        self._state = step.init(jax.random.key(0))

    def take(self, count: int) -> float:
        """Returns the seconds of a step."""
        host = [next(self._batches) for _ in range(count)]
        batches = [jax.tree.map(placed, batch, self._step.batch_shardings) for batch in host]
        start = time.perf_counter()
        metrics: Any = None
        for batch in batches[:_AHEAD]:
            self._step.prepare(batch)
        for number, batch in enumerate(batches):
            if number + _AHEAD < count:
                self._step.prepare(batches[number + _AHEAD])
            self._state, metrics = self._step.update(self._state, batch)
        self._step.finish()
        jax.block_until_ready((self._state, metrics))
        return (time.perf_counter() - start) / count
