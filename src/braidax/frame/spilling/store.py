"""Tables that wait: in memory as long as there is room, then on disk."""

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from braidax.frame.polars import Schema, pl
from braidax.frame.sight.measuring import UNMEASURED, Unmeasured
from braidax.frame.spilling.file import SpillFile
from braidax.frame.spilling.memory import Budget, Memory
from braidax.frame.spilling.packing import Packed, Packing

_READ_BYTES = 1 << 20  # of batches that are read as one

Key = tuple[int, int]
"""Names a sequence of rows: a partition, and the rank from which its rows came."""


@dataclass
class Spilled:
    """What a rank has written to disk. **Fields:** bytes, of how many tables."""

    num_bytes: int = 0
    num_tables: int = 0


class Spill:
    """The tables of a rank that wait, and their files; a context that gives all of them up.

    **Arguments:** `memory`: of this rank. `size`: of the ranks. `meter`: measures what goes to disk and comes back.
    **Raises:** as `Budget.of`.
    """

    def __init__(self, memory: Memory, size: int, meter: Unmeasured = UNMEASURED) -> None:
        self.budget = Budget.of(memory, size)
        self.meter = meter
        self.spilled = Spilled()
        self.kept_bytes = 0
        self._folder = memory.spill_folder
        self._open: weakref.WeakSet[Store] = weakref.WeakSet()

    def store(self, schema: Schema, *, owner: int | None = None) -> "Store":
        """Returns a new store for rows of a schema. **Arguments:** `owner`: the operation that they wait for."""
        store = Store(self, Packing(schema), self.meter.owner() if owner is None else owner)
        self._open.add(store)
        return store

    def file(self) -> SpillFile:
        """Returns a new file. **Raises:** as `SpillFile`."""
        self.spilled.num_tables += 1
        return SpillFile(self._folder)

    def __enter__(self) -> "Spill":
        return self

    def __exit__(self, *exc: object) -> None:
        for store in list(self._open):
            store.close()


@dataclass(slots=True)
class _Place:
    """Where a batch is: in memory, or so far from the begin of the file."""

    absent: bytes
    num_bytes: int
    data: Any
    begin: int = -1


class _Content:
    """What a store has: apart from it, so that it can be given up when nobody has the store any more."""

    def __init__(self, spill: Spill, owner: int) -> None:
        self.spill, self.owner = spill, owner
        self.kept_bytes = 0
        self.file: SpillFile | None = None
        self.places: dict[Key, list[_Place]] = {}
        self.kept: list[_Place] = []

    def close(self) -> None:
        """Gives all of it up; a second call does nothing."""
        self.spill.kept_bytes -= self.kept_bytes
        self.kept_bytes = 0
        self.places.clear()
        self.kept.clear()
        if self.file is not None:
            self.file.close()


class Store:
    """Rows of one schema, in sequences: those of one key are read in the order in which they came.

    What of it is in memory goes to disk when all stores of a rank are beyond their budget.
    """

    def __init__(self, spill: Spill, packing: Packing, owner: int) -> None:
        self.packing = packing
        self.num_bytes: dict[Key, int] = {}
        self._content = _Content(spill, owner)
        self._end = weakref.finalize(self, self._content.close)

    def append(self, key: Key, frame: "pl.DataFrame") -> None:
        """Adds rows to a sequence. **Raises:** `CommError` for those of another schema; `OSError`."""
        with self._content.spill.meter.phase("serialize"):
            for batch in self.packing.pack(frame):
                self.append_packed(key, batch)

    def append_slices(self, keys: Sequence[Key], frame: "pl.DataFrame", ends: Sequence[int]) -> None:
        """Adds to each of some sequences the rows up to its end, from the one before on. **Raises:** as `append`."""
        with self._content.spill.meter.phase("serialize"):
            for key, batch in zip(keys, self.packing.slices(frame, ends), strict=True):
                self.append_packed(key, batch)

    def append_packed(self, key: Key, batch: Packed) -> None:
        """Adds a batch to a sequence. **Raises:** `OSError` for a disk that is full."""
        content, num_bytes = self._content, len(batch.data)
        place = _Place(batch.absent, num_bytes, batch.data)
        content.places.setdefault(key, []).append(place)
        content.kept.append(place)
        content.kept_bytes += num_bytes
        content.spill.kept_bytes += num_bytes
        self.num_bytes[key] = self.num_bytes.get(key, 0) + num_bytes
        if content.spill.kept_bytes > content.spill.budget.kept_bytes:
            self._write()

    def read(self, keys: Sequence[Key]) -> Iterator["pl.DataFrame"]:
        """Yields the rows of sequences, one after the other. **Raises:** `OSError` for a disk that fails."""
        absent, found, size = b"", list[Any](), 0
        for key in keys:
            for place in self._content.places.get(key, ()):
                if found and (place.absent != absent or size + place.num_bytes > _READ_BYTES):
                    yield self._unpacked(absent, found)
                    found, size = [], 0
                absent = place.absent
                found.append(place.data if place.begin < 0 else self._read_back(place))
                size += place.num_bytes
        if found:
            yield self._unpacked(absent, found)

    def close(self) -> None:
        """Gives up all rows; a second call does nothing."""
        self._end()

    def _unpacked(self, absent: bytes, batches: Sequence[Any]) -> "pl.DataFrame":
        with self._content.spill.meter.phase("serialize"):
            return self.packing.unpack(absent, batches)

    def _read_back(self, place: _Place) -> bytes:
        with self._content.spill.meter.spill(self._content.owner, read_back=place.num_bytes):
            return self._file().read(place.begin, place.num_bytes)

    def _file(self) -> SpillFile:
        content = self._content
        if content.file is None:
            content.file = content.spill.file()
        return content.file

    def _write(self) -> None:
        content = self._content
        with content.spill.meter.spill(content.owner, written=content.kept_bytes):
            for place in content.kept:
                place.begin = self._file().append(place.data)
                place.data = None
        content.kept.clear()
        content.spill.spilled.num_bytes += content.kept_bytes
        content.spill.kept_bytes -= content.kept_bytes
        content.kept_bytes = 0


@dataclass(frozen=True)
class Rows:
    """Sequences of a store, as one. **Fields:** `keys`: of them, in their order."""

    store: Store
    keys: tuple[Key, ...]

    @property
    def num_bytes(self) -> int:
        """How many bytes they have."""
        return sum(self.store.num_bytes.get(key, 0) for key in self.keys)

    @property
    def schema(self) -> Schema:
        """The columns."""
        return self.store.packing.schema

    def batches(self) -> Iterator["pl.DataFrame"]:
        """Yields the rows in batches. **Raises:** `OSError` for a disk that fails."""
        return self.store.read(self.keys)

    def blocks(self, num_bytes: int) -> Iterator["pl.DataFrame"]:
        """Yields the rows in tables of about so many bytes. **Raises:** as `batches`."""
        return blocks(self.batches(), num_bytes)

    def whole(self) -> "pl.DataFrame":
        """Returns all rows. **Raises:** as `batches`."""
        return pl.concat([pl.DataFrame(schema=self.schema), *self.batches()])


def blocks(batches: Iterator["pl.DataFrame"], num_bytes: int) -> Iterator["pl.DataFrame"]:
    """Yields the rows of batches in tables of about so many bytes."""
    found: list[pl.DataFrame] = []
    size = 0
    for batch in batches:
        found.append(batch)
        size += int(batch.estimated_size())
        if size >= num_bytes:
            yield pl.concat(found)
            found, size = [], 0
    if found:
        yield pl.concat(found)
