"""How fast stages send to one another, where nobody has given the figures of a machine."""

import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from braidax.errors import ArgumentError
from braidax.parallel.plan.costs.machine import Link

COUNTED_LINK = Link(1e9)
"""Beside counted operations: a byte that is sent takes as long as one that is read."""

_SMALL_BYTES, _LARGE_BYTES = 4 << 10, 4 << 20  # messages: the first are mostly latency, of the second it is little
_FREE_LINK = Link(1e30)


def measured_link(devices: Sequence[Any], *, num_runs: int = 9) -> Link:
    """Measures how a device sends to another one as stages do it, by `jax.device_put`.

    Messages of two sizes tell latency and rate apart; of all runs the shortest counts. How much computing hides is not
    measured: all of it, as far as there is any.

    **Arguments:** `devices`: of which the first sends to the second; one alone has a free link.

    **Raises:** `ArgumentError` for a device of another process, to which nothing is sent so.
    """
    if len(devices) < 2:
        return _FREE_LINK
    sender, receiver = devices[:2]
    if any(one.process_index != jax.process_index() for one in (sender, receiver)):
        raise ArgumentError(
            "the link between stages is not measured across processes: give Pipeline(machine=measure_machine(mesh))"
        )
    few, many = (_once(sender, receiver, size, num_runs) for size in (_SMALL_BYTES, _LARGE_BYTES))
    rate = (_LARGE_BYTES - _SMALL_BYTES) / max(many - few, _LARGE_BYTES / 1e15)
    return Link(_rounded(rate), _rounded(max(few - _SMALL_BYTES / rate, 0.0)))


def _once(sender: Any, receiver: Any, num_bytes: int, num_runs: int) -> float:
    array = jax.block_until_ready(jax.device_put(np.ones(num_bytes // 4, np.float32), sender))
    taken: list[float] = []
    for _ in range(num_runs + 1):
        begun = time.perf_counter()
        jax.block_until_ready(jax.device_put(array, receiver))
        taken.append(time.perf_counter() - begun)
    return min(taken[1:])


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")
