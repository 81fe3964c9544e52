"""A server's part of a table: its rows in host memory, and the programs that move them."""

from collections.abc import Sequence
from typing import Any, final

import jax
import numpy as np
from jax import export
from numpy.typing import NDArray

from braidax.errors import ArgumentError

from .programs import TableForm

_FEWEST = 256  # rows that a program is compiled for; numbers of rows are rounded up to powers of two
_BLOCK = 1 << 16  # rows that are begun or settled at a time


@final
class Shard:
    """The rows `id` of a table with `id % size == rank`: row `id` is the `id // size`th.

    A row is as the last update that touched it has left it; how it is now is computed when it is read.

    **Arguments:** `form`: of the table. `rank`, `size`: which server of how many this is.

    **Fields:** `num_rows`: here. `values`: `[num_rows, D]`. `kept`: what the optimizer keeps of rows. `touched`:
    int64 `[num_rows]`, the last step that has moved a row by a gradient.
    """

    def __init__(self, form: TableForm, rank: int, size: int) -> None:
        self.form, self.rank, self.size = form, rank, size
        self.num_rows = len(range(rank, form.shape[0], size))
        dtype = jax.numpy.dtype(form.dtype)
        self.values = np.zeros((self.num_rows, form.width), dtype)
        self.kept = [np.zeros((self.num_rows, *one.shape), jax.numpy.dtype(one.dtype)) for one in form.kept]
        self.touched = np.full(self.num_rows, -1, np.int64)
        self._shared: list[Any] = []  # numbers by which rows that are read are brought up
        self._begin, self._update = _loaded(form.programs.begin), _loaded(form.programs.update)
        self._settle = _loaded(form.programs.settle) if form.programs.settle else None
        self._sums = _loaded(form.programs.sums) if form.programs.sums else None
        self._begun(np.zeros((1, form.width), dtype), 0)

    def bear(self, key_data: NDArray[Any]) -> None:
        """Makes the first rows, as the user's `init` makes the table. **Arguments:** `key_data`: of its key."""
        table = np.asarray(_loaded(self.form.programs.born)(key_data))
        self.load(table.reshape(self.form.shape[0], self.form.width)[self.rank :: self.size])

    def load(self, values: NDArray[Any]) -> None:
        """Begins with other rows, of which the optimizer keeps what it keeps at first."""
        self.values[:] = values
        self.touched[:] = -1
        for start in range(0, self.num_rows, _BLOCK):
            rows = self.values[start : start + _BLOCK]
            self._begun(rows, start)

    def put(self, start: int, values: NDArray[Any], kept: Sequence[NDArray[Any]]) -> None:
        """Puts rows, and what is kept of them, in place of consecutive ones. **Raises:** `ArgumentError`."""
        expected = [self.values.shape[1:], *(leaf.shape[1:] for leaf in self.kept)]
        if [one.shape[1:] for one in (values, *kept)] != expected or not 0 <= start <= self.num_rows - len(values):
            raise ArgumentError(
                f"{len(values)} rows of {self.form.name} were given from {start} on, of the shapes "
                f"{[list(one.shape) for one in (values, *kept)]}; expected rows like {list(map(list, expected))} "
                f"within {self.num_rows}"
            )
        part = slice(start, start + len(values))
        for leaf, new in zip((self.values, *self.kept), (values, *kept), strict=True):
            leaf[part] = new
        self.touched[part] = -1

    @property
    def shared(self) -> Sequence[Any]:
        """The numbers by which rows that are read are brought up."""
        return self._shared

    def share(self, shared: Sequence[Any]) -> None:
        """Sets the numbers by which rows that are read are brought up."""
        self._shared = [np.array(one) for one in shared]

    def _begun(self, rows: NDArray[Any], start: int) -> None:
        num_kept = len(self.form.kept)
        found = self._run(self._begin, [rows], num_kept)
        for leaf, new in zip(self.kept, found, strict=False):
            leaf[start : start + len(rows)] = new[: self.num_rows - start]
        self._shared = [np.asarray(one) for one in found[num_kept:]]

    # Rows

    def pull(self, ids: NDArray[Any]) -> NDArray[Any]:
        """Returns rows as they are now, `[m, D]`. **Arguments:** `ids`: numbers of rows here."""
        values = self.values[ids]
        if self._settle is None or not len(ids):
            return values
        kept = [leaf[ids] for leaf in self.kept]
        return self._run(self._settle, [values, *kept], 1 + len(kept), self._shared)[0]

    def push(self, ids: NDArray[Any], gradients: NDArray[Any], numbers: Sequence[Any], step: int) -> None:
        """Moves rows by their gradients.

        **Arguments:** `ids`: all different. `gradients`: `[m, D]`. `numbers`: as of `numbers_to_send`, and behind them
        whether a fixed one has changed; none where the table has a row optimizer of its own. `step`: this one.
        """
        num = self.form.num_shared
        before, now, behind = (numbers[at * num : (at + 1) * num] for at in range(3)) if numbers else ([], [], [])
        if numbers and bool(numbers[-1]):
            self.settle_all(before)
        given = now if numbers else self._shared
        rows = [gradients, self.values[ids], *(leaf[ids] for leaf in self.kept)]
        if len(ids):
            found = self._run(self._update, rows, 1 + len(self.kept), given)
            self.values[ids] = found[0]
            for leaf, new in zip(self.kept, found[1:], strict=False):
                leaf[ids] = new
            self.touched[ids] = step
            self._shared = [np.asarray(one) for one in (behind if numbers else found[1 + len(self.kept) :])]
        else:
            self._rest(numbers, behind)

    def _rest(self, numbers: Sequence[Any], behind: Sequence[Any]) -> None:
        """Takes a step in which no row of these has a gradient."""
        if numbers:
            self._shared = [np.asarray(one) for one in behind]
            return
        rows = np.zeros((1, self.form.width), self.values.dtype)  # any rows: what all share moves as ever
        kept = [np.zeros((1, *leaf.shape[1:]), leaf.dtype) for leaf in self.kept]
        found = self._run(self._update, [rows, rows, *kept], 1 + len(kept), self._shared)
        self._shared = [np.asarray(one) for one in found[1 + len(kept) :]]

    def sums(self, gradients: NDArray[Any]) -> list[NDArray[Any]]:
        """Returns what the optimizer wants summed of gradients, `[m, D]`, over these rows."""
        if self._sums is None:
            return []
        nothing = np.zeros((_padded(len(gradients)) - len(gradients), self.form.width), gradients.dtype)
        return [np.asarray(one) for one in self._sums(np.concatenate([gradients, nothing]))]

    def settle_all(self, shared: Sequence[Any]) -> None:
        """Brings all rows up. **Arguments:** `shared`: numbers, in place of those that rows are read by."""
        for start in range(0, self.num_rows, _BLOCK):
            self.settle(slice(start, min(start + _BLOCK, self.num_rows)), shared)

    def settle(self, part: slice, shared: Sequence[Any] | None = None) -> None:
        """Brings consecutive rows up to now. **Arguments:** `shared`: as of `settle_all`."""
        if self._settle is None or part.start >= part.stop:
            return
        rows = [self.values[part], *(leaf[part] for leaf in self.kept)]
        found = self._run(self._settle, rows, len(rows), self._shared if shared is None else shared)
        for leaf, new in zip((self.values, *self.kept), found, strict=True):
            leaf[part] = new

    @property
    def rests(self) -> bool:
        """Whether rows without a gradient stay as they are."""
        return self._settle is None

    def _run(
        self, program: Any, rows: Sequence[NDArray[Any]], num_rows_out: int, shared: Sequence[Any] = ()
    ) -> list[NDArray[Any]]:
        """Computes a program on so many rows as it is compiled for; the last row stands in for those that lack."""
        count = len(rows[0])
        given = [np.concatenate([one, np.repeat(one[-1:], _padded(count) - count, axis=0)]) for one in rows]
        found = [np.asarray(one) for one in program(*given, *shared)]
        return [*(one[:count] for one in found[:num_rows_out]), *found[num_rows_out:]]

    def check(self, ids: NDArray[Any], name: str) -> None:
        """Raises `ArgumentError` for numbers of rows that are not here."""
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
            raise ArgumentError(f"{name} is {ids.dtype}{list(ids.shape)}, expected integers [m]")
        if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < self.num_rows):
            raise ArgumentError(
                f"{name} has rows {int(ids.min())} to {int(ids.max())}, and server {self.rank} has {self.num_rows} of "
                f"{self.form.name}: expected 0 <= row < {self.num_rows}"
            )


def _padded(count: int) -> int:
    return max(_FEWEST, 1 << max(0, count - 1).bit_length())


def _loaded(program: bytes) -> Any:
    return jax.jit(export.deserialize(bytearray(program)).call)
