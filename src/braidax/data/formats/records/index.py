"""Indexes: where the records of a data set lie in its files, found once, stored, and memory-mapped ever after."""

import contextlib
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, Protocol, cast, runtime_checkable

import numpy as np
import xxhash
from numpy.typing import NDArray

from braidax.data.source import Indices
from braidax.data.storage.derived import Derived, Kept
from braidax.data.storage.files import Files, Ranges
from braidax.data.storage.locks import NoPlace, NotKept
from braidax.data.storage.progress import Progress
from braidax.data.storage.room import Room
from braidax.errors import FormatError

Chunk = tuple[NDArray[np.int64], NDArray[np.int64]]
Scan = Callable[[IO[bytes], str], Iterator[Chunk]]
"""Finds the records of one file, from its beginning on: `(offsets, lengths)` in bytes, many records at a time."""

_ROW_BYTES = 16  # offset and length, int64 each
_PARALLEL = 8  # files of a data set that are scanned at a time
_COPY_BYTES = 1 << 24


@runtime_checkable
class Index(Protocol):
    """Where records lie."""

    @property
    def starts(self) -> NDArray[np.int64]:
        """int64 `[num_files + 1]`: the number of the first record of each file, and the number of all records."""
        ...

    def __len__(self) -> int:
        """The number of records."""
        ...

    def ranges(self, indices: Indices) -> Ranges:
        """Returns where records lie, for int64 `[n]` that are known to be in `[0, len)`."""
        ...

    def describe(self) -> str:
        """Returns where the index itself is kept, and how large it is."""
        ...


