"""What several processes hold may be read by each of them, or once and be exchanged: whichever was seen to be quicker.

What is small is read again by default, what is large is read once. Each way that may be quicker is tried here, before
the first batch, and all processes take the same one; `DataLoader.explain` shows it.
"""

import json
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from braidax.data.fetching.slots import Slots
from braidax.data.multihost.meeting import ProcessGroup
from braidax.data.sharding.load_plan import LoadPlan, Reading
from braidax.data.sharding.load_sharding import Again
from braidax.data.source import Source, read_samples, read_slices
from braidax.errors import BraidaxError

AGAIN_BYTES = 1 << 26
"""A batch of less than this may be read by several processes whole, if that was seen to be quicker."""

_TIMES = 3  # each way is tried, of which the quickest counts
_SLOW_SECONDS = 0.02  # what takes longer than this to read is tried once

Make = Callable[..., LoadPlan]


def quickest(plan: LoadPlan, make: Make, source: Source, group: ProcessGroup, *, deadline: float) -> LoadPlan:
    """Returns the quickest plan of a batch, the same one on all processes.

    Each process reads its part of a batch by each plan; then all exchange by it, which is a collective. The slowest
    process counts. Only what is stored is read again whole, not what code makes of it, which may draw other numbers on
    each process; and only where the processes have read the same bytes.

    **Arguments:** `plan`: by which small leaves are read again. `make`: makes others of the same batch, as `plan_load`
    with `again=`. `deadline`: `time.monotonic` seconds.

    **Raises:** as `ProcessGroup.gather`.
    """
    plans: dict[Again, LoadPlan] = {"small": plan}
    if plan.reads_again:
        plans["nothing"] = make(again="nothing")
    if plan.cut_dims is not None and plan.placement == "devices" and plan.reshard.members:
        whole = make(again="all")
        if whole.reads_again and whole.sample_bytes * whole.batch_size < AGAIN_BYTES:
            plans["all"] = whole
    if len(plans) == 1:
        return plan
    tried = [[_reading_seconds(each, source), _exchange_seconds(each)] for each in plans.values()]
    checksums = _checksums(plans["all"], source) if "all" in plans else {}
    told = group.gather("again", json.dumps([tried, checksums]).encode(), deadline=deadline)
    answers = [json.loads(value) for value in told.values()]
    slowest = np.array([answer[0] for answer in answers]).max(axis=0).sum(axis=1)
    seconds = dict(zip(plans, slowest.tolist(), strict=True))
    if not _agree([answer[1] for answer in answers]):
        del seconds["all"]
    return plans[min(seconds, key=seconds.__getitem__)]


def _agree(read: list[dict[str, int]]) -> bool:
    """Says whether what several processes have read is the same. **Arguments:** `read`: checksums, by what was read."""
    seen: dict[str, int] = {}
    return all(seen.setdefault(what, checksum) == checksum for one in read for what, checksum in one.items())


def _checksums(plan: LoadPlan, source: Source) -> dict[str, int]:
    """Returns those of what this process reads of a batch, by what it is."""
    return {
        f"{reading.start}:{reading.stop}/{number}/{box}": zlib.crc32(leaf.data)
        for reading, leaves in _rows(plan, source, 0)
        for number, (leaf, box) in enumerate(zip(leaves, reading.boxes, strict=True))
        if leaf is not None
    }


def _reading_seconds(plan: LoadPlan, source: Source) -> float:
    found: list[float] = []
    for number in range(_TIMES):
        begun = time.perf_counter()
        for _ in _rows(plan, source, number):
            pass
        found.append(time.perf_counter() - begun)
        if found[-1] > _SLOW_SECONDS:
            break
    return min(found)


def _rows(plan: LoadPlan, source: Source, number: int) -> Iterator[tuple[Reading, list[NDArray[Any] | None]]]:
    """Yields what this process reads of a batch; an error is left to the batch that it belongs to.

    **Arguments:** `number`: of the batch, below `_TIMES`. Its samples lie as far apart as those of a shuffled one.
    """
    stride = max(1, len(source) // plan.batch_size)
    try:
        for reading in plan.reads(plan.batch_size):
            rows = plan.empty_rows(reading)
            indices = (np.arange(reading.start, reading.stop) * stride + number * stride // _TIMES) % len(source)
            if plan.form == "samples":
                read_samples(source, indices, jax.tree.unflatten(plan.structure, rows))
            else:
                read_slices(source, indices, reading.boxes, rows)
            yield reading, rows
    except BraidaxError:
        pass


def _exchange_seconds(plan: LoadPlan) -> float:
    if not plan.reshard.members:
        return 0.0
    arrays = plan.arrays(Slots(plan.num_bytes, keep=1).take())
    jax.block_until_ready(plan.batch(arrays))  # compiles
    found: list[float] = []
    for _ in range(_TIMES):
        begun = time.perf_counter()
        jax.block_until_ready(plan.batch(arrays))
        found.append(time.perf_counter() - begun)
    return min(found)
