"""Rows of plain numbers between ranks: their columns travel as they lie, and are put where they belong as they come.

No row is written into a batch or read from one, and a bucket lies in one piece.
"""

import itertools
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from braidax.errors import CommError
from braidax.frame.moving.splitting import MANY_ROWS, compiled, counts_of, numbers_of, positions_of, scatter, series_of
from braidax.frame.moving.threads import each
from braidax.frame.moving.wire import PIECE_BYTES
from braidax.frame.polars import Schema, pl

_MARK = struct.Struct("<IQ")
"""At the head of an item: its bucket, and its first row among those of the bucket that come from the same rank."""


@dataclass(frozen=True)
class Offer:
    """What a rank has to deal. **Fields:** `schema`: in words. `numbers`, `nulls`: columns that are nothing else.

    `counts`: `[size * buckets]`, rows of each place; none where the columns are others, or nothing is compiled.
    """

    schema: str
    numbers: tuple[str, ...]
    nulls: tuple[str, ...]
    counts: bytes

    @classmethod
    def of(cls, frame: "pl.DataFrame", places: NDArray[np.uint16], num_places: int) -> "Offer":
        """Returns what is known of rows here."""
        schema = repr(list(frame.schema.items()))
        if not frame.height:
            return cls(schema, (), (), np.zeros(num_places, np.int64).tobytes())
        nulls = tuple(series.name for series in frame if series.null_count() == frame.height)
        numbers = tuple(series.name for series in frame if numbers_of(series))
        plain = len(nulls) + len(numbers) == frame.width and compiled() is not None
        return cls(schema, numbers, nulls, counts_of(places, num_places).tobytes() if plain else b"")


@dataclass(frozen=True)
class Dealing:
    """How the rows of all ranks are dealt, as each of them knows. **Fields:** `numbers`: columns that travel.

    `counts`: `[size, size, buckets]`, rows that one rank has for a bucket of another.
    """

    numbers: tuple[str, ...]
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, offers: Sequence[Offer], num_buckets: int) -> "Dealing | None":
        """Returns how rows are dealt; None where columns are not of numbers alone, the same ones on all ranks."""
        if len({one.schema for one in offers}) > 1 or not all(one.counts for one in offers):
            return None
        full = [one for one in offers if one.numbers or one.nulls]
        if len({(one.numbers, one.nulls) for one in full}) != 1 or not full[0].numbers:
            return None
        counts = np.stack([np.frombuffer(one.counts, np.int64) for one in offers])
        counts = counts.reshape(len(offers), len(offers), num_buckets)
        return cls(full[0].numbers, counts) if counts.sum(axis=(1, 2)).max() < MANY_ROWS else None


