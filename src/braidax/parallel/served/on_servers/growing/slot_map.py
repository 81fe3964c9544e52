"""Where the row of an id lies, among rows of which there are fewer than ids."""

import secrets
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from braidax.parallel.served.row_memory import compiled

_ENTRY = np.dtype([("id", np.int64), ("hash", np.uint32), ("slot", np.int32)])
_FEWEST = 1024
_MOST_SLOTS = 2**31 - 1


@final
class SlotMap:
    """A map of ids to slots, in C where that was compiled: open addressing, 16 bytes an entry; otherwise a dict.

    Its hashes are drawn at random, for each map anew, so that no choice of ids makes it slow. What it answers does not
    depend on them.

    **Arguments:** `most_load`: the part of its entries that is used at most, below 1; it grows by doubling.

    **Fields:** `longest`: how many entries the longest search of the last call has looked at; 0 of a dict.
    """

    def __init__(self, *, most_load: float = 0.8) -> None:
        if not 0 < most_load < 1:
            raise ValueError(f"most_load={most_load}: expected a number above 0 and below 1")
        self._load, self._count, self.longest = most_load, 0, 0
        self._dict: dict[int, int] | None = None if compiled() is not None else {}
        self._table = np.random.default_rng(secrets.randbits(128)).integers(0, 1 << 32, (8, 256), np.uint32)
        self._entries = _empty(_FEWEST)

    def __len__(self) -> int:
        """How many ids it has."""
        return self._count if self._dict is None else len(self._dict)

    def find(self, ids: NDArray[Any]) -> NDArray[np.int32]:
        """Returns the slots of ids, -1 for those that it does not have. **Arguments:** `ids`: `[m]`, of 0 or more."""
        if self._dict is not None:
            return np.array([self._dict.get(one, -1) for one in ids.tolist()], np.int32)
        return self._call("find", ids, np.empty(len(ids), np.int32))

    def insert(self, ids: NDArray[Any], slots: NDArray[Any]) -> None:
        """Adds ids. **Arguments:** `ids`: all different, none of which it has. `slots`: theirs."""
        if self._dict is not None:
            self._dict.update(zip(ids.tolist(), slots.tolist(), strict=True))
            return
        most = int(self._load * len(self._entries))
        if self._count + len(ids) > most:
            self._grow(self._count + len(ids))
        self._call("insert", ids, slots.astype(np.int32))
        self._count += len(ids)

    def remove(self, ids: NDArray[Any]) -> None:
        """Takes ids out. **Arguments:** `ids`: all different, all of which it has."""
        if self._dict is not None:
            for one in ids.tolist():
                del self._dict[one]
            return
        self._call("remove", ids, np.empty(len(ids), np.int32))
        self._count -= len(ids)

    def _grow(self, count: int) -> None:
        size = len(self._entries)
        while int(self._load * size) < count:
            size *= 2
        old = self._entries[self._entries["id"] >= 0]
        self._entries = _empty(size)
        self._call("insert", old["id"], np.ascontiguousarray(old["slot"]))

    def _call(self, name: str, ids: NDArray[Any], slots: NDArray[np.int32]) -> NDArray[np.int32]:
        binding = compiled()
        assert binding is not None, "a dict is asked otherwise"
        given = np.require(ids, np.int64, ["C_CONTIGUOUS", "ALIGNED"])
        self.longest = getattr(binding, name)(self._entries.view(np.uint8), self._table, given, slots)
        return slots


@final
class Slots:
    """Slots of rows, handed out and given back.

    **Arguments:** `most`: how many there are at most.
    """

    def __init__(self, most: int) -> None:
        self._most, self._next = min(most, _MOST_SLOTS), 0
        self._free: list[NDArray[np.int32]] = []

    @property
    def end(self) -> int:
        """The first slot that was never handed out."""
        return self._next

    @property
    def num_free(self) -> int:
        """How many slots were given back, and not handed out again."""
        return sum(map(len, self._free))

    def take(self, count: int) -> NDArray[np.int32]:
        """Hands slots out. **Raises:** `ValueError` where there are none left."""
        found, missing = list[NDArray[np.int32]](), count
        while missing and self._free:
            some = self._free.pop()
            found.append(some[:missing])
            if len(some) > missing:
                self._free.append(some[missing:])
            missing -= len(found[-1])
        if self._next + missing > self._most:
            raise ValueError(f"{count} slots of {self._most} were wanted, and fewer are free")
        found.append(np.arange(self._next, self._next + missing, dtype=np.int32))
        self._next += missing
        return np.concatenate(found)

    def give_back(self, slots: NDArray[Any]) -> None:
        """Takes slots back."""
        if len(slots):
            self._free.append(slots.astype(np.int32))


def _empty(size: int) -> NDArray[Any]:
    entries = np.zeros(size, _ENTRY)
    entries["id"] = -1
    return entries
