"""Leaves that are small may be read by every process, or be exchanged: whichever was seen to be quicker here."""

import json
import time
from collections.abc import Callable

import jax
import numpy as np

from braidax.data.fetching.slots import Slots
from braidax.data.multihost.meeting import ProcessGroup
from braidax.data.sharding.load_plan import LoadPlan
from braidax.data.source import Source, read_samples, read_slices
from braidax.errors import BraidaxError

_TIMES = 3  # each way is tried, of which the quickest counts


def quicker(again: LoadPlan, exchanged: LoadPlan, source: Source, group: ProcessGroup, *, deadline: float) -> LoadPlan:
    """Returns one of two plans of the same batch, the same one on all processes.

    Each process reads its part of the first batch by either plan; then all exchange by the second one, which is a
    collective. The slowest process counts.

    **Arguments:** `again`: small leaves are read by all that hold them. `exchanged`: they are read once. `deadline`:
    `time.monotonic` seconds.

    **Raises:** as `ProcessGroup.gather`.
    """
    reading = _seconds(lambda: _read(again, source)) - _seconds(lambda: _read(exchanged, source))
    arrays = exchanged.arrays(Slots(exchanged.num_bytes, keep=1).take())
    jax.block_until_ready(exchanged.batch(arrays))  # compiles
    exchange = _seconds(lambda: jax.block_until_ready(exchanged.batch(arrays)))
    told = group.gather("small", json.dumps([reading, exchange]).encode(), deadline=deadline)
    found = np.array([json.loads(value) for value in told.values()])
    slowest_reading, slowest_exchange = found.max(axis=0)
    return exchanged if slowest_reading > slowest_exchange else again


def _read(plan: LoadPlan, source: Source) -> None:
    """Reads what this process needs of the first samples; an error is left to the batch that it belongs to."""
    try:
        for reading in plan.reads(plan.batch_size):
            indices, rows = np.arange(reading.start, reading.stop) % len(source), plan.empty_rows(reading)
            if plan.form == "samples":
                read_samples(source, indices, jax.tree.unflatten(plan.structure, rows))
            else:
                read_slices(source, indices, reading.boxes, rows)
    except BraidaxError:
        pass


def _seconds(call: Callable[[], object]) -> float:
    found: list[float] = []
    for _ in range(_TIMES):
        begun = time.perf_counter()
        call()
        found.append(time.perf_counter() - begun)
    return min(found)
