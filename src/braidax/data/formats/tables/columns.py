"""Columns of tables as the sources see them: what a leaf is made of, and how its decoded values go into a window."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from braidax.data.formats.rows import Rows, Target
from braidax.data.leaves import Flat, Integers
from braidax.data.source import VARYING, Indices, gather, loader_dtype, narrow
from braidax.data.storage.files import Bytes, Joined
from braidax.errors import FormatError, RecordError

VALID = ".is_valid"  # with a leaf's name before it, the name of the leaf that says which records have a value
RAGGED = -1  # the length of lists that have no common one

FINE, NULL = -2, -1  # what a record's fault is; any other is the length of a list that is none of one length


@dataclass(frozen=True)
class Level:
    """One step from a record down to its values.

    **Fields:** `kind`: of the step. `child`: of a struct, its number. `length`: of a fixed-size list. `is_large`:
    64-bit offsets. `node`, `buffer`: its numbers in a record batch; of the buffers, the first.
    """

    kind: Literal["struct", "list", "fixed"]
    child: int
    length: int
    is_large: bool
    node: int
    buffer: int


@dataclass(frozen=True)
class Value:
    """What a leaf consists of.

    **Fields:** `kind`: of a value; "valid" is whether there is one. `stored`: the dtype of its numbers, or bytes.
    `width`: numbers in one value, as a shape. `is_large`: 64-bit offsets. `node`, `buffer`: as of a `Level`.
    `integers`: how those of 64 bits are given.
    """

    kind: Literal["number", "bit", "text", "bytes", "valid"]
    stored: np.dtype[Any]
    width: tuple[int, ...]
    is_large: bool
    node: int
    buffer: int
    integers: Integers = "loaded"


@dataclass(frozen=True)
class Leaf:
    """A leaf of the samples, and how a table stores it.

    **Fields:** `name`. `column`, `number`: of the table's column, and of the value among all values of the schema.
    `levels`: from the record down to the value. `value`: what is there. `is_direct`: whether values lie as they are in
    a file without compression. `lengths`: of each level of kind list, once known, in order. `nulls`: whether a null is
    an error of its record, or has a mask beside it.
    """

    name: str
    column: int
    number: int
    levels: tuple[Level, ...]
    value: Value
    is_direct: bool
    lengths: tuple[int, ...] = ()
    nulls: Literal["refused", "masked"] = "refused"

    @property
    def kind(self) -> str:
        """Of a value: `"number"`, `"bit"`, `"text"`, `"bytes"` or `"valid"`."""
        return self.value.kind

    @property
    def stored(self) -> np.dtype[Any]:
        """The dtype of its numbers, or bytes, as stored."""
        return self.value.stored

    @property
    def value_bytes(self) -> int:
        """Bytes of one value of kind number, or of one byte."""
        return self.value.stored.itemsize * math.prod(self.value.width)

    @property
    def is_varying(self) -> bool:
        """Whether the size differs from sample to sample."""
        return self.kind != "valid" and (self.kind in ("text", "bytes") or RAGGED in self.lengths)

    @property
    def dims(self) -> tuple[int, ...]:
        """The shape of one sample, `RAGGED` where it has no length."""
        if self.kind == "valid":
            return ()
        lengths = iter(self.lengths)
        found = [level.length if level.kind == "fixed" else next(lengths) for level in self.levels if not _flat(level)]
        return (*found, *self.value.width)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample; of a ragged one, behind its first dim."""
        return self.dims[1:] if RAGGED in self.dims else self.dims

    def spec(self, where: str) -> jax.ShapeDtypeStruct:
        """Returns the spec of one sample. **Raises:** `FormatError` for a dtype that JAX lacks, naming `where`."""
        loaded = np.dtype(np.uint8) if self.kind in ("text", "bytes") else self.loaded(where)
        return VARYING if self.is_varying else jax.ShapeDtypeStruct(self.shape, loaded)

    def widened(self) -> "Leaf":
        """Returns the same with integers of 64 bits as they are stored."""
        return replace(self, value=replace(self.value, integers="stored"))

    def loaded(self, where: str) -> np.dtype[Any]:
        """Returns the dtype in which its numbers are loaded; of integers that of the table, where that is asked for."""
        if self.value.integers == "stored" and self.stored.kind in "iu":
            return self.stored.newbyteorder("=")
        return loader_dtype(self.stored, where=where, leaf=self.name)


