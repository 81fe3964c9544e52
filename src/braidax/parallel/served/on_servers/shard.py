"""A server's part of a table: its rows in host memory, and the programs that move them."""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from typing import Any, NamedTuple, final

import jax
import numpy as np
from numpy.typing import NDArray

from braidax.cores import usable_cores
from braidax.errors import ArgumentError
from braidax.parallel.served.files.row_files import RowFiles
from braidax.parallel.served.programs import JOINS, TableForm
from braidax.parallel.served.row_memory import (
    AdagradRows,
    aligned,
    compiled,
    is_aligned,
    move_by_adagrad,
    put_rows,
    take_rows,
)

from .dense import loaded
from .first_rows import FEWEST, FirstRows, padded

_FEW = 8192  # rows that are not worth a second thread
_MOST = 8192  # rows that are computed at a time
_LOOKED_AT = 1 << 20  # rows at a time, where most have not changed
_CACHED_BYTES = 1 << 21  # of the values of these: what is taken together should stay in a cache

_Done = Callable[[NDArray[Any], slice, Sequence[NDArray[Any]]], None]
"""Is given ids, which of all these they are, and what was computed of them."""


class _Room(NamedTuple):
    """Memory in which one thread computes rows, again and again: what is new is not there yet, and takes longer.

    **Fields:** `rows`: of values and of each thing kept, `[chunk, …]`. `gradients`: `[chunk, D]`.
    """

    rows: Sequence[NDArray[Any]]
    gradients: NDArray[Any]


