"""What a step publishes of its tables: all rows first, and then those that have changed."""

import contextlib
import errno
import fcntl
import os
import secrets
import uuid
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, NamedTuple, final

import numpy as np
import xxhash
from numpy.typing import NDArray

from braidax.errors import ArgumentError
from braidax.parallel.served.programs import TableForm
from braidax.parallel.served.seen_rows import list_blocks
from braidax.parallel.served.servers import Servers
from braidax.parallel.served.wire import Message

from .fingerprints import Fingerprints, Known
from .form import LOCK_FILE, Header, PublishedRows, listed, opened, unfinished_name

_BLOCK_BYTES = 16 << 20  # of rows in a message
_NO_CHECKSUM = "0" * 32


class _Part(NamedTuple):
    """What the server of a part of a table has. **Fields:** `begun`: as of `Shard`. `step`: how many updates it has
    seen."""

    begun: int
    step: int


_Seen = Mapping[str, Sequence[_Part]]
"""By table, of each part."""


class _Written(NamedTuple):
    """What a file has of a table. **Fields:** `rows`: with their numbers. `there`: of one that grows, which rows are
    there. `known`: where rows move without a gradient."""

    rows: PublishedRows
    there: NDArray[np.int64]
    known: Known | None


@final
class Publisher:
    """Publishes the tables of one step into folders, which it keeps locked.

    **Arguments:** `servers`, `forms`: of the tables, by name.
    """

    def __init__(self, servers: Servers, forms: Mapping[str, TableForm]) -> None:
        self._servers, self._forms, self._run = servers, forms, uuid.uuid4().hex
        self._folders: dict[Path, _Folder] = {}

    def publish(self, folder: str | os.PathLike[str], step: int) -> None:
        """Writes the next file of a folder. **Arguments:** `step`: how many updates the tables have seen.

        **Raises:** as `ServedStep.publish`.
        """
        if step < 0:
            raise ArgumentError("there are no tables yet: expected a state, by init, from_dense or a checkpoint, first")
        place = Path(folder).absolute()
        try:
            if place not in self._folders:
                self._folders[place] = _Folder(place)
            self._write(self._folders[place], step)
        except OSError as error:
            raise ArgumentError(
                f"folder={str(folder)!r}: expected a folder that this process may make and write to, with room for the "
                f"tables, got: {error}; give another one, change its permissions, or make room"
            ) from error

    def _write(self, folder: "_Folder", step: int) -> None:
        seen = {name: self._parts(form) for name, form in self._forms.items()}
        last = folder.last([_rows_of(form, whole=True) for form in self._forms.values()])
        known = folder.seen if last is not None and last.identity == folder.identity else {}
        tables = tuple(
            _rows_of(form, whole=not _follows(known.get(name), seen[name]) or folder.has_changed(name))
            for name, form in self._forms.items()
        )
        number, previous = (0, "") if last is None else (last.header.number + 1, last.identity)
        header = Header(number, self._run, step, previous, _NO_CHECKSUM, tables)
        length = len(header.to_bytes())  # no number in it will have more digits
        digest, written = xxhash.xxh3_128(), list[_Written]()
        with folder.unfinished(number) as (file, finish):
            file.seek(length)
            for rows in tables:
                name, follows = rows.name, _follows(known.get(rows.name), seen[rows.name])
                rests = form_rests(self._forms[name])
                first = -1 if rows.is_whole or not rests else min(part.step for part in known[name])
                prints = None if rests else Fingerprints(folder.known.get(name) if follows else None)
                gone = None if rows.is_whole else folder.there.get(name)
                written.append(self._put_table(lambda array: _put(file, digest, array), rows, first, prints, gone))
            header = replace(header, checksum=digest.hexdigest(), tables=tuple(one.rows for one in written))
            file.seek(0)
            file.write(header.to_bytes(length))
            finish(header.file_name)
        folder.seen, folder.identity = seen, header.checksum_in(length)
        folder.there = {one.rows.name: one.there for one in written}
        folder.known = {one.rows.name: one.known for one in written if one.known is not None}

    def _put_table(
        self,
        put: Callable[[NDArray[Any]], None],
        rows: PublishedRows,
        first: int,
        prints: Fingerprints | None,
        were_there: NDArray[np.int64] | None,
    ) -> _Written:
        """Writes what a file has of a table.

        **Arguments:** `first`: the step from which on rows have changed. `prints`: tells which are others, where that
        is not known by steps. `were_there`: in the file before, of a table that grows; None where none of it counts.
        """
        count, ids, there, gone = 0, list[NDArray[Any]](), np.empty(0, np.int64), np.empty(0, np.int64)
        for which, values in self._rows(rows, [first] * self._servers.num_servers):
            if prints is not None:
                differ = prints.differ(which, values)
                which, values = (which, values) if rows.is_whole else (which[differ], values[differ])
            count += len(values)
            put(values)
            ids += [which.astype(rows.ids)] if rows.ids else []
        if rows.seen:
            there = self._ids(rows.name)
            gone = gone if were_there is None else np.setdiff1d(were_there, there)
            ids.append(gone.astype(rows.ids))
        for some in ids:
            put(some)
        told = replace(rows, num_rows=count, num_gone=len(gone))
        return _Written(told, there, None if prints is None else prints.known())

    def _parts(self, form: TableForm) -> list[_Part]:
        if form.seen is not None:
            answers: Sequence[Message] = [*list_blocks(self._servers, form, "ids", (0, 0))]
        else:
            answers = self._servers.ask("changed", lambda _: {"table": form.name, "since": -1, "start": 0, "most": 0})
        return [_Part(int(one.fields["begun"]), int(one.fields["step"])) for one in answers]

    def _rows(self, rows: PublishedRows, since: Sequence[int]) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """Yields rows of a table that have changed, and which they are; all rows in order where all are wanted.

        **Arguments:** `since`: for each part a number of updates; below 0 all rows have changed.
        """
        if rows.seen:
            blocks = (self._servers, self._forms[rows.name], "values", (0, rows.shape[0]))
            for one in list_blocks(*blocks, since=since, block_bytes=_BLOCK_BYTES):
                yield one.arrays["ids"], one.arrays["values"]
            return
        size, most = len(since), max(1, _BLOCK_BYTES // max(1, rows.row_bytes))
        ends = [len(range(part, rows.shape[0], size)) for part in range(size)]
        starts = [0] * size
        while starts != ends:
            fields = [
                {"table": rows.name, "since": since[part], "start": starts[part], "most": most} for part in range(size)
            ]
            answers = self._servers.ask("changed", fields.__getitem__)
            found = [(one.arrays["ids"] * size + part, one.arrays["values"]) for part, one in enumerate(answers)]
            starts_before, starts = starts, [int(one.fields["looked"]) for one in answers]
            if rows.ids:
                yield from found
                continue
            count, first = sum(len(values) for _, values in found), min(starts_before) * size
            every = np.empty((count, *found[0][1].shape[1:]), found[0][1].dtype)
            for part, (_, values) in enumerate(found):
                every[part::size] = values  # all were asked from the same row on
            yield np.arange(first, first + count), every

    def _ids(self, name: str) -> NDArray[np.int64]:
        """Returns which rows of a table that grows are there."""
        blocks = list_blocks(self._servers, self._forms[name], "ids", (0, self._forms[name].shape[0]))
        return np.concatenate([one.arrays["ids"] for one in blocks])

    def close(self) -> None:
        """Gives all folders free. A second call does nothing."""
        for folder in self._folders.values():
            folder.close()
        self._folders.clear()


def form_rests(form: TableForm) -> bool:
    """Returns whether rows without a gradient stay as they are."""
    return not form.programs.settle


def _follows(known: Sequence[_Part] | None, seen: Sequence[_Part]) -> bool:
    """Whether what has changed since is known: the same rows, moved by updates alone, maybe in other parts."""
    if known is None:
        return False
    begun = [[part.begun for part in some] for some in (known, seen)]
    return begun[0] == begun[1] or len({*begun[0], *begun[1]}) == 1


def _rows_of(form: TableForm, *, whole: bool) -> PublishedRows:
    """Returns what a file has of a table. Its numbers of rows are those that there are at most."""
    ids = "uint32" if form.shape[0] <= 1 << 32 else "uint64"
    rows = PublishedRows(form.name, form.dtype, form.shape, form.shape[0], "" if whole else ids)
    if form.seen is None:
        return rows
    return replace(rows, ids=ids, seen="there" if whole else "changed", num_gone=0 if whole else form.shape[0])


def _as_whole(rows: PublishedRows) -> PublishedRows:
    return replace(rows, num_rows=rows.shape[0], ids="", seen="there" if rows.seen else "", num_gone=0)


def _put(file: IO[bytes], digest: "xxhash.xxh3_128", array: NDArray[Any]) -> None:
    content = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    digest.update(content)
    file.write(content)


class _Last(NamedTuple):
    """The newest file of a folder. **Fields:** `header`, and its checksum, `identity`."""

    header: Header
    identity: str


@final
class _Folder:
    """A folder that one step publishes into.

    **Fields:** `seen`: what servers had when this step has written its last file, whose checksum is `identity`.
    `there`: which rows were there then, of tables that grow. `known`: rows as they were then, where they move without a
    gradient.

    **Raises:** `OSError`. `ArgumentError` where another one publishes there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.seen: _Seen = {}
        self.there: Mapping[str, NDArray[np.int64]] = {}
        self.known: Mapping[str, Known] = {}
        self.identity = ""
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
        for folder in missing:
            _sync(folder.parent)
        self._check_own()
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
        descriptor = os.open(path / LOCK_FILE, flags, 0o666)
        self._release = weakref.finalize(self, os.close, descriptor)
        os.register_at_fork(after_in_child=self._release)  # a child would keep the folder locked behind this process
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.close()
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            raise ArgumentError(
                f"folder={str(path)!r}: another step publishes here: expected one at a time; close that one, or give "
                f"another folder"
            ) from error

    def has_changed(self, name: str) -> bool:
        """Whether most rows of a table have changed from one file to the next: all are then written again, so that
        files before may go."""
        return name in self.known and self.known[name].is_most

    def _check_own(self) -> None:
        _, _, others = listed(self._path)
        lock = self._path / LOCK_FILE
        if lock.exists() and lock.stat().st_size:
            others.append(LOCK_FILE)  # of somebody else: ours is empty
        if others:
            raise ArgumentError(
                f"folder={str(self._path)!r} has {', '.join(others[:5])}, which no step has published: expected a new "
                f"folder, an empty one, or one that was published into; give another one, or move these away"
            )

    def last(self, expected: Sequence[PublishedRows]) -> _Last | None:
        """Returns the newest file, None where there is none, and removes what a killed process has not finished.

        **Raises:** `ArgumentError` where the folder has other tables, or other files. `FormatError` for a damaged one.
        """
        self._check_own()
        found, unfinished, _ = listed(self._path)
        for path in unfinished:
            path.unlink(missing_ok=True)
        if not found:
            return None
        one = opened(found[-1])
        one.file.close()
        theirs = [_as_whole(rows) for rows in one.header.tables]
        if theirs != [_as_whole(rows) for rows in expected]:
            told = [[f"{rows.name} {rows.dtype}{list(rows.shape)}" for rows in some] for some in (theirs, expected)]
            raise ArgumentError(
                f"folder={str(self._path)!r} has the tables {', '.join(told[0])}, and this step has "
                f"{', '.join(told[1])}: expected the same; give another folder"
            )
        first = max((file.number for file in found if file.kind == "base"), default=-1)
        numbers = [file.number for file in found if file.number >= first]
        is_whole = numbers == [*range(first, found[-1].number + 1)]
        return _Last(one.header, one.identity if is_whole else "")

    @contextlib.contextmanager
    def unfinished(self, number: int) -> Generator[tuple[IO[bytes], Any], None, None]:
        """Yields a new file, and what makes it durable and names it; where that is not called, it is removed."""
        path = self._path / unfinished_name(number, secrets.token_hex(8))

        def finish(name: str) -> None:
            file.flush()
            os.fsync(file.fileno())
            path.rename(self._path / name)
            _sync(self._path)

        try:
            with path.open("xb") as file:
                yield file, finish
        finally:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Gives the folder free."""
        self._release()


def _sync(folder: Path) -> None:
    """Makes the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
