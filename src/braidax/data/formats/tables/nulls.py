"""Nulls of tables: beside a column that holds some there is a leaf of bools, which says which records have a value."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from braidax.data.formats.tables.columns import VALID, Leaf, Value
from braidax.data.source import Box, Indices
from braidax.data.storage.mapped import Memory
from braidax.errors import FormatError


class Nulls:
    """Which records of record batches are null: a bit for each record, and nothing where none is null.

    **Arguments:** `counts`: int64 `[batches]`, the records of each batch.
    """

    def __init__(self, counts: NDArray[np.int64]) -> None:
        num_bytes = (counts + 7) // 8
        self._starts = np.cumsum(num_bytes) - num_bytes  # each batch begins a byte
        self._num_bytes = num_bytes
        self._bits = np.zeros(0, np.uint8)

    @property
    def is_empty(self) -> bool:
        """Whether no record is null."""
        return not self._bits.size

    def mark(self, batch: int, rows: Indices) -> None:
        """Takes note of records of a batch that are null. **Arguments:** `rows`: int64 `[n]`, their numbers there."""
        if self.is_empty:
            self._bits = np.zeros(int(self._num_bytes.sum()), np.uint8)
        start, num_bytes = int(self._starts[batch]), int(self._num_bytes[batch])
        is_null = np.zeros(8 * num_bytes, np.bool_)
        is_null[rows] = True
        self._bits[start : start + num_bytes] |= np.packbits(is_null, bitorder="little")

    def at(self, batches: Indices, rows: Indices) -> NDArray[np.bool_]:
        """Says of each record, by its batch and its number there, whether it is null."""
        if self.is_empty:
            return np.zeros(len(rows), np.bool_)
        return (self._bits[self._starts[batches] + (rows >> 3)] >> (rows & 7).astype(np.uint8) & 1).astype(np.bool_)


class DirectMask:
    """The leaf that says which records of a column have a value, of uncompressed Arrow batches; read as a `DirectLeaf`.

    **Arguments:** `leaf`: of kind "valid". `nulls`: of the column.
    """

    def __init__(self, leaf: Leaf, nulls: Nulls) -> None:
        self.leaf = leaf
        self._nulls = nulls

    def cut_dims(self, memory: Memory) -> int:
        """Returns 0: there is one bool a record."""
        return 0

    def read(
        self,
        memory: Memory,
        batches: Indices,
        rows: Indices,
        out: Any,
        *,
        box: Box | None = None,
        records: Indices,
        where: str,
    ) -> None:
        """Says of each record whether it has a value. **Arguments:** as of `DirectLeaf.read`."""
        np.logical_not(self._nulls.at(batches, rows), out=out)

    def prepare(self, memory: Memory, batches: Indices, rows: Indices, box: Box | None = None) -> None:
        """Does nothing: the bits are in memory."""


def mask_of(leaf: Leaf) -> Leaf:
    """Returns the leaf that says which records of a leaf have a value."""
    value = Value("valid", np.dtype(np.bool_), (), leaf.value.is_large, leaf.value.node, leaf.value.buffer)
    return replace(leaf, name=leaf.name + VALID, value=value, nulls="refused")


def masked(leaves: Sequence[Leaf], has_nulls: Callable[[Leaf], bool], *, where: str) -> list[Leaf]:
    """Puts a mask behind each leaf that has nulls and was not given with one.

    **Arguments:** `has_nulls`: says so of a leaf. `where`: the file, for errors.

    **Returns:** the leaves; those with a mask have a value for null.

    **Raises:** `FormatError` where another column has the name of a mask.
    """
    asked = {leaf.name for leaf in leaves if leaf.kind == "valid"}
    taken = {leaf.name for leaf in leaves if leaf.kind != "valid"}
    found: list[Leaf] = []
    for leaf in leaves:
        mask = mask_of(leaf)
        if leaf.kind == "valid" or (mask.name not in asked and not has_nulls(leaf)):
            found.append(leaf)
            continue
        if mask.name in taken:
            raise FormatError(
                f"{where}: column {leaf.name!r} holds nulls, and the leaf that says where, {mask.name!r}, has the name "
                "of another column: rename that one, or leave both out with columns="
            )
        found.append(replace(leaf, nulls="masked"))
        found += [] if mask.name in asked else [mask]
    return found
