"""Indexes: where the records of a data set lie in its files, found once, stored, and memory-mapped ever after."""

import contextlib
import json
import os
import tempfile
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, Protocol, cast, runtime_checkable

import numpy as np
import xxhash
from numpy.typing import NDArray

from braidax.data.source import Indices
from braidax.data.storage.derived import cache_folder
from braidax.data.storage.files import Files, Ranges
from braidax.data.storage.progress import Progress
from braidax.errors import FormatError

Chunk = tuple[NDArray[np.int64], NDArray[np.int64]]
Scan = Callable[[IO[bytes], str], Iterator[Chunk]]
"""Finds the records of one file, from its beginning on: `(offsets, lengths)` in bytes, many records at a time."""

_MAGIC = b"braidax index 01"  # the last bytes of an index; before them the length of the footer, and the footer
_ROW = np.dtype(("<i8", 2))  # offset and length
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

    `RecordIndex.build` makes one, or opens the one made before.

    **Arguments:** `path`: of the index. `about`: what it agrees with: the files and their states. `rows`: int64
    `[num_records, 2]`, offset and length in bytes. `num_records`: of each file.
    """

    def __init__(self, path: Path, about: dict[str, Any], rows: NDArray[np.int64], num_records: Sequence[int]) -> None:
        self._path = path
        self._about = about
        self._rows = rows
        self._starts = np.cumsum([0, *num_records], dtype=np.int64)

    @classmethod
    def build(cls, files: Files, scan: Scan, *, kind: str, cache: Path | None = None) -> "RecordIndex":
        """Opens the index of a data set; where there is none, or files changed since, all files are scanned first.

        It is stored beside the data (`.NAME.KIND.index`) or, for remote files and where that cannot be written, in the
        cache folder: `$BRAIDAX_CACHE`, or else `~/.cache/braidax`. Several processes may do this at once: an index
        appears under its name only when it is complete. Files without a stamp are scanned each time: nothing would tell
        that they changed.

        **Arguments:** `files`: of the data set. `scan`: finds the records of a file. `kind`: names what `scan` does, in
        letters fit for a file name; options that change where records lie are part of it. `cache`: a folder to store
        the index in, instead of those above.

        **Raises:** `FormatError` when no folder can be written, and what `scan` raises.
        """
        wanted = _description(files, kind)
        refused: list[str] = []
        places = _places(files.names, kind) if cache is None else [_cached(cache, files.names, kind)]
        for path in places if all(files.stamps) else ():
            found = cls._open(path, wanted)
            if found is not None:
                return found
        for path in places:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                descriptor, name = tempfile.mkstemp(prefix=path.name, suffix=".part", dir=path.parent)
            except OSError as error:
                refused.append(f"{path.parent} ({error.strerror})")
                continue
            with _written(Path(name), descriptor, path) as file:
                num_records = _scan_all(files, scan, file, path.parent)
                _close_with_footer(file, wanted, num_records)
            found = cls._open(path, wanted)
            if found is not None:
                return found
            refused.append(f"{path.parent} (the index written there was changed at once by another process)")
        raise FormatError(
            f"{files.names[0]}: the index of its records can be stored in none of {'; '.join(refused)}: set the "
            "environment variable BRAIDAX_CACHE to a folder that can be written"
        )

    @classmethod
    def _open(cls, path: Path, wanted: dict[str, Any]) -> "RecordIndex | None":
        """Opens a stored index if it is whole and belongs to the files as they are now."""
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(max(0, size - len(_MAGIC) - 8))
                tail = file.read()
                footer_bytes = int.from_bytes(tail[:8], "little")
                if tail[8:] != _MAGIC or footer_bytes > size - len(tail):
                    return None
                file.seek(size - len(tail) - footer_bytes)
                footer = json.loads(file.read(footer_bytes))
                num_records = footer.pop("num_records")
                total = sum(num_records)
                if footer != wanted or size != total * _ROW.itemsize + footer_bytes + len(tail):
                    return None
                rows = np.memmap(file, "<i8", "r", shape=(total, 2)) if total else np.empty((0, 2), np.int64)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return cls(path, wanted, rows.view(np.ndarray), num_records)

    def __reduce__(self) -> tuple[Any, ...]:
        return RecordIndex._reopened, (self._path, self._about)

    @classmethod
    def _reopened(cls, path: Path, about: dict[str, Any]) -> "RecordIndex":
        found = cls._open(path, about)
        if found is None:
            raise FormatError(f"{path}: the index is gone or was built anew since it was opened; open the data again")
        return found

    @property
    def starts(self) -> NDArray[np.int64]:
        return self._starts

    def __len__(self) -> int:
        return len(self._rows)

    def ranges(self, indices: Indices) -> Ranges:
        rows = np.take(self._rows, indices, axis=0, mode="clip")
        file = np.searchsorted(self._starts, indices, side="right") - 1
        return Ranges(file, np.ascontiguousarray(rows[:, 0]), np.ascontiguousarray(rows[:, 1]))

    def describe(self) -> str:
        return f"{self._path} ({self._path.stat().st_size if self._path.exists() else self._rows.nbytes:,} bytes)"


def _description(files: Files, kind: str) -> dict[str, Any]:
    """Returns what an index has to agree with: what it holds, and the state of every file."""
    names = [name if _is_remote(name) else Path(name).name for name in files.names]
    return {"kind": kind, "names": names, "sizes": list(files.sizes), "stamps": list(files.stamps)}


def _is_remote(name: str) -> bool:
    return "://" in name


def _places(names: Sequence[str], kind: str) -> list[Path]:
    cached = _cached(cache_folder() / "indexes", names, kind)
    folders = {None if _is_remote(name) else Path(name).parent for name in names}
    folder = folders.pop()
    if folders or folder is None:
        return [cached]
    name = Path(names[0]).name if len(names) == 1 else _digest([Path(name).name for name in names])
    return [folder / f".{name}.{kind}.index", cached]


def _cached(folder: Path, names: Sequence[str], kind: str) -> Path:
    absolute = [name if _is_remote(name) else str(Path(name).absolute()) for name in names]
    return folder / f"{_digest(absolute)}.{kind}.index"


def _digest(names: Sequence[str]) -> str:
    return xxhash.xxh3_128_hexdigest("\0".join(names).encode())


@contextlib.contextmanager
def _written(temporary: Path, descriptor: int, path: Path) -> Generator[IO[bytes]]:
    """Gives a file to be filled, which appears under its name when the block ends well, durable and whole."""
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    except OSError as error:
        raise FormatError(
            f"{path}: the index cannot be written ({error}); make room there, or set the environment variable "
            "BRAIDAX_CACHE to another folder"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def _close_with_footer(file: IO[bytes], wanted: dict[str, Any], num_records: Sequence[int]) -> None:
    footer = json.dumps({**wanted, "num_records": list(num_records)}).encode()
    file.write(footer + len(footer).to_bytes(8, "little") + _MAGIC)


def _scan_all(files: Files, scan: Scan, target: IO[bytes], folder: Path) -> list[int]:
    """Writes the rows of all files in their order, scanning several at a time; returns the records of each."""
    with Progress("index of", files.names[0], sum(files.sizes)) as progress:
        if len(files.names) == 1:
            return [_scan_one(files, 0, scan, target, progress)]
        num_files = len(files.names)
        pool = ThreadPoolExecutor(_PARALLEL, thread_name_prefix="braidax-index")
        with contextlib.ExitStack() as parts:

            def scan_part(number: int) -> tuple[IO[bytes], int]:
                part = cast("IO[bytes]", tempfile.TemporaryFile(dir=folder))  # noqa: SIM115 (`parts` closes it)
                parts.callback(part.close)
                return part, _scan_one(files, number, scan, part, progress)

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
                progress.stop.set()
                pool.shutdown(cancel_futures=True)


def _scan_one(files: Files, number: int, scan: Scan, target: IO[bytes], progress: Progress) -> int:
    num_records = 0
    with files.open(number) as file:
        for offsets, lengths in _readable(scan(file, files.names[number]), files.names[number]):
            rows = np.empty((len(offsets), 2), "<i8")
            rows[:, 0] = offsets
            rows[:, 1] = lengths
            target.write(rows.data)
            num_records += len(rows)
            progress.show(number, int(rows[-1].sum()) if len(rows) else 0)
            if progress.stop.is_set():
                break
    progress.show(number, files.sizes[number])
    return num_records


def _readable(chunks: Iterator[Chunk], name: str) -> Iterator[Chunk]:
    try:
        yield from chunks
    except OSError as error:
        raise FormatError(
            f"{name}: cannot be read while its index is built ({error}); check the disk or the connection, and open it "
            "again"
        ) from error
