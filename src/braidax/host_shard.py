"""`HostShard`: what a process has of a host array that lies in parts on several."""

import math
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from braidax.errors import ArgumentError


@final
@dataclass(frozen=True, eq=False)
class HostShard:
    """What this process has of a host array that lies in parts on several: some of its rows, or any other box of it.

    Such a leaf stands in the tree of every process that has some of it, and of process 0, which gives one without rows
    where it has none. In a checkpoint it is one array; it restores into shards of any other number of processes, and
    from and into arrays of JAX and NumPy. As a leaf of `like` only dtype, shape and place of its content matter.

    **Arguments:** `value`: what this process has. `shape`: of the whole array. `start`: where `value` begins in it.
    `share`: of a list, which may have another number of rows each time it is saved: which of how many even parts of it
    this process gets, when it is restored. None: it restores into as many rows as it has.

    **Raises:** `ArgumentError` where `value` is not within.
    """

    value: np.ndarray
    shape: tuple[int, ...]
    start: tuple[int, ...]
    share: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        sizes = self.value.shape
        fits = len(sizes) == len(self.shape) == len(self.start) > 0 and all(
            first >= 0 and first + size <= most for first, size, most in zip(self.start, sizes, self.shape, strict=True)
        )
        if not fits:
            raise ArgumentError(
                f"value= of shape {sizes} at start={self.start} of shape={self.shape}: expected a part of an array "
                "with dims, such as HostShard(rows, (num_rows, 8), (first_row, 0))"
            )

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the array."""
        return self.value.dtype

    @property
    def box(self) -> tuple[tuple[int, int], ...]:
        """Where this part lies: `(start, stop)` of every dim."""
        return tuple((first, first + size) for first, size in zip(self.start, self.value.shape, strict=True))

    @property
    def is_empty(self) -> bool:
        """Whether this process has nothing of the array."""
        return math.prod(self.value.shape) == 0

    def filled(self, value: np.ndarray) -> "HostShard":
        """Returns this part with another content."""
        return HostShard(value, self.shape, self.start, self.share)

    def of_list(self, num_rows: int) -> "HostShard":
        """Returns the part of a list that this process gets, with any content. **Arguments:** `num_rows`: of all."""
        which, parts = self.share or (0, 1)
        first, last = (num_rows * one // parts for one in (which, which + 1))
        rest = self.shape[1:]
        return HostShard(np.empty((last - first, *rest), self.dtype), (num_rows, *rest), (first, *(0 for _ in rest)))
