"""Ids of which something is kept, for a time."""

from collections.abc import Callable
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from braidax.parallel.served.on_servers.growing.slot_map import SlotMap, Slots

_FIRST = 1024  # slots to begin with


@final
class Entries:
    """Ids that are there, each with a slot, until they were not touched for so many updates.

    One that is due is not there any more, whenever its slot is used again; so no answer depends on when that is.

    **Arguments:** `most`: how many there are at most. `expire_after`: as of `Seen`. `grow`: is told how many slots
    there are, when they get more: whoever keeps something of each makes room.

    **Fields:** `ids`, `touched`: int64 by slot: whose it is, -1 for nobody's, and the last step that has touched it.
    """

    def __init__(self, most: int, expire_after: int | None, grow: Callable[[int], None]) -> None:
        self.most, self._expire_after, self._grow = most, expire_after, grow
        self._map, self._slots = SlotMap(), Slots(most)
        self.ids, self.touched = np.empty(0, np.int64), np.empty(0, np.int64)
        self._resize(min(most, _FIRST))

    def live(self, ids: NDArray[Any], now: int) -> NDArray[np.int64]:
        """Returns the slots of ids, -1 where they are not there. **Arguments:** `now`: how many updates were taken."""
        slots = self._map.find(ids).astype(np.int64)
        if self._expire_after is not None:
            slots[self.touched[slots] + self._expire_after < now] = -1  # the last slot stands for none
        return slots

    def fits(self, count: int, now: int) -> bool:
        """Returns whether there is room for so many more. **Arguments:** `now`: as of `live`."""
        return len(self._map) + count <= self.most or self.num_live(now) + count <= self.most

    def num_live(self, now: int) -> int:
        """Returns how many ids are there. **Arguments:** `now`: as of `live`."""
        return len(self._map) - len(self._due(now))

    def add(self, ids: NDArray[Any], now: int) -> NDArray[np.int64]:
        """Gives slots to ids that are not there, all different. **Arguments:** `now`: the step that touches them."""
        old = self._map.find(ids)
        self.forget(old[old >= 0])
        size = len(self.ids)
        if self._slots.end - self._slots.num_free + len(ids) > size:
            self.forget(self._due(now))
            wanted = len(self._map) + len(ids)
            if wanted > size // 4 * 3 and size < self.most:  # or it is looked for what is due again and again
                self._resize(min(self.most, max(wanted, 2 * size)))
        slots = self._slots.take(len(ids)).astype(np.int64)
        self._map.insert(ids, slots)
        self.ids[slots], self.touched[slots] = ids, now
        return slots

    def forget(self, slots: NDArray[Any]) -> None:
        """Takes ids out, by their slots."""
        self._map.remove(self.ids[slots])
        self.ids[slots] = -1
        self._slots.give_back(slots)

    def listed(self, now: int, ids: tuple[int, int], most: int, since: int) -> NDArray[np.int64]:
        """Returns the slots of some ids, in order.

        **Arguments:** `now`: as of `live`. `ids`: the first, and that behind the last. `most`: how many. `since`: the
        step from which on they were touched.
        """
        used = (self.ids >= ids[0]) & (self.ids < ids[1]) & (self.touched >= since)
        slots = np.flatnonzero(used & self.are_there(now))
        if len(slots) > most:
            slots = slots[np.argpartition(self.ids[slots], most)[:most]]
        return slots[np.argsort(self.ids[slots])]

    def are_there(self, now: int, slots: slice = slice(None)) -> NDArray[np.bool_]:
        """Returns which slots have an id that is there. **Arguments:** `now`: as of `live`. `slots`: of these."""
        found = self.ids[slots] >= 0
        if self._expire_after is not None:
            found &= self.touched[slots] + self._expire_after >= now
        return found

    def _due(self, now: int) -> NDArray[np.int64]:
        if self._expire_after is None:
            return np.empty(0, np.int64)
        return np.flatnonzero((self.ids >= 0) & (self.touched + self._expire_after < now))

    def _resize(self, size: int) -> None:
        ids, touched = np.full(size, -1, np.int64), np.full(size, -1, np.int64)
        ids[: len(self.ids)], touched[: len(self.ids)] = self.ids, self.touched
        self.ids, self.touched = ids, touched
        self._grow(size)
