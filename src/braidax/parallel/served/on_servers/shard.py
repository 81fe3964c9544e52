"""A server's part of a table: its rows in host memory, and the programs that move them."""

import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from typing import Any, final

import jax
import numpy as np
from numpy.typing import NDArray

from braidax.errors import ArgumentError
from braidax.parallel.served.files.disk_rows import DiskRows, OnDisk, record_bytes
from braidax.parallel.served.programs import JOINS, TableForm
from braidax.parallel.served.row_memory import AdagradRows, check_rows, compiled, move_by_adagrad, put_rows

from .dense import loaded
from .first_rows import FEWEST, FirstRows, padded
from .memory_rows import MemoryRows
from .row_work import RowWork, filled

_LOOKED_AT = 1 << 20  # rows at a time, where most have not changed

_Done = Callable[[NDArray[Any], slice, Sequence[NDArray[Any]]], None]
"""Is given ids, which of all these they are, and what was computed of them."""


@final
class Shard:
    """The rows `id` of a table with `id % size == rank`: row `id` is the `id // size`th.

    A row is as the last update that touched it has left it; how it is now is computed when it is read.

    **Arguments:** `form`: of the table. `rank`, `size`: which server of how many this is. `threads`: share the work on
    rows; None is the caller's. `disk`: has what is kept here; None is memory.

    **Fields:** `num_rows`: here. `touched`: int64 `[num_rows]`, the last step that has moved a row by a gradient; it is
    in memory. `begun`: how often rows were put here. `settled`: how often rows were brought up where they lie.

    **Raises:** as `DiskRows`.
    """

    def __init__(
        self, form: TableForm, rank: int, size: int, threads: Executor | None = None, disk: OnDisk | None = None
    ) -> None:
        self.form, self.rank, self.size, self._threads = form, rank, size, threads
        self.begun, self.settled = 0, 0
        self.num_rows = len(range(rank, form.shape[0], size))
        dtype = jax.numpy.dtype(form.dtype)
        self._forms = form.of_row
        whose = f"{form.name}, {form.dtype}{list(form.shape)}, part {rank} of {size}"
        self._rows: MemoryRows | DiskRows = (
            MemoryRows(self.num_rows, self._forms)
            if disk is None
            else DiskRows(disk, self.num_rows, self._forms, whose)
        )
        self.touched = np.full(self.num_rows, -1, np.int64)
        self._shared: list[Any] = []  # numbers by which rows that are read are brought up
        self._work = RowWork(self._forms, threads)
        self._device = jax.local_devices(backend="cpu")[0]
        has_kernel = compiled() is not None and dtype == np.float32
        self._adagrad = form.adagrad if has_kernel else None
        self._begin, self._update = loaded(form.programs.begin), loaded(form.programs.update)
        self._settle = loaded(form.programs.settle) if form.programs.settle else None
        self._sums = loaded(form.programs.sums) if form.programs.sums else None
        self._shared = self._first_kept(np.zeros((1, form.width), dtype))[1]

    def compile(self) -> Iterator[int]:
        """Compiles the programs that move rows, for each number of rows; it yields behind each."""
        count, numbers = len(self.form.kept), self._shared
        for size in (FEWEST << power for power in range((self._work.chunk // FEWEST).bit_length())):
            with self._work.room() as room, jax.default_device(self._device):
                rows = [one[:size] for one in room.rows]
                if self._adagrad is None:
                    self._update(room.gradients[:size], *rows[: 1 + count], *numbers)
                if self._settle is not None:
                    self._settle(*rows[: 1 + count], *numbers)
            yield size

    def bear(self, key_data: NDArray[Any]) -> None:
        """Makes the first rows, as the user's `init` makes the table. **Arguments:** `key_data`: of its key."""
        if self.form.programs.rows:
            first = FirstRows(self.form, self.rank, self.size)

            def make(part: slice) -> None:
                values = first.of(key_data, np.arange(part.start, part.stop))
                self._lay_first(part.start, values)

            self._work.share_out(self.num_rows, make)
            self._anew()
        else:
            table = np.asarray(loaded(self.form.programs.born)(key_data))
            self.load(table.reshape(self.form.shape[0], self.form.width)[self.rank :: self.size])

    def load(self, values: NDArray[Any]) -> None:
        """Begins with other rows, of which the optimizer keeps what it keeps at first."""
        for start in range(0, self.num_rows, self._work.chunk):
            self._lay_first(start, values[start : start + self._work.chunk])
        self._anew()

    def _lay_first(self, start: int, values: NDArray[Any]) -> None:
        kept, _ = self._first_kept(values)
        self._rows.lay(slice(start, start + len(values)), [values, *kept])

    def _anew(self) -> None:
        self.touched[:] = -1
        self.begun += 1
        self._shared = self._first_kept(np.zeros((1, self.form.width), self.values.dtype))[1]

    @property
    def values(self) -> NDArray[Any]:
        """Of all rows, `[num_rows, D]`, where these are in memory; of none where they are on disk."""
        return self._rows.leaves[0]

    @property
    def kept(self) -> list[NDArray[Any]]:
        """What the optimizer keeps of rows; as of `values`."""
        return self._rows.leaves[1:]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, with all that is kept of it."""
        return record_bytes(self._forms) + self.touched.itemsize

    def lying(self, rows: slice) -> list[NDArray[Any]]:
        """Returns rows as they lie here, which are not brought up, to be read: values, what is kept of them, and when
        each was moved last."""
        return [*self._rows.lying(rows), self.touched[rows]]

    def lying_at(self, ids: NDArray[Any]) -> list[NDArray[Any]]:
        """As `lying`, of any rows; as requests, one after the other."""
        found = [np.empty((len(ids), *shape), dtype) for shape, dtype in self._forms]
        for part in self._rows.portions(len(ids)):
            self._rows.bring(ids[part])
            self._rows.take(ids[part], [leaf[part] for leaf in found])
        return [*found, self.touched[ids]]

    def lying_forms(self, count: int) -> list[tuple[tuple[int, ...], np.dtype[Any]]]:
        """Returns shapes and dtypes of what `lying` returns of so many rows."""
        return [((count, *shape), dtype) for shape, dtype in (*self._forms, ((), self.touched.dtype))]

    def lay(self, rows: slice, leaves: Sequence[NDArray[Any]]) -> None:
        """Undoes `lying`. **Arguments:** `leaves`: such as that returns of as many rows."""
        self._rows.lay(rows, leaves[:-1])
        self.touched[rows] = leaves[-1]

    def lay_at(self, ids: NDArray[Any], leaves: Sequence[NDArray[Any]]) -> None:
        """Undoes `lying_at`. **Raises:** as `put_at`."""
        self.put_at(ids, leaves[:-1])
        self.touched[ids] = leaves[-1]

    def put(self, start: int, values: NDArray[Any], kept: Sequence[NDArray[Any]]) -> None:
        """Puts rows, and what is kept of them, in place of consecutive ones. **Raises:** `ArgumentError`."""
        expected = [self.values.shape[1:], *(leaf.shape[1:] for leaf in self.kept)]
        if [one.shape[1:] for one in (values, *kept)] != expected or not 0 <= start <= self.num_rows - len(values):
            raise ArgumentError(
                f"{len(values)} rows of {self.form.name} were given from {start} on, of the shapes "
                f"{[list(one.shape) for one in (values, *kept)]}; expected rows like {list(map(list, expected))} "
                f"within {self.num_rows}"
            )
        rows = slice(start, start + len(values))
        self._rows.lay(rows, [values, *kept])
        self.touched[rows] = -1
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
        for part in self._rows.portions(len(ids)):
            self._rows.bring(ids[part])
            self._rows.put(ids[part], [leaf[part] for leaf in leaves])
        self.touched[ids] = -1

    def close(self) -> None:
        """Lets go of all rows, and of their file where they are on disk. A second call does nothing."""
        self._rows.close()
        self.touched, self.num_rows = self.touched[:0].copy(), 0

    @property
    def shared(self) -> Sequence[Any]:
        """The numbers by which rows that are read are brought up."""
        return self._shared

    def share(self, shared: Sequence[Any]) -> None:
        """Sets the numbers by which rows that are read are brought up."""
        self._shared = [np.array(one) for one in shared]

    def _first_kept(self, values: NDArray[Any]) -> tuple[list[NDArray[Any]], list[Any]]:
        """Returns what the optimizer keeps of rows at first, and what all rows share. **Arguments:** `values`: of some,
        no more than a chunk."""
        num_kept = len(self._forms) - 1
        with self._work.room() as room, jax.default_device(self._device):
            found = [np.asarray(one) for one in self._begin(filled(room.rows[0], values))]
            kept = [one[: len(values)].copy() for one in found[:num_kept]]
        return kept, [np.array(one) for one in found[num_kept:]]

    def make_room(self, num_rows: int) -> None:
        """Has room for another number of rows in memory from now on, of which the first are those that are there."""
        assert isinstance(self._rows, MemoryRows), "files have as many as they were made with"
        self._rows.make_room(num_rows)
        touched = np.zeros(num_rows, np.int64)
        touched[: len(self.touched)] = self.touched[:num_rows]
        self.touched, self.num_rows = touched, num_rows

    def begin(self, ids: NDArray[Any], values: NDArray[Any]) -> None:
        """Puts first rows, of which the optimizer keeps what it keeps at first. **Arguments:** `ids`: where."""

        for portion in self._rows.portions(len(ids)):
            self._rows.bring(ids[portion])

            def compute(part: slice, start: int = portion.start) -> None:
                part = slice(start + part.start, start + part.stop)
                self._rows.put(ids[part], [values[part], *self._first_kept(values[part])[0]])

            self._work.share_out(portion.stop - portion.start, compute)

    # Rows

    def pull(self, ids: NDArray[Any]) -> NDArray[Any]:
        """Returns rows as they are now, `[m, D]`. **Arguments:** `ids`: numbers of rows here."""
        rows = np.empty((len(ids), self.form.width), self.values.dtype)

        def done(_: NDArray[Any], part: slice, found: Sequence[NDArray[Any]]) -> None:
            rows[part] = found[0]

        if self._settle is not None:
            self._compute(self._settle, ids, self._shared, done, count=self._rows.count)
            return rows
        for portion in self._rows.portions(len(ids)):
            some, out = ids[portion], rows[portion]
            self._rows.bring(some)
            self._rows.count(some)
            self._work.share_out(len(some), lambda part, some=some, out=out: self._rows.take(some[part], [out[part]]))
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
            self._move_by_adagrad(self._adagrad, ids, gradients, step)
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

    def _move_by_adagrad(
        self, rates: tuple[float, float], ids: NDArray[Any], gradients: NDArray[Any], step: int
    ) -> None:
        how: dict[str, Any] = {"rates": rates, "step": step, "threads": self._threads}
        if isinstance(self._rows, MemoryRows):
            move_by_adagrad(AdagradRows(self.values, self.kept[0], self.touched), ids, gradients, **how)
            return
        for portion in self._rows.portions(len(ids)):
            some = ids[portion]
            leaves = [np.empty((len(some), *shape), dtype) for shape, dtype in self._forms]
            self._rows.bring(some)
            self._rows.take(some, leaves)
            rows = AdagradRows(leaves[0], leaves[1], np.empty(len(some), np.int64))
            move_by_adagrad(rows, np.arange(len(some)), gradients[portion], **how)
            self._rows.put(some, leaves)
            self.touched[some] = step

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
        for start in range(0, max(1, len(gradients)), self._work.chunk):
            some = gradients[start : start + self._work.chunk]
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
        count: Callable[[NDArray[Any]], None] = lambda _: None,
    ) -> Sequence[Any]:
        """Computes a program on rows, which are all different, as many at a time as fit into a cache.

        Of the rows that a program is compiled for, those that lack are copies of others.

        **Returns:** what does not go by rows.
        """
        num_rows, besides = len(self._forms), list[Sequence[Any]]()
        for portion in self._rows.portions(len(ids)):
            self._rows.bring(ids[portion])
            count(ids[portion])

            def compute(part: slice, start: int = portion.start) -> Sequence[Any]:
                part = slice(start + part.start, start + part.stop)
                some = ids[part]
                with self._work.room() as room, jax.default_device(self._device):
                    given = self._taken(room.rows, some)
                    if gradients is not None:
                        given.insert(0, filled(room.gradients, gradients[part]))
                    found = [np.asarray(one) for one in program(*given, *shared)]
                    done(some, part, [one[: len(some)] for one in found[:num_rows]])
                return found[num_rows:]

            besides += self._work.share_out(portion.stop - portion.start, compute)
        return next(iter(besides), [])

    def _taken(self, places: Sequence[NDArray[Any]], ids: NDArray[Any]) -> list[NDArray[Any]]:
        """Copies rows into places, and copies of one of them behind, up to as many as a program is compiled for."""
        count = len(ids)
        self._rows.take(ids, [place[:count] for place in places])
        for place in places:
            place[count : padded(count)] = place[0]
        return [place[: padded(count)] for place in places]

    def _put(self, ids: NDArray[Any], _: slice, found: Sequence[NDArray[Any]]) -> None:
        self._rows.put(ids, found)

    def _mover(self, step: int) -> _Done:
        """Returns what puts rows that an update has moved. **Arguments:** `step`: of it."""
        now = np.full(min(self._work.chunk, self.num_rows), step)

        def put(ids: NDArray[Any], part: slice, found: Sequence[NDArray[Any]]) -> None:
            self._put(ids, part, found)
            put_rows(self.touched, ids, now[: len(ids)])

        return put

    def check(self, ids: NDArray[Any], name: str) -> None:
        """Raises `ArgumentError` for numbers of rows that are not here."""
        check_rows(ids, name, self.num_rows, f"server {self.rank} has {self.num_rows} of {self.form.name}")
