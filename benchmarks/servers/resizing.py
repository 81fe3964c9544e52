"""Servers that are added while training: how long an update waits for that, beside what the rows take on the wire."""

import logging
import re
import time
from typing import Any, NamedTuple

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
_MOST_SECONDS = 60.0  # of training, while rows are copied ahead
_AHEAD, _AT_ONCE = "ours, copied ahead", "ours, at once"


class _Found(NamedTuple):
    """What one change has shown. **Fields:** `pause`: seconds of the update that waited for it. `step`: of one without.
    `meanwhile`: of one while rows are copied ahead, none where nothing is. `moved`: bytes. `rate`: bytes a second."""

    pause: float
    step: float
    meanwhile: list[float]
    moved: int
    rate: float

    @property
    def ratio(self) -> float:
        """Of the pause, without a step, to what its bytes take on the wire."""
        return (self.pause - self.step) * self.rate / self.moved


def resize_case(report: Report, *, num_rows: int, width: int, rounds: int) -> None:
    """Measures the update that waits for 2 servers to become 4, an update without that, and the bytes that moved; and
    the bandwidth between two servers by the same messages, as many bytes as one server sends. Rows are copied ahead,
    while training goes on, or all of them while it waits.

    **Arguments:** `num_rows`, `width`: of the table, with Adagrad's sums.
    """
    size = num_rows * (2 * 4 * width + 8) / 1e9
    case = f"2 servers become 4, {size:.2f} GB"
    found: dict[str, list[_Found]] = {_AHEAD: [], _AT_ONCE: []}
    for _ in range(rounds):
        for name, some in found.items():
            some.append(_resized(num_rows, width, is_ahead=name == _AHEAD))
    for name, some in found.items():
        report.add(case, name, "pause", "s", [one.pause for one in some])
        report.add(case, name, "step", "s", [one.step for one in some])
        if name == _AHEAD:
            report.add(case, name, "step meanwhile", "s", [float(np.median(one.meanwhile)) for one in some])
        report.add(case, name, "moved", "GB", [one.moved / 1e9 for one in some])
        report.add(case, name, "(pause - step) / (bytes / bandwidth)", "x", [one.ratio for one in some])
    rates = [one.rate / 1e9 for some in found.values() for one in some]
    report.add(case, "one message between two servers", "bandwidth", "GB/s", rates)
    report.at_most("resize", [one.ratio for one in found[_AHEAD]], 1.1)


def _resized(num_rows: int, width: int, *, is_ahead: bool) -> _Found:
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
                state: Any = step.init(jax.random.key(0))

                def trained(count: int) -> list[float]:
                    nonlocal state
                    seconds = list[float]()
                    for _ in range(count):
                        start = time.perf_counter()
                        state, metrics = step.update(state, drawn(random, num_rows))
                        step.finish()
                        float(metrics["loss"])
                        seconds.append(time.perf_counter() - start)
                    return seconds

                alone, meanwhile = float(np.median(trained(_STEPS)[1:])), list[float]()
                if is_ahead:
                    step.prepare_resize(4)
                    limit = time.monotonic() + _MOST_SECONDS
                    while time.monotonic() < limit and not any("copied ahead" in line for line in told):
                        meanwhile += trained(1)
                begun = time.perf_counter()
                step.resize(4)
                trained(1)
                pause = time.perf_counter() - begun
        (moved,) = (one for line in told for one in re.findall(r"place of 2: ([\d,]+) bytes", line))
        return _Found(pause, alone, meanwhile, int(moved.replace(",", "")), rate)
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