class Column(NamedTuple):
    """Decoded values of some records.

    **Fields:** `values`: `[records, *shape]`, or of a varying leaf `[all values, *shape]`. `offsets`: int64
    `[records + 1]`, where the records of a varying leaf begin. `faults`: int64 `[records]`, or None where all is fine.
    """

    values: NDArray[Any]
    offsets: NDArray[np.int64] | None
    faults: NDArray[np.int64] | None

    @property
    def num_bytes(self) -> int:
        """What it takes in memory."""
        return sum(array.nbytes for array in self if array is not None)

    def pieces(self, rows: Indices) -> Joined:
        """Returns the bytes of some of the records of a varying leaf, as they lie."""
        assert self.offsets is not None, "the leaf varies in size"
        data = np.ascontiguousarray(self.values)
        item_bytes = data.itemsize * math.prod(data.shape[1:])
        starts = self.offsets[rows] * item_bytes
        return Joined(data.reshape(-1).view(np.uint8), starts, self.offsets[rows + 1] * item_bytes - starts)

    def take(self, rows: Indices) -> "Column":
        """Returns some of the records, copied."""
        faults = None if self.faults is None else self.faults[rows]
        if self.offsets is None:
            return Column(np.take(self.values, rows, axis=0), None, faults)
        starts, stops = self.offsets[rows], self.offsets[rows + 1]
        pieces = [self.values[start:stop] for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]
        values = np.concatenate([self.values[:0], *pieces])
        return Column(values, np.cumsum([0, *(stops - starts)], dtype=np.int64), faults)


def flat_leaf(leaves: Sequence[Leaf], name: str) -> Flat | None:
    """Returns how the values of a leaf of varying size lie, as `Flattened.flat_values`; None for any other."""
    for leaf in leaves:
        if leaf.name == name and leaf.is_varying:
            flat = Flat(leaf.kind if leaf.kind in ("text", "bytes") else "numbers", leaf.stored, leaf.shape)
            return flat if flat.item_bytes else None
    return None


def fill(leaf: Leaf, column: Column, rows: Indices, out: Target, *, records: Indices, where: str) -> None:
    """Copies records of a decoded column into place.

    **Arguments:** `rows`: int64 `[n]`, which of the column's records. `out`: `[n, *sample_shape]`, or rows. `records`:
    their numbers in the file `where`, for errors.

    **Raises:** `RecordError` naming a record that is null without a mask, has a list of another length, or holds what
    does not fit.
    """
    if column.faults is not None:
        is_null = column.faults[rows] == NULL
        if leaf.nulls == "masked" and is_null.any():

            def read(kept: Indices, part: Target) -> None:
                fill(leaf, column, rows[kept], part, records=records[kept], where=where)

            fill_valid(leaf, is_null, out, read, where=where)
            return
        refuse_faults(leaf, column.faults[rows], records, where=where)
    if isinstance(out, Rows):
        fill_rows(leaf, column.pieces(rows), out, records=records, where=where)
        return
    if column.offsets is None:
        if column.values.dtype == out.dtype:
            gather(column.values, rows, out, where=where, leaf=leaf.name)
        else:
            narrow(np.take(column.values, rows, axis=0), out, records, where=where, leaf=leaf.name)
        return
    starts, stops = column.offsets[rows].tolist(), column.offsets[rows + 1].tolist()
    if leaf.kind in ("text", "bytes"):
        data = column.values.data
        pieces = [data[start:stop] for start, stop in zip(starts, stops, strict=True)]
        fill_pieces(leaf, pieces, out, records=records, where=where)
    else:
        parts = [column.values[start:stop] for start, stop in zip(starts, stops, strict=True)]
        _fill_lists(
            leaf, np.concatenate([column.values[:0], *parts]), [len(part) for part in parts], out, records, where
        )


def fill_rows(leaf: Leaf, pieces: Joined, out: Rows, *, records: Indices, where: str) -> None:
    """Fills rows with the samples of a varying leaf.

    **Arguments:** `pieces`: the bytes of each sample. `records`, `where`: for errors.

    **Raises:** `RecordError` for text that is no UTF-8.
    """
    filled = out.place(*pieces)
    if filled < len(out):
        raise _not_text(leaf, pieces.payloads([filled]), records[filled : filled + 1], where)


