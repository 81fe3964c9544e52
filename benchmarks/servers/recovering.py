"""A server that is killed while training: how long until a spare one has what it had."""

import logging
import os
import re
import signal
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import braidax as bx
from benchmarks.harness import Report
from braidax.comm import Communicator
from braidax.gang import LocalGang
from braidax.parallel import Served

_BATCH, _READ = 256, 20
_TAKEN = r"taken the place of server 0 in ([\d.]+) s"
_LIMIT_SECONDS = 60.0


def recover_case(report: Report, *, num_rows: int, width: int, rounds: int) -> None:
    """Measures seconds from the kill to the update before which the place was taken, and the longest update.

    **Arguments:** `num_rows`, `width`: of the table, which each of two servers has whole, with Adagrad's sums.
    """
    size = num_rows * (2 * 4 * width + 8) / 1e9
    case = f"a killed server of {size:.2f} GB"
    found = [_recovered(num_rows, width) for _ in range(rounds)]
    report.add(case, "ours", "back", "s", [back for back, _, _ in found])
    report.add(case, "ours", "longest update", "s", [longest for _, longest, _ in found])
    report.add(case, "ours", "copied in", "s", [copied for _, _, copied in found])
    report.at_most("recover", [back for back, _, _ in found], 2)


def _recovered(num_rows: int, width: int) -> tuple[float, float, float]:
    told: list[str] = []
    handler = Lines(told)
    log = logging.getLogger("braidax")
    log.addHandler(handler)
    random = np.random.default_rng(0)
    batch = {"ids": jax.ShapeDtypeStruct((_BATCH, _READ), jnp.int32)}
    strategies = {"data": bx.Hybrid(tables=Served(copies=2, spares=1))}
    try:
        with LocalGang(3) as gang:
            pids = gang.run(own_pid)
            step: Any = bx.parallelize(
                squared,
                optax.adagrad(0.1),
                jax.make_mesh((1,), ("data",), devices=jax.devices()[:1]),
                strategies,
                init=lambda key: {"words": jax.random.normal(key, (num_rows, width)), "kernel": jnp.ones((width,))},
                batch=batch,
                servers=gang,
            )
            with step:
                state, longest = step.init(jax.random.key(0)), 0.0
                for _ in range(5):
                    state, _ = step.update(state, drawn(random, num_rows))
                step.finish()
                os.kill(pids[0], signal.SIGKILL)
                begun = time.perf_counter()
                while not (copied := [one for line in told for one in re.findall(_TAKEN, line)]):
                    if time.perf_counter() - begun > _LIMIT_SECONDS:
                        raise TimeoutError(f"no server has taken the place of the lost one; the log says: {told}")
                    start = time.perf_counter()
                    state, _ = step.update(state, drawn(random, num_rows))
                    longest = max(longest, time.perf_counter() - start)
                return time.perf_counter() - begun, longest, float(copied[0])
    finally:
        log.removeHandler(handler)


class Lines(logging.Handler):
    """Puts what is logged into a list."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        """Adds a line."""
        self._lines.append(record.getMessage())


def own_pid(comm: Communicator) -> int:
    return os.getpid()


def drawn(random: np.random.Generator, num_rows: int) -> Any:
    """Returns a batch of ids."""
    return {"ids": random.integers(0, num_rows, (_BATCH, _READ)).astype(np.int32)}


def squared(params: Any, batch: Any) -> Any:
    """Returns a loss that reads rows of `words`."""
    read = jnp.take(params["words"], batch["ids"], axis=0).mean(1)
    return jnp.square(jnp.tanh(read @ params["kernel"]) - 1).mean()
