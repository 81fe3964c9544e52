"""First rows of a table, made by their ids."""

from typing import Any, final

import jax
import numpy as np
from numpy.typing import NDArray

from braidax.parallel.served.programs import TableForm

from .dense import loaded

FEWEST = 256  # rows that a program is compiled for; numbers of rows are rounded up to powers of two
_MOST = 8192  # rows that are made at a time


@final
class FirstRows:
    """Makes the first rows `id` of a table with `id % size == rank`, of which row `id` is the `id // size`th.

    **Arguments:** `form`: of the table, whose rows are made each by itself. `rank`, `size`: which server of how many.
    """

    def __init__(self, form: TableForm, rank: int, size: int) -> None:
        self._form, self._rank, self._size = form, rank, size
        self._program = loaded(form.programs.rows)
        self._device = jax.local_devices(backend="cpu")[0]

    def of(self, key_data: NDArray[Any], rows: NDArray[Any]) -> NDArray[Any]:
        """Returns rows, `[m, D]`. **Arguments:** `key_data`: of the key of `init`. `rows`: which of those here."""
        made = np.empty((len(rows), self._form.width), jax.numpy.dtype(self._form.dtype))
        for start in range(0, len(rows), _MOST):
            ids = rows[start : start + _MOST].astype(np.int64) * self._size + self._rank
            some = np.zeros(padded(len(ids)), np.int32)
            some[: len(ids)] = ids
            with jax.default_device(self._device):
                made[start : start + len(ids)] = np.asarray(self._program(key_data, some))[: len(ids)]
        return made


def padded(count: int) -> int:
    """Returns for how many rows a program is compiled that computes some."""
    return max(FEWEST, 1 << max(0, count - 1).bit_length())
