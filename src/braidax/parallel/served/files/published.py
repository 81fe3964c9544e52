"""Published tables, as another process reads and follows them."""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast, final

import jax.numpy as jnp
import numpy as np
import xxhash
from numpy.typing import NDArray

from braidax.errors import ArgumentError, FormatError

from .form import Found, Header, Opened, PublishedRows, damaged, listed, opened

_BLOCK_BYTES = 16 << 20


class SeenRows(NamedTuple):
    """Rows of a table that grows, those that are there. **Fields:** `ids`: int64 `[m]`, in order. `rows`: `[m, …]`."""

    ids: NDArray[np.int64]
    rows: NDArray[Any]


def read_published(folder: str | os.PathLike[str]) -> dict[str, NDArray[Any]]:
    """Returns the tables that `ServedStep.publish` has put into a folder, as of the newest file.

    **Raises:** as `Published`. `ArgumentError` where a table grows, and is no array.
    """
    found = Published(folder)
    if found.seen:
        raise ArgumentError(
            f"folder={str(folder)!r} has {[*found.seen]}, which grow as seen, and are no arrays of all rows: expected "
            f"to be read by Published(folder).seen, which has (ids, rows) of each"
        )
    return found.tables


@final
class Published:
    """The tables that `ServedStep.publish` puts into a folder, in this process: read whole once, then by what has
    changed.

    Each file is checked before anything of it is used, and that it belongs behind the one before.

    **Arguments:** `folder`: that is published into.

    **Fields:** `tables`: by name, in memory. `seen`: of tables that grow, those rows that are there, in new arrays with
    each file. `version`: the number of the last file that was read. `step`: how many updates the tables have seen.

    **Raises:** `FormatError`, with the file and the remedy, where there is none, or one lacks, is damaged, or belongs
    elsewhere.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        self.tables: dict[str, NDArray[Any]] = {}
        self.seen: dict[str, SeenRows] = {}
        self._forms: dict[str, _Form] = {}
        self.version, self.step, self._identity, self._run = -1, 0, "", ""
        if not self.refresh():
            raise FormatError(
                f"folder={str(folder)!r} has no published tables: expected a file such as tables-00000000.base; let "
                f"step.publish write it first"
            )

    def refresh(self) -> int:
        """Takes what was published since, in the arrays that are there, which nobody may read meanwhile.

        Where a file is refused, the tables are as of the one before it.

        **Returns:** how many files were read. **Raises:** as `Published`.
        """
        try:
            found, _, _ = listed(self._folder)
        except OSError as error:
            raise FormatError(
                f"folder={str(self._folder)!r} cannot be listed: {error}; expected the folder of step.publish"
            ) from error
        wanted = self._wanted(found)
        for one in wanted:
            self._take(one)
        return len(wanted)

    def _wanted(self, found: Sequence[Found]) -> list[Found]:
        """Returns the files that lead to the newest tables: the newest base, unless deltas are enough."""
        there = {one.number: one for one in found}
        if self.version >= 0 and (not there or max(there) < self.version or not self._is_ours(there)):
            raise FormatError(
                f"folder={str(self._folder)!r} was begun anew since file {self.version} was read: expected the same "
                f"files, and new ones; read it by another Published(folder)"
            )
        bases = [one.number for one in found if one.kind == "base" and one.number > self.version]
        first, last = max(bases, default=self.version + 1), max(there, default=-1)
        lacking = [f"tables-{number:08d}.delta" for number in range(first, last + 1) if number not in there]
        if self.version < 0 and found and not bases:
            lacking = ["tables-00000000.base"]
        if lacking:
            raise FormatError(
                f"{self._folder / lacking[0]} is missing, and {there[last].path.name} is there: expected the last base "
                f"and all behind it; copy it from where it was published, or let a new step publish a new base"
            )
        return [there[number] for number in range(first, last + 1)]

    def _is_ours(self, there: dict[int, Found]) -> bool:
        """Whether the file that was read last is the one that is there, if it is."""
        if self.version not in there:
            return True
        one = opened(there[self.version])
        one.file.close()
        return one.identity == self._identity

    def _take(self, found: Found) -> None:
        one = opened(found)
        with one.file:
            header = one.header
            self._check_place(one)
            _check_rows(one)
            if not self._forms:
                self._begin([_form(rows) for rows in header.tables])
            start, seen = one.start, dict[str, SeenRows]()
            for rows in header.tables:
                if rows.seen:
                    seen[rows.name] = _grown(one, rows, start, self.seen[rows.name])
                else:
                    _fill(one, rows, start, self.tables[rows.name])
                start += rows.num_bytes
            self.seen = seen
        self.version, self.step, self._run, self._identity = header.number, header.step, header.run, one.identity

    def _begin(self, forms: Sequence["_Form"]) -> None:
        self._forms = {one.name: one for one in forms}
        self.tables = {one.name: np.empty(one.shape, one.dtype) for one in forms if not one.grows}
        self.seen = {one.name: _nothing(one) for one in forms if one.grows}

    def _check_place(self, one: Opened) -> None:
        """Raises `FormatError` for a file that does not belong behind the last one."""
        header = one.header
        if header.kind == "delta" and (header.previous != self._identity or header.run != self._run):
            raise damaged(
                one.path,
                f"it follows a file with the checksum {header.previous} of the run {header.run}, and the one before it "
                f"has {self._identity} of {self._run}: they do not belong to one another",
            )
        mine, theirs = self._forms, {rows.name: _form(rows) for rows in header.tables}
        if mine and mine != theirs:
            raise damaged(one.path, f"it has the tables {_told(header)}, and those before are {sorted(mine)}")


def _told(header: Header) -> str:
    return ", ".join(f"{rows.name} {rows.dtype}{list(rows.shape)}" for rows in header.tables)


class _Form(NamedTuple):
    """What all files have alike of a table."""

    name: str
    shape: tuple[int, ...]
    dtype: Any
    grows: bool


def _form(rows: PublishedRows) -> _Form:
    return _Form(rows.name, rows.shape, jnp.dtype(rows.dtype), bool(rows.seen))


def _nothing(form: _Form) -> SeenRows:
    return SeenRows(np.empty(0, np.int64), np.empty((0, *form.shape[1:]), form.dtype))


def _grown(one: Opened, rows: PublishedRows, start: int, table: SeenRows) -> SeenRows:
    """Returns the rows of a table that grows, as of a file. **Raises:** `FormatError`."""
    values = np.empty((rows.num_rows, *rows.shape[1:]), jnp.dtype(rows.dtype))
    numbers = np.empty(rows.num_rows + rows.num_gone, rows.ids)
    _read(one, start, values.reshape(-1).view(np.uint8))
    _read(one, start + rows.num_rows * rows.row_bytes, numbers.view(np.uint8))
    if len(numbers) and int(numbers.max()) >= rows.shape[0]:
        raise damaged(one.path, f"it has row {int(numbers.max())} of {rows.name}, which has {rows.shape[0]}")
    numbers = numbers.astype(np.int64)
    ids, gone = numbers[: rows.num_rows], numbers[rows.num_rows :]
    if len(np.unique(numbers)) < len(numbers) or not np.isin(gone, table.ids).all():
        raise damaged(one.path, f"it has rows of {rows.name} twice, or some are gone that were not there")
    stays = np.zeros(len(table.ids), bool) if rows.is_whole else ~np.isin(table.ids, numbers)
    every, found = np.concatenate([table.ids[stays], ids]), np.concatenate([table.rows[stays], values])
    order = np.argsort(every)
    return SeenRows(every[order], found[order])


def _check_rows(one: Opened) -> None:
    """Raises `FormatError` where what is behind the header is not what was written."""
    digest, size = xxhash.xxh3_128(), sum(rows.num_bytes for rows in one.header.tables)
    block = np.empty(min(size, _BLOCK_BYTES), np.uint8)
    for start in range(0, size, _BLOCK_BYTES):
        part = block[: min(_BLOCK_BYTES, size - start)]
        _read(one, one.start + start, part)
        digest.update(part.data)
    if digest.hexdigest() != one.header.checksum:
        raise damaged(one.path, f"its rows have the checksum {digest.hexdigest()}: it was changed")


def _fill(one: Opened, rows: PublishedRows, start: int, table: NDArray[Any]) -> None:
    """Puts the rows of a file into a table."""
    whole = table.reshape(table.shape[0], math.prod(table.shape[1:]))
    if not rows.ids:
        _read(one, start, whole.reshape(-1).view(np.uint8))
        return
    ids = np.empty(rows.num_rows, rows.ids)
    _read(one, start + rows.num_rows * rows.row_bytes, ids.view(np.uint8))
    if len(ids) and int(ids.max()) >= len(whole):
        raise damaged(one.path, f"it has row {int(ids.max())} of {rows.name}, which has {len(whole)}")
    most = max(1, _BLOCK_BYTES // max(1, rows.row_bytes))
    for first in range(0, rows.num_rows, most):
        some = ids[first : first + most].astype(np.int64)
        values = np.empty((len(some), whole.shape[1]), whole.dtype)
        _read(one, start + first * rows.row_bytes, values.reshape(-1).view(np.uint8))
        whole[some] = values


def _read(one: Opened, start: int, out: NDArray[np.uint8]) -> None:
    """Fills an array from a file. **Raises:** `FormatError`."""
    view, done = memoryview(cast(Any, out)), 0
    while done < len(view):
        try:
            count = os.preadv(one.file.fileno(), [view[done : done + _BLOCK_BYTES]], start + done)
        except OSError as error:
            raise damaged(one.path, f"it cannot be read: {error}") from error
        if not count:
            raise damaged(one.path, "it has become shorter while it was read")
        done += count