@final
class Shard:
    """The rows `id` of a table with `id % size == rank`: row `id` is the `id // size`th.

    A row is as the last update that touched it has left it; how it is now is computed when it is read.

    **Arguments:** `form`: of the table. `rank`, `size`: which server of how many this is. `threads`: share the work on
    rows; None is the caller's. `disk`: the folder whose disk has what is kept here; None is memory.

    **Fields:** `num_rows`: here. `values`: `[num_rows, D]`. `kept`: what the optimizer keeps of rows. `touched`:
    int64 `[num_rows]`, the last step that has moved a row by a gradient. `begun`: how often rows were put here.
    `settled`: how often rows were brought up where they lie.

    **Raises:** as `RowFiles`.
    """

    def __init__(
        self, form: TableForm, rank: int, size: int, threads: Executor | None = None, disk: str | None = None
    ) -> None:
        self.form, self.rank, self.size, self._threads = form, rank, size, threads
        self.begun, self.settled = 0, 0
        self.num_rows = len(range(rank, form.shape[0], size))
        dtype = jax.numpy.dtype(form.dtype)
        kept = [((self.num_rows, *one.shape), jax.numpy.dtype(one.dtype)) for one in form.kept]
        forms = [((self.num_rows, form.width), dtype), *kept, ((self.num_rows,), np.dtype(np.int64))]
        whose = f"{form.name}, {form.dtype}{list(form.shape)}, part {rank} of {size}"
        self._files = None if disk is None else RowFiles(disk, forms, whose)
        arrays = [np.zeros(*one) for one in forms] if self._files is None else [*self._files.arrays]
        self.values, self.kept, self.touched = arrays[0], arrays[1:-1], arrays[-1]
        self.touched[:] = -1
        self._shared: list[Any] = []  # numbers by which rows that are read are brought up
        fits = _CACHED_BYTES // max(1, form.width * dtype.itemsize)
        self._chunk = min(_MOST, max(FEWEST, 1 << (max(1, fits).bit_length() - 1)))
        self._device = jax.local_devices(backend="cpu")[0]
        self._num_threads = usable_cores()
        has_kernel = compiled() is not None and dtype == np.float32
        self._adagrad = form.adagrad if has_kernel else None
        self._rooms: list[_Room] = []  # that no thread is in
        self._begin, self._update = loaded(form.programs.begin), loaded(form.programs.update)
        self._settle = loaded(form.programs.settle) if form.programs.settle else None
        self._sums = loaded(form.programs.sums) if form.programs.sums else None
        self._begun(np.zeros((1, form.width), dtype), 0)

    def compile(self) -> Iterator[int]:
        """Compiles the programs that move rows, for each number of rows; it yields behind each."""
        count, numbers = len(self.form.kept), self._shared
        for size in (FEWEST << power for power in range((self._chunk // FEWEST).bit_length())):
            room = self._enter()
            rows = [one[:size] for one in room.rows]
            with jax.default_device(self._device):
                if self._adagrad is None:
                    self._update(room.gradients[:size], *rows[: 1 + count], *numbers)
                if self._settle is not None:
                    self._settle(*rows[: 1 + count], *numbers)
            self._rooms.append(room)
            yield size

    def bear(self, key_data: NDArray[Any]) -> None:
        """Makes the first rows, as the user's `init` makes the table. **Arguments:** `key_data`: of its key."""
        if self.form.programs.rows:
            first = FirstRows(self.form, self.rank, self.size)

            def make(part: slice) -> None:
                self.values[part] = first.of(key_data, np.arange(part.start, part.stop))

            self._share_out(self.num_rows, make)
            self._anew()
        else:
            table = np.asarray(loaded(self.form.programs.born)(key_data))
            self.load(table.reshape(self.form.shape[0], self.form.width)[self.rank :: self.size])

    def load(self, values: NDArray[Any]) -> None:
        """Begins with other rows, of which the optimizer keeps what it keeps at first."""
        self.values[:] = values
        self._anew()

    def _anew(self) -> None:
        self.touched[:] = -1
        self.begun += 1
        for start in range(0, self.num_rows, self._chunk):
            self._begun(self.values[start : start + self._chunk], start)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, with all that is kept of it."""
        return sum(leaf.nbytes for leaf in self.lying(slice(None))) // max(1, self.num_rows)

    def lying(self, rows: slice | NDArray[Any]) -> list[NDArray[Any]]:
        """Returns rows as they lie here, which are not brought up, to be read or written: values, what is kept of them,
        and when each was moved last."""
        return [leaf[rows] for leaf in (self.values, *self.kept, self.touched)]

    def put(self, start: int, values: NDArray[Any], kept: Sequence[NDArray[Any]]) -> None:
        """Puts rows, and what is kept of them, in place of consecutive ones. **Raises:** `ArgumentError`."""
        expected = [self.values.shape[1:], *(leaf.shape[1:] for leaf in self.kept)]
        if [one.shape[1:] for one in (values, *kept)] != expected or not 0 <= start <= self.num_rows - len(values):
            raise ArgumentError(
                f"{len(values)} rows of {self.form.name} were given from {start} on, of the shapes "
                f"{[list(one.shape) for one in (values, *kept)]}; expected rows like {list(map(list, expected))} "
                f"within {self.num_rows}"
            )
        self.put_at(np.arange(start, start + len(values)), [values, *kept])
        self.begun += 1

    def put_at(self, ids: NDArray[Any], leaves: Sequence[NDArray[Any]]) -> None:
        """Puts rows in place of others. **Arguments:** `leaves`: values, and what is kept of rows.

        **Raises:** `ArgumentError` for rows of another form.
        """
        expected = [(len(ids), *leaf.shape[1:]) for leaf in (self.values, *self.kept)]
        if [one.shape for one in leaves] != expected:
            raise ArgumentError(
                f"rows of {self.form.name} were given of the shapes {[list(one.shape) for one in leaves]}; expected "
                f"{list(map(list, expected))}"
            )
        self._put(ids, slice(0, len(ids)), leaves)
        self.touched[ids] = -1

    def close(self) -> None:
        """Lets go of all rows, and of their file where they are on disk. A second call does nothing."""
        if self._files is not None:
            self._files.close()
        self.values, self.touched = self.values[:0].copy(), self.touched[:0].copy()
        self.kept, self.num_rows = [leaf[:0].copy() for leaf in self.kept], 0

    @property
    def shared(self) -> Sequence[Any]:
        """The numbers by which rows that are read are brought up."""
        return self._shared

    def share(self, shared: Sequence[Any]) -> None:
        """Sets the numbers by which rows that are read are brought up."""
        self._shared = [np.array(one) for one in shared]

    def _begun(self, rows: NDArray[Any], start: int) -> None:
        num_kept = len(self.form.kept)
        room = self._enter()
        found = [np.asarray(one) for one in self._begin(_filled(room.rows[0], rows))]
        self._rooms.append(room)
        part = slice(start, min(start + len(rows), self.num_rows))
        for leaf, new in zip(self.kept, found, strict=False):
            leaf[part] = new[: part.stop - start]
        self._shared = [np.array(one) for one in found[num_kept:]]

    def make_room(self, num_rows: int) -> None:
        """Has room for another number of rows in memory from now on, of which the first are those that are there."""
        leaves = [self.values, *self.kept, self.touched]
        for at, leaf in enumerate(leaves):
            leaves[at] = np.zeros((num_rows, *leaf.shape[1:]), leaf.dtype)
            leaves[at][: len(leaf)] = leaf[:num_rows]
        self.values, self.kept, self.touched, self.num_rows = leaves[0], leaves[1:-1], leaves[-1], num_rows

    def begin(self, ids: NDArray[Any], values: NDArray[Any]) -> None:
        """Puts first rows, of which the optimizer keeps what it keeps at first. **Arguments:** `ids`: where."""

        def compute(part: slice) -> None:
            room, some = self._enter(), ids[part]
            with jax.default_device(self._device):
                kept = [np.asarray(one) for one in self._begin(_filled(room.rows[0], values[part]))][: len(self.kept)]
            self._put(some, part, [values[part], *(one[: len(some)] for one in kept)])
            self._rooms.append(room)

        self._share_out(len(ids), compute)

    # Rows

    def pull(self, ids: NDArray[Any]) -> NDArray[Any]:
        """Returns rows as they are now, `[m, D]`. **Arguments:** `ids`: numbers of rows here."""
        rows = np.empty((len(ids), self.form.width), self.values.dtype)

        def done(_: NDArray[Any], part: slice, found: Sequence[NDArray[Any]]) -> None:
            rows[part] = found[0]

        if self._settle is not None:
            self._compute(self._settle, ids, self._shared, done)
        else:
            if self._files is not None:
                self._files.fetch([self.values], ids)
            self._share_out(len(ids), lambda part: take_rows(self.values, ids[part], rows[part]))
        return rows

    def changed(self, since: int, start: int, most: int) -> tuple[NDArray[np.int64], int]:
        """Finds rows that were moved by a gradient in a step from `since` on, or put here behind it.

        **Arguments:** `since`: below 0 all rows are. `start`: of those looked at. `most`: found.

        **Returns:** which rows, in order, and how far it has looked.
        """
        found, start = list[NDArray[np.int64]](), max(0, start)
        while most > 0 and start < self.num_rows:
            some = start + np.flatnonzero(self.touched[start : start + _LOOKED_AT] >= since)[:most]
            found.append(some)
            most -= len(some)
            start = int(some[-1]) + 1 if most == 0 else min(start + _LOOKED_AT, self.num_rows)
        return np.concatenate([np.empty(0, np.int64), *found]), start

    def push(self, ids: NDArray[Any], gradients: NDArray[Any], numbers: Sequence[Any], step: int) -> None:
        """Moves rows by their gradients.

        **Arguments:** `ids`: all different. `gradients`: `[m, D]`. `numbers`: as of `numbers_to_send`; none where the
        table has a row optimizer of its own. `step`: this one.
        """
        if self._adagrad is not None:
            if self._files is not None:
                self._files.fetch([self.values, *self.kept], ids)
            rows = AdagradRows(self.values, self.kept[0], self.touched)
            move_by_adagrad(rows, ids, gradients, rates=self._adagrad, step=step, threads=self._threads)
            return
        num = self.form.num_shared
        before, now, behind = (numbers[at * num : (at + 1) * num] for at in range(3)) if numbers else ([], [], [])
        if numbers and bool(numbers[-1]):
            self.settle_all(before)
        after: Sequence[Any] = behind
        moved = self._compute(self._update, ids, now if numbers else self._shared, self._mover(step), gradients)
        if not numbers:
            after = moved if len(ids) else self._rested()
        self._shared = [np.array(one) for one in after]

    def _rested(self) -> Sequence[Any]:
        """Returns what all rows share behind a step in which none of these has a gradient."""
        nothing = np.zeros((FEWEST, self.form.width), self.values.dtype)  # any rows: what all share moves as ever
        kept = [np.zeros((FEWEST, *leaf.shape[1:]), leaf.dtype) for leaf in self.kept]
        return self._update(nothing, nothing, *kept, *self._shared)[1 + len(kept) :]

    def moved_since(self, ids: NDArray[Any], since: int) -> NDArray[np.int64]:
        """Returns which of some rows have moved by a gradient in a step from `since` on."""
        return np.flatnonzero(self.touched[ids] >= since)

    def admitted(self, ids: NDArray[Any], gradients: NDArray[Any]) -> NDArray[Any]:
        """Returns those gradients that move rows: all."""
        return gradients

    def sums(self, gradients: NDArray[Any]) -> list[NDArray[Any]]:
        """Returns what the optimizer wants summed of gradients, `[m, D]`, over these rows."""
        if self._sums is None:
            return []
        parts: list[list[Any]] = []
        for start in range(0, max(1, len(gradients)), self._chunk):
            some = gradients[start : start + self._chunk]
            nothing = np.zeros((padded(len(some)) - len(some), self.form.width), gradients.dtype)
            parts.append([np.asarray(one) for one in self._sums(np.concatenate([some, nothing]))])
        joins = [JOINS[join] for join in self.form.joins]
        return [functools.reduce(join, one) for join, one in zip(joins, zip(*parts, strict=True), strict=True)]

    def settle_all(self, shared: Sequence[Any]) -> None:
        """Brings all rows up. **Arguments:** `shared`: numbers, in place of those that rows are read by."""
        self.settle(slice(0, self.num_rows), shared)

    def settle(self, rows: slice | NDArray[Any], shared: Sequence[Any] | None = None) -> None:
        """Brings some rows up to now. **Arguments:** `shared`: as of `settle_all`."""
        if self._settle is None:
            return
        self.settled += 1
        ids = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
        self._compute(self._settle, ids, self._shared if shared is None else shared, self._put)

    @property
    def rests(self) -> bool:
        """Whether rows without a gradient stay as they are."""
        return self._settle is None

    def _compute(
        self,
        program: Any,
        ids: NDArray[Any],
        shared: Sequence[Any],
        done: _Done,
        gradients: NDArray[Any] | None = None,
    ) -> Sequence[Any]:
        """Computes a program on rows, which are all different, as many at a time as fit into a cache.

        Of the rows that a program is compiled for, those that lack are copies of others.

        **Returns:** what does not go by rows.
        """
        num_rows = 1 + len(self.kept)
        if self._files is not None:
            self._files.fetch([self.values, *self.kept], ids)

        def compute(part: slice) -> Sequence[Any]:
            room, some = self._enter(), ids[part]
            given = [_taken(*pair, some) for pair in zip(room.rows, (self.values, *self.kept), strict=True)]
            if gradients is not None:
                given.insert(0, _filled(room.gradients, gradients[part]))
            with jax.default_device(self._device):
                found = [np.asarray(one) for one in program(*given, *shared)]
            done(some, part, [one[: len(some)] for one in found[:num_rows]])
            self._rooms.append(room)
            return found[num_rows:]

        return next(iter(self._share_out(len(ids), compute)), [])

    def _share_out(self, count: int, work: Callable[[slice], Any]) -> list[Any]:
        """Lets threads work on slices of rows, all about as long. **Returns:** what `work` gives for each, in order."""
        num_threads = 1 if self._threads is None else max(1, min(self._num_threads, -(-count // _FEW)))
        num_parts = max(1, -(-count // (self._chunk * num_threads)) * num_threads)
        borders = [count * part // num_parts for part in range(num_parts + 1)]
        parts = [slice(*ends) for ends in itertools.pairwise(borders)] if count else []
        return list(map(work, parts) if self._threads is None or len(parts) == 1 else self._threads.map(work, parts))

    def _enter(self) -> _Room:
        """Returns a room that no thread is in; who is done puts it back."""
        try:
            return self._rooms.pop()
        except IndexError:
            rows = [aligned((self._chunk, *leaf.shape[1:]), leaf.dtype) for leaf in (self.values, *self.kept)]
            return _Room(rows, aligned((self._chunk, self.form.width), self.values.dtype))

    def _put(self, ids: NDArray[Any], _: slice, found: Sequence[NDArray[Any]]) -> None:
        for leaf, new in zip((self.values, *self.kept), found, strict=True):
            put_rows(leaf, ids, new)

    def _mover(self, step: int) -> _Done:
        """Returns what puts rows that an update has moved. **Arguments:** `step`: of it."""
        now = np.full(min(self._chunk, self.num_rows), step)

        def put(ids: NDArray[Any], part: slice, found: Sequence[NDArray[Any]]) -> None:
            self._put(ids, part, found)
            put_rows(self.touched, ids, now[: len(ids)])

        return put

    def check(self, ids: NDArray[Any], name: str) -> None:
        """Raises `ArgumentError` for numbers of rows that are not here."""
        check_rows(ids, name, self.num_rows, f"server {self.rank} has {self.num_rows} of {self.form.name}")


def check_rows(ids: NDArray[Any], name: str, num_rows: int, told: str) -> None:
    """Raises `ArgumentError` for what is no numbers of rows. **Arguments:** `told`: who has how many."""
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise ArgumentError(f"{name} is {ids.dtype}{list(ids.shape)}, expected integers [m]")
    if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < num_rows):
        raise ArgumentError(
            f"{name} has rows {int(ids.min())} to {int(ids.max())}, and {told}: expected 0 <= row < {num_rows}"
        )


def _taken(place: NDArray[Any], leaf: NDArray[Any], ids: NDArray[Any]) -> NDArray[Any]:
    """Copies rows into a place."""
    count = len(ids)
    take_rows(leaf, ids, place[:count])
    place[count : padded(count)] = place[0]
    return place[: padded(count)]


def _filled(place: NDArray[Any], rows: NDArray[Any]) -> NDArray[Any]:
    """Returns rows, and zeros behind them up to as many as a program is compiled for, where XLA reads them in place."""
    if len(rows) == padded(len(rows)) and is_aligned(rows):
        return rows
    place[: len(rows)] = rows
    place[len(rows) : padded(len(rows))] = 0
    return place[: padded(len(rows))]
