"""Small batches that are at hand are read several at a time: to hand each over takes as long as to copy its samples."""

import functools
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from braidax.data.fetching.batch import Batch, Part
from braidax.data.fetching.fetch import Fetch
from braidax.data.knobs import Knobs
from braidax.data.sampling.order import Cursor, Order
from braidax.data.sharding.load_plan import LoadPlan
from braidax.data.source import Source, is_at_hand

_MOST_BYTES = 8 << 20  # of batches that are read at once
_SHARE = 2  # of the batches that a pass has begun, as many are read at once
_MOST = 32
_MOST_ARRAYS = 256  # that are made of what is read at once: a program that makes more takes long to compile
_FEWEST = 8  # at the beginning, where there are many leaves, or other processes: these hear of errors as much later
_STRETCHES = 3  # in flight: two that are read, one that is used; one thread reads but one

Draw = Callable[[Cursor, int], tuple[Source, NDArray[np.int64]]]
"""Returns the source, and the samples of so many batches from a cursor on."""


class Ahead(NamedTuple):
    """How far to run ahead.

    **Fields:** `at_once`: batches that are read at once. `in_flight`: batches. `room`: batches that will be read at
    once later in the pass: memory is made for as many, once.
    """

    at_once: int
    in_flight: int
    room: int


class Begun(NamedTuple):
    """A batch that was begun. **Fields:** `start`, `after`: where it starts, and the place behind it. `batch`."""

    start: Cursor
    after: Cursor
    batch: Batch | Part


def how_far(
    source: Source, plan: LoadPlan, knobs: Knobs, prefetch: int, *, num_begun: int, is_alone: bool = True
) -> Ahead:
    """Returns how far a loader runs ahead now.

    **Arguments:** `prefetch`: batches in flight, where each is read by itself. `num_begun`: batches of this pass.
    `is_alone`: whether no other process loads them, too.
    """
    num_bytes = max(plan.at_once.num_bytes, 1)
    later = min(_MOST, _MOST_ARRAYS // len(plan.leaves)) if is_alone else 0
    most, room = (_power_of_two(some, num_bytes) for some in (min(later, num_begun // _SHARE), later))
    if most < 2 or not plan.at_once.stacks or knobs.hedge_seconds == 0 or not is_at_hand(source):
        return Ahead(1, prefetch, 1)
    stretches = min(_STRETCHES, 1 + (knobs.threads or _STRETCHES))

    def in_flight(at_once: int) -> int:
        if knobs.prefetch is not None:
            return prefetch
        return max(prefetch, min(stretches * at_once, knobs.max_bytes // num_bytes))

    at_once, room = (max(1, min(some, in_flight(some) // stretches)) for some in (most, room))
    return Ahead(at_once, in_flight(most), room)


def _power_of_two(most: int, num_bytes: int) -> int:
    """Returns how many batches of so many bytes are read at once, at most: a power of two."""
    return 1 << min(max(_FEWEST, most), _MOST_BYTES // num_bytes).bit_length() >> 1


class Coming:
    """The batches of a pass that are in flight, in order; each is taken from it once.

    **Arguments:** `fetch`: reads them. `order`, `draw`: what they are of. `cursor`: a settled one, of the first. `end`:
    the epoch before which they end; None: never.

    **Fields:** `num_begun`: batches of this pass. `most`: as soon as no more are left, it is time to begin others.
    """

    def __init__(self, fetch: Fetch, order: Order, draw: Draw, cursor: Cursor, end: int | None) -> None:
        self.num_begun, self.most = 0, 0
        self._fetch, self._order, self._draw = fetch, order, draw
        self._first, self._ahead, self._end = cursor, cursor, end
        self._batches: deque[Begun] = deque()

    def __len__(self) -> int:
        return len(self._batches)

    def take(self) -> Begun:
        """Returns the next one."""
        return self._batches.popleft()

    def begin(self, far: Ahead, *, num_made: int, num_to_make: int) -> list[Batch | Part]:
        """Begins to fetch others, and returns these.

        **Arguments:** `far`: how far to run ahead. `num_made`: batches that were taken, and are not handed out yet.
        `num_to_make`: how many of those there are to be.
        """
        self.most = far.in_flight + num_to_make - far.at_once
        fresh: list[Batch | Part] = []
        while len(self) + num_made <= self.most and (self._end is None or self._ahead.epoch < self._end):
            at_once = 1 if self._ahead == self._first else far.at_once  # the first one is waited for
            begun = _begin(self._fetch, self._order, self._ahead, self._draw, far._replace(at_once=at_once))
            self._batches += begun
            self.num_begun, self._ahead = self.num_begun + len(begun), begun[-1].after
            fresh += [one.batch for one in begun]
        return fresh


def _begin(fetch: Fetch, order: Order, cursor: Cursor, draw: Draw, far: Ahead) -> list[Begun]:
    """Begins to fetch the next batches, of one epoch: as many as are read at once, as far as it has full ones."""
    at_once = min(far.at_once, (order.num_samples - cursor.position) // order.batch_size)
    cursors = [cursor]
    while len(cursors) <= max(1, at_once):
        cursors.append(order.after(cursors[-1]))
    draws = [functools.partial(draw, start, 1) for start in cursors[:-1]]
    batches: Sequence[Batch | Part]
    if at_once > 1:
        batches = fetch.start_several(functools.partial(draw, cursor, at_once), draws, far.room)
    else:
        batches = [fetch.start(draws[0])]
    for start in cursors[:-1]:
        if order.begins_window(start):
            fetch.run(order.look_ahead, start)
    return list(itertools.starmap(Begun, zip(cursors[:-1], cursors[1:], batches, strict=True)))