@final
class Buckets:
    """The buckets of a rank, which fill with its own rows, and with those that come.

    **Arguments:** `frame`: the rows here. `places`: of them, `rank * buckets + bucket`. `rank`: this one.
    """

    def __init__(
        self, frame: "pl.DataFrame", places: NDArray[np.uint16], dealing: Dealing, *, rank: int, num_threads: int
    ) -> None:
        self._schema: Schema = frame.schema
        self._dealing, self._rank = dealing, rank
        mine = dealing.counts[:, rank]  # [size, buckets], in which the rows of a bucket are to follow one another
        ends = np.cumsum(mine.T).reshape(mine.T.shape).T
        self._next, self._ends = ends - mine, ends
        self._num_rows = int(mine.sum())
        self._columns = {name: np.empty(self._num_rows, _dtype(frame[name])) for name in dealing.numbers}
        self._rest = {
            name: np.empty(len(places) - int(mine[rank].sum()), one.dtype) for name, one in self._columns.items()
        }
        self._leave = self._scatter(frame, places, num_threads)

    def _scatter(self, frame: "pl.DataFrame", places: NDArray[np.uint16], num_threads: int) -> NDArray[np.int64]:
        """Puts the rows here into the buckets of this rank, and those of others behind one another.

        **Returns:** `[size + 1, buckets]`, where each of the others' begins.
        """
        counts = self._dealing.counts[self._rank].copy()
        counts[self._rank] = 0
        leave = np.concatenate([[0], np.cumsum(counts)])
        begins = (leave[:-1] + self._num_rows).reshape(counts.shape)
        begins[self._rank] = self._next[self._rank]
        if frame.height:
            positions = positions_of(places, begins.ravel())

            def put(name: str) -> None:
                scatter(numbers_of(frame[name]), positions, self._columns[name], self._rest[name])

            each(put, self._columns, num_threads)
        self._next[self._rank] = self._ends[self._rank]
        return leave

    def leaving(self, rank: int) -> Iterator[list[Any]]:
        """Yields what goes to another rank, as items of a stream, each of at most `PIECE_BYTES`."""
        row_bytes = sum(one.itemsize for one in self._columns.values())
        most = max(1, PIECE_BYTES * 15 // 16 // row_bytes)
        num_buckets = self._dealing.counts.shape[2]
        first = rank * num_buckets
        for bucket, (begin, end) in enumerate(
            itertools.pairwise(self._leave[first : first + num_buckets + 1].tolist())
        ):
            for row in range(begin, end, most):
                part = slice(row, min(row + most, end))
                columns = [one[part].data.cast("B") for one in self._rest.values()]
                yield [memoryview(_MARK.pack(bucket, row - begin)), *columns]

    def num_leaving(self, rank: int) -> int:
        """Returns how many rows go to another rank."""
        return int(self._dealing.counts[self._rank, rank].sum())

    def add(self, source: int, item: Sequence[Any]) -> None:
        """Puts rows that came where they belong. **Raises:** `CommError` for such as nobody said would come."""
        mark, *parts = item
        bucket, row = _MARK.unpack(mark)
        begin, end = self._expected(source, bucket, row)
        columns = list(self._columns.values())
        sizes = [memoryview(part).nbytes for part in parts]
        count = sizes[0] // columns[0].itemsize if sizes else 0
        if sizes != [count * column.itemsize for column in columns] or not 0 < count <= end - begin:
            raise CommError(f"columns of {sizes} bytes came of rank {source}; install the same versions everywhere")
        for part, column in zip(parts, columns, strict=True):
            column[begin : begin + count] = np.frombuffer(part, column.dtype)
        self._next[source, bucket] += count

    def _expected(self, source: int, bucket: int, row: int) -> tuple[int, int]:
        """Returns where the next rows of a rank for a bucket go, and where its last ones end."""
        if bucket < self._next.shape[1]:
            begin, end = int(self._next[source, bucket]), int(self._ends[source, bucket])
            if end - begin + row == self._dealing.counts[source, self._rank, bucket]:
                return begin, end
        raise CommError(f"row {row} of bucket {bucket} came of rank {source}; install the same versions everywhere")

    def done(self) -> "list[pl.DataFrame]":
        """Returns the buckets. **Raises:** `CommError` for rows that did not come."""
        if (self._next != self._ends).any():
            source, bucket = (int(one[0]) for one in np.nonzero(self._next != self._ends))
            raise CommError(
                f"rows of bucket {bucket} did not come of rank {source}; install the same versions everywhere"
            )
        whole = pl.DataFrame([series_of(one, name, self._schema[name]) for name, one in self._columns.items()])
        nulls = [
            pl.lit(None, dtype=dtype).alias(name) for name, dtype in self._schema.items() if name not in self._columns
        ]
        whole = whole.with_columns(nulls).select(list(self._schema))
        ends = self._ends.max(axis=0).tolist()
        return [whole[begin:end] for begin, end in itertools.pairwise([0, *ends])]


def _dtype(series: "pl.Series") -> np.dtype[Any]:
    return series.clear().to_physical().to_numpy().dtype
