"""Servers that are added while training: how long an update waits for that, beside what the rows take on the wire."""

import logging
import re
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import braidax as bx
from benchmarks.harness import Report
from benchmarks.servers.recovering import Lines, drawn, squared
from braidax.comm import Communicator
from braidax.gang import LocalGang
from braidax.parallel import Served

_STEPS = 8
_SENDS = 5


def resize_case(report: Report, *, num_rows: int, width: int, rounds: int) -> None:
    """Measures the update that waits for 2 servers to become 4, an update without that, and the bytes that moved; and
    the bandwidth between two servers by the same messages, as many bytes as one server sends.

    **Arguments:** `num_rows`, `width`: of the table, with Adagrad's sums.
    """
    size = num_rows * (2 * 4 * width + 8) / 1e9
    case = f"2 servers become 4, {size:.2f} GB"
    found = [_resized(num_rows, width) for _ in range(rounds)]
    pauses, steps, sizes, rates = (list(some) for some in zip(*found, strict=True))
    report.add(case, "ours", "pause", "s", pauses)
    report.add(case, "ours", "step", "s", steps)
    report.add(case, "ours", "moved", "GB", [one / 1e9 for one in sizes])
    report.add(case, "one message between two servers", "bandwidth", "GB/s", [one / 1e9 for one in rates])
    ratios = [(pause - step) * rate / one for pause, step, one, rate in found]
    report.add(case, "ours", "(pause - step) / (bytes / bandwidth)", "x", ratios)
    report.at_most("resize", ratios, 1.1)


def _resized(num_rows: int, width: int) -> tuple[float, float, int, float]:
    """Returns seconds of the pause and of a step, bytes that were moved, and bytes a second."""
    told: list[str] = []
    handler = Lines(told)
    log = logging.getLogger("braidax")
    log.addHandler(handler)
    random = np.random.default_rng(0)
    try:
        with LocalGang(4) as gang:
            half = num_rows // 4 * (2 * 4 * width + 8)
            rate = half / float(np.median(gang.run(_sent, half)[1]))
            step: Any = bx.parallelize(
                squared,
                optax.adagrad(0.1),
                jax.make_mesh((1,), ("data",), devices=jax.devices()[:1]),
                {"data": bx.Hybrid(tables=Served(spares=2))},
                init=lambda key: {"words": jax.random.normal(key, (num_rows, width)), "kernel": jnp.ones((width,))},
                batch={"ids": jax.ShapeDtypeStruct((256, 20), jnp.int32)},
                servers=gang,
            )
            with step:
                state, seconds = step.init(jax.random.key(0)), list[float]()
                for _ in range(_STEPS):
                    start = time.perf_counter()
                    state, metrics = step.update(state, drawn(random, num_rows))
                    step.finish()
                    seconds.append(time.perf_counter() - start)
                begun = time.perf_counter()
                step.resize(4)
                state, metrics = step.update(state, drawn(random, num_rows))
                step.finish()
                pause = time.perf_counter() - begun
                float(metrics["loss"])
        (moved,) = (one for line in told for one in re.findall(r"place of 2: ([\d,]+) bytes", line))
        return pause, float(np.median(seconds[1:])), int(moved.replace(",", "")), rate
    finally:
        log.removeHandler(handler)


def _sent(comm: Communicator, num_bytes: int) -> list[float]:
    """Lets rank 1 ask rank 0 for so many bytes. **Returns:** there, the seconds of each time."""
    found, content = list[float](), np.ones(num_bytes, np.uint8)
    if comm.rank == 0:
        with comm.serve(lambda rank, value: content) as serving:
            comm.barrier()
            serving.wait()
        return found
    comm.barrier()
    for _ in range(_SENDS if comm.rank == 1 else 0):
        start = time.perf_counter()
        comm.ask(0, b"rows")
        found.append(time.perf_counter() - start)
    comm.end_asking(0)
    return found
