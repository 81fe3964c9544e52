"""Tables that are stored by rows, padded: which shapes hold the same rows, and where each row stands.

A table of V rows is `[V, ...]`, or `[R, N, ...]` with `R = ceil(V / N)`, where row `id` is at `[id // N, id % N]`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from braidax.checkpoint.format.manifest import Entry
from braidax.checkpoint.snapshot.boxes import Box
from braidax.errors import CheckpointError


class Rows(NamedTuple):
    """How V rows stand in an array. **Fields:** `num_rows`: V. `num_columns`: N, None for `[V, ...]`."""

    num_rows: int
    num_columns: int | None

    def inner(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of one row."""
        return tuple(shape[1:] if self.num_columns is None else shape[2:])

    def ids(self, box: Box) -> NDArray[np.int64]:
        """Returns the row at each place of the leading dims of a box: `[rows]` or `[rows, columns]`."""
        first = np.arange(*box[0])
        return first if self.num_columns is None else first[:, None] * self.num_columns + np.arange(*box[1])

    def places(self, ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
        """Returns the index of each row in the leading dims."""
        return (ids,) if self.num_columns is None else (ids // self.num_columns, ids % self.num_columns)


def rows_of(shape: Sequence[int], num_rows: int) -> Rows | None:
    """Returns how an array of a shape holds the rows in its stored form, None when it cannot."""
    fits = len(shape) >= 2 and shape[1] > 0 and shape[0] == -(-num_rows // shape[1])
    return Rows(num_rows, shape[1]) if fits else None


class Conversion(NamedTuple):
    """From the form in a checkpoint to that in memory."""

    saved: Rows
    wanted: Rows


def conversion(saved: Entry, shape: Sequence[int], num_rows: int | None) -> Conversion | None:
    """Returns how a leaf becomes one of another shape with the same rows, None when it cannot.

    **Arguments:** `saved`: the leaf. `shape`: that is wanted. `num_rows`: V, if the tree that is wanted says it.
    """
    if saved.padded_rows is not None and num_rows is not None and saved.padded_rows != num_rows:
        return None
    total = num_rows if saved.padded_rows is None else saved.padded_rows
    if total is None:
        return None
    whole = Rows(total, None)
    origins = [whole if saved.padded_rows is None else rows_of(saved.shape, total)]
    targets = [rows_of(shape, total), whole if num_rows is None and shape[:1] == (total,) else None]
    for origin in origins:
        for target in targets:
            if origin and target and origin.inner(saved.shape) == target.inner(shape):
                is_whole = origin.num_columns is not None or saved.shape[:1] == (total,)
                return Conversion(origin, target) if is_whole else None
    return None


def check_stored(entries: Sequence[Entry], num_rows: Mapping[str, int]) -> None:
    """Checks that what a tree says of padded rows is true.

    **Raises:** `CheckpointError` naming a path that is no such leaf.
    """
    known: dict[str, Any] = {entry.leaf.path: entry for entry in entries}
    for path, total in num_rows.items():
        entry = known.get(path)
        if entry is None or rows_of(entry.shape, total) is None or entry.leaf.kind != "array":
            found = "no leaf of this tree" if entry is None else str(entry.leaf)
            raise CheckpointError(
                f"padded_rows says that leaf {path!r} has {total} rows, but it is {found}: expected an array "
                f"[ceil({total} / N), N, ...]; correct the `padded_rows` of the node above it"
            )
