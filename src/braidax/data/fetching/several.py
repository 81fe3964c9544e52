"""Small batches that are at hand are read several at a time: to hand each over takes as long as to copy its samples."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from braidax.data.fetching.batch import Batch, Part
from braidax.data.fetching.fetch import Fetch
from braidax.data.knobs import Knobs
from braidax.data.multihost.rounds import Rounds
from braidax.data.sampling.order import Cursor, Order
from braidax.data.sharding.load_plan import LoadPlan
from braidax.data.source import Source, is_at_hand

_MOST_BYTES = 8 << 20  # of batches that are read at once
_FIRST_BYTES = 4 << 20  # at the beginning of a pass: to touch memory first takes longer than to fill it
_SHARE = 16  # of what a pass has read, as much is read at once
_MOST = 8
_STRETCHES = 3  # in flight: two that are read, one that is used; one thread reads but one

Draw = Callable[[Cursor, int], tuple[Source, NDArray[np.int64]]]
"""Returns the source, and the samples of so many batches from a cursor on."""


class Ahead(NamedTuple):
    """How far to run ahead. **Fields:** `at_once`: batches that are read at once. `in_flight`: batches."""

    at_once: int
    in_flight: int


def how_far(source: Source, plan: LoadPlan, knobs: Knobs, prefetch: int, *, num_begun: int) -> Ahead:
    """Returns how far a loader runs ahead now.

    **Arguments:** `prefetch`: batches in flight, where each is read by itself. `num_begun`: batches of this pass.
    """
    num_bytes = max(plan.at_once.num_bytes, 1)
    at_once = min(_MOST_BYTES, max(_FIRST_BYTES, num_begun * num_bytes // _SHARE)) // num_bytes
    most = min(_MOST, 1 << at_once.bit_length() >> 1)  # a power of two: each growth is memory anew
    if most < 2 or not plan.at_once.stacks or knobs.hedge_seconds == 0 or not is_at_hand(source):
        return Ahead(1, prefetch)
    stretches = min(_STRETCHES, 1 + (knobs.threads or _STRETCHES))
    if knobs.prefetch is None:
        prefetch = max(prefetch, min(stretches * most, knobs.max_bytes // num_bytes))
    return Ahead(max(1, min(most, prefetch // stretches)), prefetch)


def begin(
    fetch: Fetch, rounds: Rounds | None, order: Order, cursor: Cursor, draw: Draw, *, at_once: int
) -> list[tuple[Cursor, Cursor, Batch | Part]]:
    """Begins to fetch the next batches, of one epoch. **Returns:** where each starts, the place behind it, the batch.

    **Arguments:** `rounds`: of several processes. `cursor`: a settled one. `at_once`: how many, as far as the epoch has
    full ones.
    """
    at_once = min(at_once, (order.num_samples - cursor.position) // order.batch_size)
    cursors = [cursor]
    while len(cursors) <= max(1, at_once):
        cursors.append(order.after(cursors[-1]))
    draws = [functools.partial(draw, start, 1) for start in cursors[:-1]]
    batches: Sequence[Batch | Part]
    if at_once > 1:
        batches = fetch.start_several(functools.partial(draw, cursor, at_once), draws)
    else:
        batches = [fetch.start(draws[0])]
    if rounds is not None:
        rounds.confirm(batches)
    for start in cursors[:-1]:
        if order.begins_window(start):
            fetch.run(order.look_ahead, start)
    return list(zip(cursors[:-1], cursors[1:], batches, strict=True))
