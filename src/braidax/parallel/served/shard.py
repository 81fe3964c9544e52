"""A server's part of a table: its rows in host memory, and the programs that move them."""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, final

import jax
import numpy as np
from jax import export
from numpy.typing import NDArray

from braidax.errors import ArgumentError

from .programs import JOINS, TableForm

_FEWEST = 256  # rows that a program is compiled for; numbers of rows are rounded up to powers of two
_MOST = 4096  # rows that are computed at a time
_ALIGNMENT = 64
_CACHED_BYTES = 1 << 20  # of the values of these: what is taken together should fit into a core's cache


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
        fits = _CACHED_BYTES // max(1, form.width * dtype.itemsize)
        self._chunk = min(_MOST, max(_FEWEST, 1 << (max(1, fits).bit_length() - 1)))
        self._places = [_aligned((self._chunk, *leaf.shape[1:]), leaf.dtype) for leaf in (self.values, *self.kept)]
        self._gradients = _aligned((self._chunk, form.width), dtype)
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
        for start in range(0, self.num_rows, self._chunk):
            self._begun(self.values[start : start + self._chunk], start)

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
        found = [np.asarray(one) for one in self._begin(_filled(self._places[0], rows))]
        part = slice(start, min(start + len(rows), self.num_rows))
        for leaf, new in zip(self.kept, found, strict=False):
            leaf[part] = new[: part.stop - start]
        self._shared = [np.array(one) for one in found[num_kept:]]

    # Rows

    def pull(self, ids: NDArray[Any]) -> NDArray[Any]:
        """Returns rows as they are now, `[m, D]`. **Arguments:** `ids`: numbers of rows here."""
        if self._settle is None:
            return np.take(self.values, ids, axis=0)
        rows = np.empty((len(ids), self.form.width), self.values.dtype)
        for part, found in self._computed(self._settle, ids, self._shared):
            rows[part] = found[0]
        return rows

    def push(self, ids: NDArray[Any], gradients: NDArray[Any], numbers: Sequence[Any], step: int) -> None:
        """Moves rows by their gradients.

        **Arguments:** `ids`: all different. `gradients`: `[m, D]`. `numbers`: as of `numbers_to_send`; none where the
        table has a row optimizer of its own. `step`: this one.
        """
        num = self.form.num_shared
        before, now, behind = (numbers[at * num : (at + 1) * num] for at in range(3)) if numbers else ([], [], [])
        if numbers and bool(numbers[-1]):
            self.settle_all(before)
        after: Sequence[Any] = behind
        for part, found in self._computed(self._update, ids, now if numbers else self._shared, gradients):
            self._put(ids[part], found)
            after = behind if numbers else found[1 + len(self.kept) :]
        if not len(ids) and not numbers:
            after = self._rested()
        self.touched[ids] = step
        self._shared = [np.array(one) for one in after]

    def _rested(self) -> Sequence[Any]:
        """Returns what all rows share behind a step in which none of these has a gradient."""
        nothing = np.zeros((_FEWEST, self.form.width), self.values.dtype)  # any rows: what all share moves as ever
        kept = [np.zeros((_FEWEST, *leaf.shape[1:]), leaf.dtype) for leaf in self.kept]
        return self._update(nothing, nothing, *kept, *self._shared)[1 + len(kept) :]

    def sums(self, gradients: NDArray[Any]) -> list[NDArray[Any]]:
        """Returns what the optimizer wants summed of gradients, `[m, D]`, over these rows."""
        if self._sums is None:
            return []
        parts: list[list[Any]] = []
        for start in range(0, max(1, len(gradients)), self._chunk):
            some = gradients[start : start + self._chunk]
            nothing = np.zeros((_padded(len(some)) - len(some), self.form.width), gradients.dtype)
            parts.append([np.asarray(one) for one in self._sums(np.concatenate([some, nothing]))])
        joins = [JOINS[join] for join in self.form.joins]
        return [functools.reduce(join, one) for join, one in zip(joins, zip(*parts, strict=True), strict=True)]

    def settle_all(self, shared: Sequence[Any]) -> None:
        """Brings all rows up. **Arguments:** `shared`: numbers, in place of those that rows are read by."""
        self.settle(slice(0, self.num_rows), shared)

    def settle(self, part: slice, shared: Sequence[Any] | None = None) -> None:
        """Brings consecutive rows up to now. **Arguments:** `shared`: as of `settle_all`."""
        if self._settle is None:
            return
        ids = np.arange(part.start, part.stop)
        for some, found in self._computed(self._settle, ids, self._shared if shared is None else shared):
            self._put(ids[some], found)

    @property
    def rests(self) -> bool:
        """Whether rows without a gradient stay as they are."""
        return self._settle is None

    def _computed(
        self, program: Any, ids: NDArray[Any], shared: Sequence[Any], gradients: NDArray[Any] | None = None
    ) -> Iterator[tuple[slice, list[NDArray[Any]]]]:
        """Computes a program on rows, as many at a time as fit into a cache.

        Of the rows that a program is compiled for, those that lack are copies of others.

        **Yields:** which of `ids`, and what there is of them, in order; behind that what does not go by rows.
        """
        rows = 1 + len(self.kept)
        for start in range(0, len(ids), self._chunk):
            part = slice(start, min(start + self._chunk, len(ids)))
            given = [self._taken(at, leaf, ids[part]) for at, leaf in enumerate((self.values, *self.kept))]
            if gradients is not None:
                given.insert(0, _filled(self._gradients, gradients[part]))
            found = [np.asarray(one) for one in program(*given, *shared)]
            yield part, [*(one[: part.stop - start] for one in found[:rows]), *found[rows:]]

    def _taken(self, at: int, leaf: NDArray[Any], ids: NDArray[Any]) -> NDArray[Any]:
        """Returns rows in memory that is used again and again: what is new is not there yet, and takes longer."""
        count, place = len(ids), self._places[at]
        np.take(leaf, ids, axis=0, out=place[:count], mode="clip")
        place[count : _padded(count)] = place[0]
        return place[: _padded(count)]

    def _put(self, ids: NDArray[Any], found: Sequence[NDArray[Any]]) -> None:
        for leaf, new in zip((self.values, *self.kept), found, strict=False):
            leaf[ids] = new

    def check(self, ids: NDArray[Any], name: str) -> None:
        """Raises `ArgumentError` for numbers of rows that are not here."""
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
            raise ArgumentError(f"{name} is {ids.dtype}{list(ids.shape)}, expected integers [m]")
        if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < self.num_rows):
            raise ArgumentError(
                f"{name} has rows {int(ids.min())} to {int(ids.max())}, and server {self.rank} has {self.num_rows} of "
                f"{self.form.name}: expected 0 <= row < {self.num_rows}"
            )


def _aligned(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Returns zeros that XLA reads where they are: it copies what is not at a multiple of 64 bytes."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.zeros(size + _ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % _ALIGNMENT
    return memory[first : first + size].view(dtype).reshape(shape)


def _filled(place: NDArray[Any], rows: NDArray[Any]) -> NDArray[Any]:
    """Copies rows into a place, and zeros behind them, up to as many as a program is compiled for."""
    place[: len(rows)] = rows
    place[len(rows) : _padded(len(rows))] = 0
    return place[: _padded(len(rows))]


def _padded(count: int) -> int:
    return max(_FEWEST, 1 << max(0, count - 1).bit_length())


def _loaded(program: bytes) -> Any:
    return jax.jit(export.deserialize(bytearray(program)).call)