def fill_pieces(leaf: Leaf, pieces: Sequence[Bytes], out: NDArray[Any], *, records: Indices, where: str) -> None:
    """Makes the samples of a varying leaf of their bytes: `str`, `bytes`, or arrays of the dtype that JAX has.

    **Arguments:** `pieces`: the bytes of each sample. `out`: an object array `[n]`. `records`, `where`: for errors.

    **Raises:** `RecordError` for text that is no UTF-8 and numbers that do not fit.
    """
    if leaf.kind == "bytes":
        out[:] = [bytes(piece) for piece in pieces]
    elif leaf.kind == "text":
        try:
            out[:] = [str(piece, "utf-8") for piece in pieces]
        except UnicodeDecodeError:
            raise _not_text(leaf, pieces, records, where) from None
    else:
        step = leaf.stored.itemsize * math.prod(leaf.shape)
        values = np.frombuffer(b"".join(pieces), leaf.stored).reshape(-1, *leaf.shape)
        _fill_lists(leaf, values, [len(piece) // max(1, step) for piece in pieces], out, records, where)


def fill_valid(
    leaf: Leaf,
    is_null: NDArray[np.bool_],
    out: Target,
    read: Callable[[Indices, Any], None],
    *,
    where: str,
) -> None:
    """Reads the records that have a value, and puts NaN, 0, False, or what is empty in place of those that are null.

    **Arguments:** `is_null`: `[n]`. `out`: `[n, *sample_shape]`, or rows. `read`: reads some of the `n` records, by
    their places among these, into an array like `out`, or into rows. `where`: the file, for errors.
    """
    kept, nulls = np.flatnonzero(~is_null), np.flatnonzero(is_null)
    if isinstance(out, Rows):
        out[nulls].clear()
        read(kept, out[kept])
        return
    part = np.empty((len(kept), *out.shape[1:]), out.dtype)
    read(kept, part)
    out[kept] = part
    if leaf.kind in ("text", "bytes"):
        out[nulls] = "" if leaf.kind == "text" else b""
    elif leaf.is_varying:
        for place in nulls.tolist():
            out[place] = np.empty((0, *leaf.shape), leaf.loaded(where))
    else:
        out[nulls] = np.nan if np.issubdtype(out.dtype, np.inexact) else 0


def refuse_faults(leaf: Leaf, faults: NDArray[np.int64], records: Indices, *, where: str) -> None:
    """Raises `RecordError` for the first of the records that has a fault."""
    wrong = np.flatnonzero(faults != FINE)
    if not wrong.size:
        return
    fault, record = int(faults[wrong[0]]), records[wrong[0]]
    if fault == NULL:
        raise RecordError(
            f"{where}, record {record}: column {leaf.name!r} is null, expected a value in every record; ask for "
            f"the leaf that says which records have one, {leaf.name + VALID!r}, in columns= too, fill or drop the "
            "nulls, or leave the column out"
        )
    raise RecordError(
        f"{where}, record {record}: column {leaf.name!r} has a list of length {fault}, expected {leaf.dims} as the "
        "first records have it; pad or cut the lists to one length, or leave the column out with columns="
    )


def with_lengths(leaf: Leaf, lengths: Sequence[int], *, where: str) -> Leaf:
    """Returns a leaf whose lists have known lengths.

    **Arguments:** `lengths`: one for each level of kind list, `RAGGED` where they differ.

    **Raises:** `FormatError` where inner lists differ in length: such samples are no arrays.
    """
    found = replace(leaf, lengths=tuple(lengths))
    if RAGGED in found.dims[1:]:
        raise FormatError(
            f"{where}: column {leaf.name!r} holds lists of lists, and the inner ones differ in length; expected only "
            "the outer ones to: flatten or pad them, or choose others with columns="
        )
    return found


def _fill_lists(
    leaf: Leaf, values: NDArray[Any], lengths: list[int], out: NDArray[Any], records: Indices, where: str
) -> None:
    """Splits the values of some records, one behind the other, into one array for each."""
    loaded = np.empty(values.shape, leaf.loaded(where))
    narrow(values, loaded, np.repeat(records, lengths), where=where, leaf=leaf.name)
    borders = np.cumsum([0, *lengths]).tolist()
    for place, (start, stop) in enumerate(itertools.pairwise(borders)):
        out[place] = loaded[start:stop]


def _not_text(leaf: Leaf, pieces: Sequence[Bytes], records: Indices, where: str) -> RecordError:
    for record, piece in zip(records.tolist(), pieces, strict=True):
        try:
            str(piece, "utf-8")
        except UnicodeDecodeError as error:
            return RecordError(
                f"{where}, record {record}: column {leaf.name!r} holds text that is no UTF-8 ({error}); mend it, or "
                "leave the column out with columns="
            )
    raise AssertionError("all of it is text")


def _flat(level: Level) -> bool:
    return level.kind == "struct"
