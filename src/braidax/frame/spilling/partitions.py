"""Tables in partitions: rows with the same hash, or between the same splitters, wait in one sequence."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import final

from braidax.frame.operators.placing import key_hashes
from braidax.frame.plan.building import HIDDEN
from braidax.frame.plan.expressions import Expression
from braidax.frame.polars import Schema, pl
from braidax.frame.spilling.packing import Packed
from braidax.frame.spilling.store import Rows, Spill

FANOUT = 64
_BITS = 6
MAX_LEVEL = 64 // _BITS - 1
_PARTITION = HIDDEN + "partition"
_ALL = -1

Assign = Callable[["pl.DataFrame"], "pl.Series"]
"""Returns the partition of each row, `[rows]` integers."""


def by_hash(keys: Sequence[Expression], dtypes: Sequence[object] | None, level: int) -> Assign:
    """Returns partitions by the hash of keys: `FANOUT` of them, others on each level.

    They are of the first bits of a hash, those by which ranks get rows of the last ones.
    """
    unit = 1 << (64 - _BITS * (level + 1))

    def assign(frame: "pl.DataFrame") -> "pl.Series":
        return (key_hashes(frame, keys, dtypes) // unit % FANOUT).cast(pl.UInt32)

    return assign


@final
class Partitioned:
    """Rows that come from several ranks: as they are while they are few, in partitions when there are more.

    In each partition those of one rank follow those of the one before.

    **Arguments:** `schema`: of the rows. `assign`: gives a row its partition. `size`: of the ranks.
    """

    def __init__(self, spill: Spill, schema: Schema, assign: Assign, *, size: int) -> None:
        self._spill, self._assign, self._size = spill, assign, size
        self._few = spill.store(schema)
        self._parts = spill.store(schema)
        self._buckets: list[list[pl.DataFrame]] = [[] for _ in range(size)]
        self._bucket_bytes = 0
        self._num_bytes = 0
        self.is_split = False

    @property
    def schema(self) -> Schema:
        """The columns."""
        return self._few.packing.schema

    def add_packed(self, source: int, batch: Packed) -> None:
        """Takes rows of a rank. **Raises:** `OSError` for a disk that is full."""
        if self.is_split:
            self.add(source, self._few.packing.unpack(batch.absent, [batch.data]))
            return
        self._few.append_packed((_ALL, source), batch)
        self._num_bytes += len(batch.data)
        if self._num_bytes > self._spill.budget.block_bytes:
            self.split()

    def add(self, source: int, frame: "pl.DataFrame") -> None:
        """Takes rows of a rank. **Raises:** as `add_packed`."""
        if not self.is_split:
            for batch in self._few.packing.pack(frame):
                self.add_packed(source, batch)
            return
        self._buckets[source].append(frame)
        self._bucket_bytes += int(frame.estimated_size())
        if self._bucket_bytes > self._spill.budget.bucket_bytes:
            self._empty_buckets()

    def split(self) -> None:
        """Puts all rows into partitions, those that come later, too; a second call does nothing."""
        if self.is_split:
            return
        self.is_split = True
        for source in range(self._size):
            for frame in self._few.read([(_ALL, source)]):
                self.add(source, frame)
        self._few.close()

    def all(self) -> Rows:
        """Returns all rows: those of each rank behind those of the one before, unless they are split."""
        if not self.is_split:
            return Rows(self._few, tuple((_ALL, source) for source in range(self._size)))
        self._empty_buckets()
        return Rows(self._parts, tuple(sorted(self._parts.num_bytes)))

    def partition(self, number: int) -> Rows:
        """Returns the rows of a partition. They must be split."""
        self._empty_buckets()
        return Rows(self._parts, tuple((number, source) for source in range(self._size)))

    def num_bytes(self) -> int:
        """Returns how many bytes all rows have."""
        return self.all().num_bytes

    def _empty_buckets(self) -> None:
        for source, bucket in enumerate(self._buckets):
            if bucket:
                frame = pl.concat(bucket)
                bucket.clear()
                self._append(source, frame)
        self._bucket_bytes = 0

    def _append(self, source: int, frame: "pl.DataFrame") -> None:
        frame = frame.with_columns(self._assign(frame).alias(_PARTITION)).sort(_PARTITION, maintain_order=True)
        counts = frame.lazy().group_by(_PARTITION).len().sort(_PARTITION).collect()
        keys = [(int(number), source) for number in counts[_PARTITION]]
        self._parts.append_slices(keys, frame.drop(_PARTITION), counts["len"].cum_sum().to_list())


def split(spill: Spill, rows: Rows, assign: Assign, *, count: int = FANOUT) -> Iterator[Rows]:
    """Yields the partitions of rows, in their order; those keep their own."""
    parts = Partitioned(spill, rows.schema, assign, size=1)
    parts.split()
    for batch in rows.batches():
        parts.add(0, batch)
    for number in range(count):
        yield parts.partition(number)


def merged(partitions: Iterable[tuple[Rows, ...]], num_bytes: int) -> Iterator[tuple[Rows, ...]]:
    """Yields partitions of one or more tables, small ones that follow one another as one of at most so many bytes."""
    last: tuple[Rows, ...] | None = None
    for tables in partitions:
        if last is not None and all(
            one.num_bytes + two.num_bytes <= num_bytes for one, two in zip(last, tables, strict=True)
        ):
            last = tuple(Rows(one.store, one.keys + two.keys) for one, two in zip(last, tables, strict=True))
            continue
        if last is not None:
            yield last
        last = tables
    if last is not None:
        yield last
