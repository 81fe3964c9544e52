"""Ids that no row has, told to the user without waiting for the devices at each step."""

from collections import deque
from collections.abc import Sequence

import jax
import numpy as np

from braidax.errors import DataError

LATE_UPDATES = 4
"""So many updates later counts are looked at: the devices have passed that update long ago."""


class IdWatch:
    """Looks at the counts of ids out of range some updates after they were dispatched.

    All processes look at the same update's counts at the same call, so that all raise or none does.

    **Arguments:** `tables`: name and number of rows of each table.
    """

    def __init__(self, tables: Sequence[tuple[str, int]]) -> None:
        self._tables = tables
        self._coming: deque[tuple[str, jax.Array]] = deque()

    def add(self, what: str, counts: jax.Array) -> None:
        """Takes the counts, `[tables]`, of a batch. **Arguments:** `what`: the batch, in words."""
        self._coming.append((what, counts))

    def check(self, *, late: int = LATE_UPDATES) -> None:
        """Looks at the counts that so many others have followed.

        **Raises:** `DataError` naming batch, tables and counts.
        """
        while len(self._coming) > late - 1:
            self._look()

    def _look(self) -> None:
        what, counts = self._coming.popleft()
        found = np.asarray(counts)
        if found.any():
            self._coming.clear()
            told = ", ".join(
                f"{count} for {name} of {num_rows} rows"
                for (name, num_rows), count in zip(self._tables, found.tolist(), strict=True)
                if count
            )
            raise DataError(
                f"{what} has ids out of range: {told}; expected 0 <= id < rows: mend the data, or choose what "
                f'such ids mean by jnp.take(..., mode="clip" or "fill") and Hybrid(out_of_range="as jax")'
            )
