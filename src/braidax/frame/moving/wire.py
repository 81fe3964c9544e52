"""Tables as buffers: Arrow record batches, in which every dtype of Polars that is not one of Arrow's goes as another.

A batch is written once into one buffer, and read without a copy. Dictionaries would have to be sent beforehand, so that
categories go as strings.
"""

import struct
from collections.abc import Iterator, Sequence
from typing import Any

from braidax.errors import ArgumentError, CommError
from braidax.extras import import_pyarrow, import_pyarrow_ipc
from braidax.frame.polars import Schema, pl

_PURPOSE = "a frame on several ranks"
PIECE_BYTES = 1 << 20
_HEIGHT = "height"  # the column that travels when no other does
MARK = struct.Struct("<?H")
"""At the head of a piece: whether its batch goes on, and the bucket."""


class Wire:
    """How rows of one schema travel.

    **Arguments:** `schema`: of the tables. `absent`: columns that do not travel, since they are null everywhere.

    **Raises:** `ArgumentError` for columns of Python objects.
    """

    def __init__(self, schema: Schema, absent: frozenset[str] = frozenset()) -> None:
        self._schema = schema
        self._names = [name for name in schema if name not in absent]
        self._ipc = import_pyarrow_ipc(purpose=_PURPOSE)
        self._py_buffer = import_pyarrow(purpose=_PURPOSE).py_buffer
        self._table = import_pyarrow(purpose=_PURPOSE).Table
        self._there: dict[str, Any] = {}
        for name in self._names:
            other = portable_dtype(schema[name], name)
            if other != schema[name]:
                self._there[name] = other
        self._arrow_schema = self._portable(pl.DataFrame(schema=schema)).to_arrow().schema

    def pieces(self, frame: "pl.DataFrame", bucket: int) -> Iterator[list[Any]]:
        """Yields the rows as items of a stream: each a mark and a buffer of at most `PIECE_BYTES`."""
        if not frame.height:
            return
        frame = self._portable(frame)
        row_bytes = max(1, int(frame.estimated_size()) // frame.height)
        num_rows = max(1, PIECE_BYTES * 15 // 16 // row_bytes)
        for part in frame.iter_slices(num_rows):
            for batch in part.to_arrow().combine_chunks().to_batches():
                data = memoryview(batch.serialize())
                for begin in range(0, len(data), PIECE_BYTES):
                    mark = MARK.pack(begin + PIECE_BYTES < len(data), bucket)
                    yield [memoryview(mark), data[begin : begin + PIECE_BYTES]]

    def slices(self, frame: "pl.DataFrame", ends: Sequence[int]) -> Iterator[Any]:
        """Yields a batch for the rows up to each end, from the one before on. **Arguments:** `ends`: in order."""
        if not frame.height:
            return
        (batch,) = self._portable(frame).rechunk().to_arrow().combine_chunks().to_batches()
        begin = 0
        for end in ends:
            if end > begin:
                yield batch.slice(begin, end - begin).serialize()
            begin = end

    def frame(self, batches: Sequence[Any]) -> "pl.DataFrame":
        """Returns the rows of batches, in their order. **Raises:** `CommError` for what is none."""
        if not batches:
            return pl.DataFrame(schema=self._schema)
        try:
            read = [self._ipc.read_record_batch(self._py_buffer(one), self._arrow_schema) for one in batches]
            frame = _columns(self._table.from_batches(read))
        except (OSError, ValueError) as error:
            raise CommError(f"what came is no batch of rows: {error}; install the same versions everywhere") from error
        back = [pl.col(name).cast(self._schema[name]) for name in self._there]
        nulls = [pl.lit(None, dtype=self._schema[name]).alias(name) for name in self._schema if name not in self._names]
        return (frame if self._names else frame.drop(_HEIGHT)).with_columns(back + nulls).select(list(self._schema))

    def own(self, frame: "pl.DataFrame") -> "pl.DataFrame":
        """Returns rows that stay here, with the dtypes of all. They have rows, or no dtypes of their own."""
        return frame if frame.schema == self._schema else pl.DataFrame(schema=self._schema)

    def _portable(self, frame: "pl.DataFrame") -> "pl.DataFrame":
        if not self._names:
            return frame.select(pl.repeat(0, pl.len(), dtype=pl.UInt8).alias(_HEIGHT))
        return frame.select(self._names).with_columns([pl.col(name).cast(dtype) for name, dtype in self._there.items()])


class Batches:
    """Puts pieces together again. **Fields:** `done`: the batches of one sender, of each bucket."""

    def __init__(self, num_buckets: int) -> None:
        self.done: list[list[bytes]] = [[] for _ in range(num_buckets)]
        self._open: list[bytes] = []

    def add(self, item: Sequence[Any]) -> None:
        """Takes the next piece: a copy of it. **Raises:** `CommError` for one of no bucket."""
        mark, data = item
        goes_on, bucket = MARK.unpack(mark)
        if bucket >= len(self.done):
            raise CommError(f"bucket {bucket} of {len(self.done)} came; install the same versions everywhere")
        self._open.append(bytes(data))
        if not goes_on:
            self.done[bucket].append(self._open[0] if len(self._open) == 1 else b"".join(self._open))
            self._open = []


def _columns(table: Any) -> "pl.DataFrame":
    frame: Any = pl.from_arrow(table, rechunk=False)
    frame.columns = table.schema.names  # Polars would rename one without a name
    return frame


def portable_dtype(dtype: Any, name: str = "") -> Any:
    """Returns the dtype as which a column travels."""
    match dtype:
        case pl.Categorical() | pl.Enum():
            return pl.String()
        case pl.Int128() | pl.UInt128():
            return pl.String()  # Arrow has none
        case pl.Float16():
            return pl.Float32()
        case pl.List(inner=inner):
            return pl.List(portable_dtype(inner, name))
        case pl.Array(inner=inner, size=size):
            return pl.Array(portable_dtype(inner, name), size)
        case pl.Struct(fields=fields):
            return pl.Struct([pl.Field(one.name, portable_dtype(one.dtype, name)) for one in fields])
        case pl.Object():
            raise ArgumentError(
                f"the column {name!r} has Python objects, which cannot go to another rank: expected a dtype of Polars; "
                "convert it before"
            )
        case _:
            return dtype
