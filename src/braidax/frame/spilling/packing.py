"""Rows of one schema as bytes: columns that are null in a batch are not written."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from braidax.errors import CommError
from braidax.frame.moving.wire import MARK, Batches, Wire
from braidax.frame.polars import Schema, pl


@dataclass(frozen=True)
class Packed:
    """A batch of rows. **Fields:** `absent`: bits, of columns that are null. `data`: an Arrow record batch."""

    absent: bytes
    data: Any


class Packing:
    """Writes and reads rows of one schema. **Raises:** `ArgumentError` for columns of Python objects."""

    def __init__(self, schema: Schema) -> None:
        self.schema = pl.Schema(schema)
        self._wires: dict[bytes, Wire] = {}
        self._wire(bytes((len(schema) + 7) // 8))  # dtypes that cannot be written are refused at once

    def pieces(self, frame: "pl.DataFrame") -> Iterator[list[Any]]:
        """Yields the rows as items of a stream: each a header and a buffer.

        **Raises:** `CommError` for rows of another schema.
        """
        self._check(frame)
        absent = self._absent(frame)
        for mark, data in self._wire(absent).pieces(frame, 0):
            yield [bytes(mark) + absent, data]

    def pack(self, frame: "pl.DataFrame") -> Iterator[Packed]:
        """Yields the rows as batches. **Raises:** as `pieces`."""
        putting = Putting()
        for item in self.pieces(frame):
            yield from putting.add(item)

    def slices(self, frame: "pl.DataFrame", ends: Sequence[int]) -> Iterator[Packed]:
        """Yields a batch for the rows up to each end, from the one before on. **Raises:** as `pieces`."""
        self._check(frame)
        absent = self._absent(frame)
        for data in self._wire(absent).slices(frame, ends):
            yield Packed(absent, data)

    def unpack(self, absent: bytes, batches: Sequence[Any]) -> "pl.DataFrame":
        """Returns the rows of batches of which the same columns are null. **Raises:** `CommError` for what is none."""
        return self._wire(absent).frame(batches)

    def _check(self, frame: "pl.DataFrame") -> None:
        if frame.height and frame.schema != self.schema:
            raise CommError(
                f"rows have other columns than those before them: {dict(frame.schema)}, expected {dict(self.schema)}, "
                "as the return_dtype of a user's function says"
            )

    def _wire(self, absent: bytes) -> Wire:
        if absent not in self._wires:
            if len(absent) != (len(self.schema) + 7) // 8:
                raise CommError(f"what came has a head of {len(absent)} bytes, of another table than was agreed on")
            flags = np.unpackbits(np.frombuffer(absent, np.uint8), count=len(self.schema))
            names = [name for name, flag in zip(self.schema, flags, strict=True) if flag]
            self._wires[absent] = Wire(self.schema, absent=frozenset(names))
        return self._wires[absent]

    def _absent(self, frame: "pl.DataFrame") -> bytes:
        counts = [column.null_count() == frame.height for column in frame.get_columns()]
        return np.packbits(np.array(counts, bool)).tobytes()


class Putting:
    """Puts the items of a stream together again."""

    def __init__(self) -> None:
        self._batches = Batches(1)

    def add(self, item: Sequence[Any]) -> Iterator[Packed]:
        """Takes the next item: a copy of it. **Yields:** the batch that it ends."""
        header = bytes(item[0])
        self._batches.add([header[: MARK.size], item[1]])
        (done,) = self._batches.done
        for data in done:
            yield Packed(header[MARK.size :], data)
        done.clear()
