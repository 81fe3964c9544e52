"""First rows of a table, made by their ids, and what becomes of them without gradients."""

from collections.abc import Sequence
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


@final
class AbsentRows:
    """Rows of a table as they are that no gradient has moved: first rows, and all steps that were taken since.

    **Arguments:** as of `FirstRows`.

    **Fields:** `changes`: the numbers by which all rows were brought up to the steps in which somebody has set others.
    """

    def __init__(self, form: TableForm, rank: int, size: int) -> None:
        self._form, self._first = form, FirstRows(form, rank, size)
        self._begin = loaded(form.programs.begin)
        self._settle = loaded(form.programs.settle) if form.programs.settle else None
        self._device = jax.local_devices(backend="cpu")[0]
        self.changes: list[list[NDArray[Any]]] = []

    def first(self, key_data: NDArray[Any], rows: NDArray[Any]) -> NDArray[Any]:
        """Returns first rows. **Arguments, Returns:** as of `FirstRows`."""
        return self._first.of(key_data, rows)

    def now(self, key_data: NDArray[Any], rows: NDArray[Any], shared: Sequence[Any]) -> NDArray[Any]:
        """Returns rows as they are now, `[m, D]`. **Arguments:** as of `first`. `shared`: the numbers of now."""
        values = self.first(key_data, rows)
        if self._settle is None:
            return values
        for start in range(0, len(rows), _MOST):
            some = values[start : start + _MOST]
            filled = np.zeros((padded(len(some)), self._form.width), values.dtype)
            filled[: len(some)] = some
            with jax.default_device(self._device):
                leaves = [filled, *self._begin(filled)[: len(self._form.kept)]]
                for numbers in (*self.changes, shared):
                    leaves = self._settle(*leaves, *numbers)
            some[:] = np.asarray(leaves[0])[: len(some)]
        return values

    def stacked(self, like: Sequence[NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Returns changes as arrays with a dim for them in front. **Arguments:** `like`: numbers of one of them."""
        some = [[one[at] for one in self.changes] for at in range(len(like))]
        pairs = enumerate(zip(some, like, strict=True))
        return {f"numbers/{at}": np.array(one, form.dtype).reshape(-1, *form.shape) for at, (one, form) in pairs}


def padded(count: int) -> int:
    """Returns for how many rows a program is compiled that computes some."""
    return max(FEWEST, 1 << max(0, count - 1).bit_length())
