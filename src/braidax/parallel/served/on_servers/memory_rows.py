"""Rows in a server's memory, all of them."""

from collections.abc import Iterator, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from braidax.parallel.served.row_memory import put_rows, take_rows


@final
class MemoryRows:
    """Rows whose leaves are arrays, with the methods of `DiskRows`.

    **Arguments:** `num_rows`: zeros. `forms`: shapes and dtypes of what a row has.

    **Fields:** `leaves`: `[num_rows, …]`.
    """

    def __init__(self, num_rows: int, forms: Sequence[tuple[tuple[int, ...], np.dtype[Any]]]) -> None:
        self.leaves: list[NDArray[Any]] = [np.zeros((num_rows, *shape), dtype) for shape, dtype in forms]

    def make_room(self, num_rows: int) -> None:
        """Has another number of rows from now on, of which the first are those that are there."""
        for at, leaf in enumerate(self.leaves):
            self.leaves[at] = np.zeros((num_rows, *leaf.shape[1:]), leaf.dtype)
            self.leaves[at][: len(leaf)] = leaf[:num_rows]

    def portions(self, count: int) -> Iterator[slice]:
        """Yields all at once."""
        if count:
            yield slice(0, count)

    def count(self, ids: NDArray[Any]) -> None:
        """Does nothing: all rows stay."""

    def bring(self, ids: NDArray[Any]) -> None:
        """Does nothing: they are there."""

    def take(self, ids: NDArray[Any], out: Sequence[NDArray[Any]]) -> None:
        """Copies rows. **Arguments:** `out`: of the first leaves, `[m, …]`."""
        for leaf, some in zip(self.leaves, out, strict=False):
            take_rows(leaf, ids, some)

    def put(self, ids: NDArray[Any], leaves: Sequence[NDArray[Any]]) -> None:
        """Undoes `take`. **Arguments:** `leaves`: all."""
        for leaf, some in zip(self.leaves, leaves, strict=True):
            put_rows(leaf, ids, some)

    def lying(self, rows: slice) -> list[NDArray[Any]]:
        """Returns views of rows."""
        return [leaf[rows] for leaf in self.leaves]

    def lay(self, rows: slice, leaves: Sequence[NDArray[Any]]) -> None:
        """Puts rows in place of others."""
        for leaf, some in zip(self.leaves, leaves, strict=True):
            leaf[rows] = some

    def close(self) -> None:
        """Lets go of all rows. A second call does nothing."""
        self.leaves = [leaf[:0].copy() for leaf in self.leaves]