class RecordIndex(Index):
    """The place of every record of a data set, memory-mapped: opening it costs the same for any number of records.

    `RecordIndex.build` makes one, or opens the one made before. What is read of it is compared with checksums, a page
    of memory at a time, when it is first used.

    **Arguments:** `kept`: int64 `[num_records, 2]`, offset and length in bytes; the facts `num_records`, of each file.
    `derived`: the file that it lies in. `room`: keeps that from being removed.
    """

    def __init__(self, kept: Kept, derived: Derived, room: Room | None = None) -> None:
        self._kept = kept
        self._derived = derived
        self._room = room
        self._rows: NDArray[np.int64] = kept.data.view("<i8").reshape(-1, 2)
        self._starts = np.cumsum([0, *kept.facts["num_records"]], dtype=np.int64)
        if self._starts[-1] != len(self._rows):
            raise FormatError(f"{derived.path}: is no index of records; delete it, and it is made again")

    @classmethod
    def build(cls, files: Files, scan: Scan, *, kind: str, cache: Path | None = None) -> "RecordIndex":
        """Opens the index of a data set; where there is none, or files changed since, all files are scanned first.

        It is stored beside the data (`.NAME.KIND.index`) or, for remote files and where that cannot be written, in the
        cache folder: `$BRAIDAX_CACHE`, or else `~/.cache/braidax`. Of several processes that want it at once, one makes
        it and the others wait. Files without a stamp are scanned each time: nothing would tell that they changed.

        **Arguments:** `files`: of the data set. `scan`: finds the records of a file. `kind`: names what `scan` does, in
        letters fit for a file name; options that change where records lie are part of it. `cache`: a folder to store
        the index in, instead of those above.

        **Raises:** `FormatError` when no folder can be written, and what `scan` raises.
        """
        wanted = _description(files, kind)
        refused: list[str] = []
        room = Room("indexes", cache)
        places = [*(_beside(files.names, kind) if cache is None else ()), room.folder / _cached(files.names, kind)]
        found = [Derived(path, wanted) for path in places]
        for derived in found if all(files.stamps) else ():
            if not derived.path.exists():
                continue
            room.claim([derived.path])
            if (kept := derived.load()) is not None:
                return cls(kept, derived, room)
        for derived in found:
            folder = derived.path.parent
            room.claim([derived.path])
            try:
                with Progress("index of", files.names[0], sum(files.sizes)) as work:

                    def write(file: IO[bytes], folder: Path = folder, work: Progress = work) -> Mapping[str, Any]:
                        return {"num_records": _scan_all(files, scan, file, folder, work)}

                    kept = derived.numbers(write, work, is_new=not all(files.stamps))
            except NoPlace as error:
                refused.append(f"{folder} ({error.strerror or error})")
                continue
            except NotKept as error:
                raise FormatError(
                    f"{derived.path}: the index cannot be written ({error}); make room there, or set the environment "
                    "variable BRAIDAX_CACHE to another folder"
                ) from error
            room.made(kept.data.nbytes)
            return cls(kept, derived, room)
        raise FormatError(
            f"{files.names[0]}: the index of its records can be stored in none of {'; '.join(refused)}: set the "
            "environment variable BRAIDAX_CACHE to a folder that can be written"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return RecordIndex._reopened, (self._derived,)

    @classmethod
    def _reopened(cls, derived: Derived) -> "RecordIndex":
        kept = derived.load()
        if kept is None:
            raise FormatError(
                f"{derived.path}: the index is gone or was built anew since it was opened; open the data again"
            )
        return cls(kept, derived)

    @property
    def starts(self) -> NDArray[np.int64]:
        return self._starts

    def __len__(self) -> int:
        return len(self._rows)

    def ranges(self, indices: Indices) -> Ranges:
        self._kept.check(indices * _ROW_BYTES)
        rows = np.take(self._rows, indices, axis=0, mode="clip")
        file = np.searchsorted(self._starts, indices, side="right") - 1
        return Ranges(file, np.ascontiguousarray(rows[:, 0]), np.ascontiguousarray(rows[:, 1]))

    def describe(self) -> str:
        path = self._derived.path
        return f"{path} ({path.stat().st_size if path.exists() else self._rows.nbytes:,} bytes)"


def _description(files: Files, kind: str) -> dict[str, Any]:
    """Returns what an index has to agree with: what it holds, and the state of every file."""
    names = [name if _is_remote(name) else Path(name).name for name in files.names]
    return {"kind": kind, "names": names, "sizes": list(files.sizes), "stamps": list(files.stamps)}


def _is_remote(name: str) -> bool:
    return "://" in name


def _beside(names: Sequence[str], kind: str) -> list[Path]:
    """Returns where an index lies beside the data, if they lie in one folder of this machine."""
    folders = {None if _is_remote(name) else Path(name).parent for name in names}
    folder = folders.pop()
    if folders or folder is None:
        return []
    name = Path(names[0]).name if len(names) == 1 else _digest([Path(name).name for name in names])
    return [folder / f".{name}.{kind}.index"]


def _cached(names: Sequence[str], kind: str) -> str:
    absolute = [name if _is_remote(name) else str(Path(name).absolute()) for name in names]
    return f"{_digest(absolute)}.{kind}.index"


def _digest(names: Sequence[str]) -> str:
    return xxhash.xxh3_128_hexdigest("\0".join(names).encode())


def _scan_all(files: Files, scan: Scan, target: IO[bytes], folder: Path, work: Progress) -> list[int]:
    """Writes the rows of all files in their order, scanning several at a time; returns the records of each."""
    if len(files.names) == 1:
        return [_scan_one(files, 0, scan, target, work)]
    num_files = len(files.names)
    pool = ThreadPoolExecutor(_PARALLEL, thread_name_prefix="braidax-index")
    with contextlib.ExitStack() as parts:

        def scan_part(number: int) -> tuple[IO[bytes], int]:
            part = cast("IO[bytes]", tempfile.TemporaryFile(dir=folder))  # noqa: SIM115 (`parts` closes it)
            parts.callback(part.close)
            return part, _scan_one(files, number, scan, part, work)

        try:
            num_records: list[int] = []
            pending = deque(pool.submit(scan_part, number) for number in range(min(_PARALLEL, num_files)))
            while pending:
                part, records = pending.popleft().result()
                if len(num_records) + _PARALLEL < num_files:
                    pending.append(pool.submit(scan_part, len(num_records) + _PARALLEL))
                with part:
                    part.seek(0)
                    while data := part.read(_COPY_BYTES):
                        target.write(data)
                num_records.append(records)
            return num_records
        finally:
            work.stop.set()
            pool.shutdown(cancel_futures=True)


def _scan_one(files: Files, number: int, scan: Scan, target: IO[bytes], work: Progress) -> int:
    num_records = 0
    with files.open(number) as file:
        for offsets, lengths in _readable(scan(file, files.names[number]), files.names[number]):
            rows = np.empty((len(offsets), 2), "<i8")
            rows[:, 0] = offsets
            rows[:, 1] = lengths
            target.write(rows.data)
            num_records += len(rows)
            work.show(number, int(rows[-1].sum()) if len(rows) else 0)
            if work.stop.is_set():
                break
    work.show(number, files.sizes[number])
    return num_records


def _readable(chunks: Iterator[Chunk], name: str) -> Iterator[Chunk]:
    try:
        yield from chunks
    except OSError as error:
        raise FormatError(
            f"{name}: cannot be read while its index is built ({error}); check the disk or the connection, and open it "
            "again"
        ) from error
