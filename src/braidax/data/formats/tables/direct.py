"""Columns of uncompressed Arrow batches, read where they lie: the place of every record is computed, not looked up.

Source: the Arrow columnar format, "Physical Memory Layout".
"""

import contextlib
import copy
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from braidax.data.formats.arrays.record_layout import RecordLayout, read_boxes
from braidax.data.formats.rows import Rows, Target
from braidax.data.formats.tables.columns import (
    RAGGED,
    Leaf,
    Level,
    Value,
    fill_pieces,
    fill_rows,
    fill_valid,
    with_lengths,
)
from braidax.data.formats.tables.ipc import Batch
from braidax.data.formats.tables.nulls import DirectMask, Nulls
from braidax.data.source import Box, Indices
from braidax.data.storage.files import Joined, joined
from braidax.data.storage.mapped import Mapped, Memory, Places
from braidax.errors import FormatError

_GROUP = 1 << 12  # batches whose offsets are looked at together


class DirectLeaf:
    """A leaf whose records lie at places that are a linear function of their number in the batch.

    **Arguments:** `leaf`: with known lengths. `base`: int64 `[batches]`, the place of the first record, in bits for
    kind "bit"; of a varying leaf, of its values. `stride`: from record to record; of a varying leaf, from element to
    element. `offsets`, `limits`: of a varying leaf, the place of the first offset, and how many elements there are.
    `counts`: of text and bytes, the records of each batch, whose offsets are looked at as a whole when the first of
    them is read; None where they were at open. `is_large`: 64-bit offsets. `nulls`: the records that are null, of which
    nothing is read.
    """

    def __init__(
        self,
        leaf: Leaf,
        *,
        base: Places,
        stride: int,
        offsets: Places | None,
        limits: Places,
        counts: NDArray[np.int64] | None,
        is_large: bool,
        nulls: Nulls,
    ) -> None:
        self.leaf = leaf
        self._base = base
        self._stride = stride
        self._offsets = offsets
        self._limits = limits
        self._counts = counts
        self._is_checked = np.zeros(0 if counts is None else len(counts), np.bool_)
        self._offset_dtype = np.dtype("<i8" if is_large else "<i4")
        self._nulls = nulls

    def widened(self) -> "DirectLeaf":
        """Returns the same leaf with integers as they are stored."""
        found = copy.copy(self)
        found.leaf = self.leaf.widened()
        return found

    def cut_dims(self, memory: Memory) -> int:
        """Returns along how many dims of a record parts can be read: of numbers, where lists have one length."""
        if self._offsets is not None or self.leaf.kind == "bit":
            return 0
        return self._layout.cut_dims(gap_bytes=memory.gap_bytes)

    def items(self) -> Places | None:
        """Returns which item, counted from place 0, the first record of each batch is, where records are items.

        They are where each is one number, aligned to its size, and none is null. **Returns:** None elsewhere.
        """
        width = self.leaf.stored.itemsize
        if self.leaf.kind != "number" or self._offsets is not None or self._stride != width or self.leaf.dims:
            return None
        return self._base // width if self._nulls.is_empty and not (self._base % width).any() else None

    def read(
        self,
        memory: Memory,
        batches: Indices,
        rows: Indices,
        out: Target,
        *,
        box: Box | None = None,
        records: Indices,
        where: str,
    ) -> None:
        """Copies records into place.

        **Arguments:** `batches`, `rows`: int64 `[n]`, where the records are. `box`: the part of each; all of it by
        default. `records`, `where`: for errors.

        **Raises:** `RecordError` for a record that does not fit; `FormatError` for a file that changed.
        """
        is_null = self._nulls.at(batches, rows)
        if is_null.any():

            def read(kept: Indices, part: Target) -> None:
                self.read(memory, batches[kept], rows[kept], part, box=box, records=records[kept], where=where)

            fill_valid(self.leaf, is_null, out, read, where=where)
            return
        if self._offsets is not None:
            places, lengths = self._spans(memory, batches, rows, where)
            if isinstance(out, Rows):
                with _pieces(memory, places, np.minimum(lengths, out.most_bytes)) as pieces:
                    fill_rows(self.leaf, pieces, out, records=records, where=where)
                return
            fill_pieces(self.leaf, memory.slices(places, lengths), out, records=records, where=where)
            return
        assert isinstance(out, np.ndarray), "records of one size have an array"
        starts = self._base[batches] + rows * self._stride
        if self.leaf.kind == "bit":
            self._read_bits(memory, starts, out)
            return
        layout = self._layout
        box = layout.whole if box is None else box
        read_boxes(memory.gather, starts, box, out, layout=layout, records=records, where=where, leaf=self.leaf.name)

    def prepare(self, memory: Memory, batches: Indices, rows: Indices, box: Box | None = None) -> None:
        """Asks for the bytes of records ahead; of a varying leaf, for their offsets. **Arguments:** as `read`."""
        if self._offsets is not None:
            width = self._offset_dtype.itemsize
            fresh = self._fresh(batches)
            if fresh.size:
                memory.prepare(*self._whole_offsets(fresh))
            memory.prepare(self._offsets[batches] + rows * width, np.full(len(rows), 2 * width))
        elif self.leaf.kind == "bit":
            memory.prepare((self._base[batches] + rows * self._stride) // 8, np.full(len(rows), self._stride // 8 + 2))
        else:
            runs = self._layout.runs(self._layout.whole if box is None else box)
            places = ((self._base[batches] + rows * self._stride)[:, None] + runs.offsets).reshape(-1)
            memory.prepare(places, np.full(len(places), runs.num_bytes))

    @property
    def _layout(self) -> RecordLayout:
        return RecordLayout(self.leaf.shape, self.leaf.stored)

    def _spans(self, memory: Memory, batches: Indices, rows: Indices, where: str) -> tuple[Places, Places]:
        """Returns place and number of bytes of each record of a varying leaf."""
        assert self._offsets is not None
        self._check_offsets(memory, batches, where)
        width = self._offset_dtype.itemsize
        bounds = memory.take(self._offsets[batches] + rows * width, 2 * width).view(self._offset_dtype)
        starts, stops = bounds.T.astype(np.int64)  # read anew, and so are checked anew
        wrong = np.flatnonzero((starts < 0) | (stops < starts) | (stops > self._limits[batches]))
        if wrong.size:
            raise self._corrupt(int(starts[wrong[0]]), int(stops[wrong[0]]), int(batches[wrong[0]]), where)
        return self._base[batches] + starts * self._stride, (stops - starts) * self._stride

    def _check_offsets(self, memory: Memory, batches: Indices, where: str) -> None:
        """Checks all offsets of batches of which nothing was read yet: that they ascend, and end within the values."""
        fresh = self._fresh(batches)
        for start in range(0, len(fresh), _GROUP):
            group = fresh[start : start + _GROUP]
            pieces = memory.slices(*self._whole_offsets(group))
            for batch, piece in zip(group.tolist(), pieces, strict=True):
                offsets = np.frombuffer(piece, self._offset_dtype)
                falls = np.flatnonzero(offsets[1:] < offsets[:-1])
                at = int(falls[0]) if falls.size else len(offsets) - 2
                first, last = (int(offset) for offset in offsets[at : at + 2])
                if falls.size or int(offsets[0]) < 0 or last > self._limits[batch]:
                    raise self._corrupt(first, last, batch, where)
            self._is_checked[group] = True

    def _fresh(self, batches: Indices) -> Indices:
        return np.unique(batches[~self._is_checked[batches]]) if self._counts is not None else batches[:0]

    def _whole_offsets(self, batches: Indices) -> tuple[Places, Places]:
        assert self._offsets is not None
        assert self._counts is not None
        return self._offsets[batches], (self._counts[batches] + 1) * self._offset_dtype.itemsize

    def _corrupt(self, start: int, stop: int, batch: int, where: str) -> FormatError:
        return FormatError(
            f"{where}: column {self.leaf.name!r} has offsets {start} to {stop} into {self._limits[batch]:,} values of "
            "a record batch; the file is corrupt: write or copy it again"
        )

    def _read_bits(self, memory: Memory, places: Places, out: NDArray[Any]) -> None:
        width = (self._stride + 7) // 8 + 1  # bits of a record may begin anywhere in a byte
        last = places + max(0, self._stride - 1)
        covered = int((last // 8 - places // 8).max(initial=0)) + 1
        width = min(width, covered)
        first = np.minimum(places // 8, last // 8 - width + 1)
        packed = memory.take(first, width)
        bits = np.unpackbits(packed, axis=1, bitorder="little").view(np.bool_)
        chosen = (places - first * 8)[:, None] + np.arange(self._stride)
        out.reshape(len(places), self._stride)[:] = np.take_along_axis(bits, chosen, axis=1)


@contextlib.contextmanager
def _pieces(memory: Memory, places: Places, lengths: Places) -> Generator[Joined]:
    """Holds pieces of files together: where they are mapped, else copied."""
    if isinstance(memory, Mapped):
        with memory.reading(places, lengths):
            yield Joined(memory.items(np.dtype(np.uint8)), places, lengths)
    else:
        yield joined(memory.slices(places, lengths))


Direct = DirectLeaf | DirectMask


def direct_leaf(memory: Memory, batches: Sequence[Batch], leaf: Leaf) -> Direct | None:
    """Returns how a leaf lies in uncompressed batches; None where its lists are null or overlap: those are decoded.

    All offsets of lists are looked at, vectorized, batch by batch: this is what tells whether lists have one length.

    **Raises:** `FormatError` for batches whose buffers are too short, and for lists of lists of different lengths.
    """
    walk = _Walk(memory, batches)
    lengths: list[int] = []
    for level in leaf.levels:
        if level.kind == "list":
            length = walk.lists(level)
            if length is None:
                return None
            lengths.append(length)
        else:
            walk.nulls_of(level)
            walk.multiply(level.length if level.kind == "fixed" else 1)
    found = with_lengths(leaf, lengths, where=memory.names[0])
    walk.nulls_of(leaf.value)
    return walk.finished(found)


class _Walk:
    """Walks from the records of all batches down to their values, and knows which are the first and how many."""

    def __init__(self, memory: Memory, batches: Sequence[Batch]) -> None:
        self._memory = memory
        self._nodes = np.stack([batch.nodes for batch in batches])
        self._buffers = np.stack([batch.buffers for batch in batches])
        self._files = np.searchsorted(np.sort(memory.origins), [batch.place for batch in batches], side="right") - 1
        self._count = np.array([batch.num_rows for batch in batches], np.int64)  # of values at this level
        self._first = np.zeros(len(batches), np.int64)  # the value that the first record begins with
        self._per_record = 1  # values of a record, or of an element of a ragged record
        self._ragged: _Ragged | None = None
        self._nulls = Nulls(self._count)

    def multiply(self, length: int) -> None:
        self._first, self._count, self._per_record = (
            self._first * length,
            self._count * length,
            self._per_record * length,
        )

    def lists(self, level: Level) -> int | None:
        """Steps down to the values of lists; returns their length, `RAGGED`, or None where some are null."""
        self._check_node(level)
        if self._nodes[:, level.node, 1].any():
            return None
        offsets = self._offsets(level)
        groups = [_Ends.of(offsets[start : start + _GROUP]) for start in range(0, len(offsets), _GROUP)]
        for number, group in enumerate(groups):
            if group.shortest < 0:
                raise self._corrupt(number * _GROUP, "offsets that decrease, or one of the next has")
        first, last = (np.concatenate([group[place] for group in groups]) for place in (0, 1))
        found = [group for group in groups if group.longest >= 0]
        shortest, length = min((g.shortest for g in found), default=0), max((g.longest for g in found), default=0)
        if shortest == length:
            self._first, self._count, self._per_record = first, self._count * length, self._per_record * length
            return length
        width = 8 if level.is_large else 4
        places = self._buffers[:, level.buffer + 1, 0] + self._first * width
        self._ragged = _Ragged(level.is_large, places, first, last, offsets)
        self._first, self._count, self._per_record = first, last - first, 1
        return RAGGED

    def nulls_of(self, level: Level | Value) -> None:
        """Takes note of the records in which something at this level is null."""
        self._check_node(level)
        for batch in np.flatnonzero(self._nodes[:, level.node, 1]).tolist():
            place, num_bytes = self._buffers[batch, level.buffer].tolist()
            length, num_nulls = self._nodes[batch, level.node].tolist()
            if 8 * num_bytes < length:
                raise self._corrupt(batch, "too few bits of validity")
            bits = np.unpackbits(self._bytes(place, (length + 7) // 8), count=length, bitorder="little")
            first, count = int(self._first[batch]), int(self._count[batch])
            if length - np.count_nonzero(bits) != num_nulls:
                raise self._corrupt(batch, f"bits of validity for another number of nulls than {num_nulls}")
            values = np.flatnonzero(bits[first : first + count] == 0) // max(1, self._per_record)
            if self._ragged is not None:
                offsets = self._ragged.pieces[batch]
                values = np.searchsorted(offsets, values + offsets[0], side="right") - 1
            self._nulls.mark(batch, values)

    def finished(self, leaf: Leaf) -> Direct | None:
        """Returns the leaf whose values these are; None for ragged bits, which begin anywhere in a byte."""
        if leaf.kind == "bit" and self._ragged is not None:
            return None
        if leaf.kind == "valid":
            return DirectMask(leaf, self._nulls)
        if leaf.kind in ("text", "bytes"):
            self._need(leaf.value, self._first + self._count + 1, 8 * (8 if leaf.value.is_large else 4))
            data = self._buffers[:, leaf.value.buffer + 2]
            return DirectLeaf(
                leaf,
                base=data[:, 0],
                stride=1,
                offsets=self._buffers[:, leaf.value.buffer + 1, 0],
                limits=data[:, 1],
                counts=self._count,
                is_large=leaf.value.is_large,
                nulls=self._nulls,
            )
        bits = 1 if leaf.kind == "bit" else 8 * leaf.value_bytes
        self._need(leaf.value, self._first + self._count, bits)
        unit = 1 if leaf.kind == "bit" else 8
        base = (self._buffers[:, leaf.value.buffer + 1, 0] * 8 + self._first * bits) // unit
        stride, ragged = self._per_record * bits // unit, self._ragged
        return DirectLeaf(
            leaf,
            base=base if ragged is None else base - ragged.first * stride,
            stride=stride,
            offsets=None if ragged is None else ragged.places,
            limits=self._count if ragged is None else ragged.last,
            counts=None,
            is_large=ragged is not None and ragged.is_large,
            nulls=self._nulls,
        )

    def _offsets(self, level: Level) -> list[NDArray[Any]]:
        """Returns the offsets of the lists of each batch, checked to lie in its buffer."""
        dtype = np.dtype("<i8" if level.is_large else "<i4")
        self._need(level, self._first + self._count + 1, 8 * dtype.itemsize)
        places = self._buffers[:, level.buffer + 1, 0] + self._first * dtype.itemsize
        lengths = np.where(self._count, (self._count + 1) * dtype.itemsize, 0)
        return [np.frombuffer(piece, dtype) for piece in self._memory.slices(places, lengths)]

    def _check_node(self, level: Level | Value) -> None:
        """Checks that this level has as many values in each batch as the one above needs."""
        short = self._nodes[:, level.node, 0] < np.where(self._count, self._first + self._count, 0)
        if short.any():
            raise self._corrupt(int(np.flatnonzero(short)[0]), "fewer values than its records or lists have")

    def _need(self, level: Level | Value, count: NDArray[np.int64], bits: int) -> None:
        """Checks that the buffer behind the validity holds so many numbers in each batch that has values."""
        short = (self._buffers[:, level.buffer + 1, 1] * 8 // max(1, bits) < count) & (self._count > 0)
        if short.any():
            raise self._corrupt(int(np.flatnonzero(short)[0]), "a buffer that is too short")

    def _bytes(self, place: int, length: int) -> NDArray[np.uint8]:
        return np.frombuffer(self._memory.slices(np.array([place]), np.array([length]))[0], np.uint8)

    def _corrupt(self, batch: int, what: str) -> FormatError:
        names = [self._memory.names[number] for number in np.argsort(self._memory.origins)]
        return FormatError(
            f"{names[self._files[batch]]}: a record batch has {what}; the file is corrupt: write or copy it again"
        )


class _Ends(NamedTuple):
    """Of some batches the first and the last offset of each, and the shortest and the longest list; -1 if none is."""

    first: NDArray[np.int64]
    last: NDArray[np.int64]
    shortest: int
    longest: int

    @classmethod
    def of(cls, pieces: Sequence[NDArray[Any]]) -> "_Ends":
        joined = np.concatenate(pieces).astype(np.int64, copy=False)
        sizes = np.array([len(piece) for piece in pieces])
        stops = np.cumsum(sizes)
        filled = sizes > 0
        first, last = np.zeros(len(pieces), np.int64), np.zeros(len(pieces), np.int64)
        first[filled], last[filled] = joined[(stops - sizes)[filled]], joined[stops[filled] - 1]
        is_step = np.ones(len(joined), np.bool_)
        is_step[(stops - sizes)[filled]] = False
        steps = np.diff(joined, prepend=0)[is_step]
        if joined.min(initial=0) < 0:
            return cls(first, last, -1, -1)
        return cls(first, last, int(steps.min(initial=1 << 62)), int(steps.max(initial=-1)))


class _Ragged(NamedTuple):
    is_large: bool
    places: Places
    first: NDArray[np.int64]
    last: NDArray[np.int64]
    pieces: list[NDArray[Any]]
