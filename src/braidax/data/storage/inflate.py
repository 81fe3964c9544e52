"""Compressed files, which cannot be read at random: decompressed once, into the cache folder."""

import bz2
import gzip
import io
import lzma
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BufferedIOBase
from pathlib import Path
from typing import IO, Any

import xxhash

from braidax.data.storage.derived import Derived
from braidax.data.storage.files import Bytes, Files, Ranges
from braidax.data.storage.limits import max_bytes, needs_much_memory, refuse_larger
from braidax.data.storage.local import LocalFiles
from braidax.data.storage.locks import NotKept
from braidax.data.storage.progress import Progress
from braidax.data.storage.room import Room
from braidax.errors import FormatError
from braidax.extras import import_pyarrow

_MAGICS = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_OPENERS: dict[str, Callable[[IO[bytes]], Any]] = {"gzip": gzip.open, "bzip2": bz2.open}
SUFFIXES = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd"}
_CORRUPT = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)
_PARALLEL = 4
_COPY_BYTES = 1 << 20


def compression_of(head: bytes) -> str:
    """Returns how a file is compressed, by its first bytes: `"gzip"`, `"bzip2"`, `"xz"`, `"zstd"`, or `""`."""
    return next((name for magic, name in _MAGICS.items() if head.startswith(magic)), "")


def inflated_head(file: IO[bytes], compression: str, num_bytes: int, *, name: str, stored_bytes: int) -> bytes:
    """Returns the first bytes of what a compressed file holds.

    **Arguments:** `name`, `stored_bytes`: of the file.

    **Raises:** `FormatError` for data that are damaged, or compressed in a way that is not known here.
    """
    with inflating(file, compression, name=name, stored_bytes=stored_bytes) as inner:
        return _read(inner.read, name, compression, num_bytes)


def inflating(file: IO[bytes], compression: str, *, name: str, stored_bytes: int) -> BufferedIOBase:
    """Opens what a compressed file holds, to be read from its beginning on.

    **Arguments:** `compression`: as `compression_of`. `name`, `stored_bytes`: of the file.

    **Raises:** `FormatError` for a compression that is not known here; `MissingExtra` for zstd without pyarrow; while
    it is read, `FormatError` for an xz or zstd file that takes too much memory, and what the decompressors raise.
    """
    if compression == "zstd":
        return io.BufferedReader(_Pieces(_zstd_pieces(file, name)), _COPY_BYTES)
    if compression == "xz":
        return io.BufferedReader(_Pieces(_xz_pieces(file, name, stored_bytes)), _COPY_BYTES)
    if compression not in _OPENERS:
        raise FormatError(
            f"{name}: is compressed with {compression or 'nothing that is known'}, which cannot be read at random; "
            "decompress it, or compress it with gzip, bzip2, xz or zstd: these are decompressed into the cache folder"
        )
    return _OPENERS[compression](file)


class Inflated(Files):
    """What compressed files hold, under the names that people know: those of the compressed files.

    **Arguments:** `contents`: what they hold. `names`, `stamps`: of the compressed files.
    """

    def __init__(self, contents: LocalFiles, names: Sequence[str], stamps: Sequence[str]) -> None:
        self.contents = contents
        self._names = list(names)
        self._stamps = list(stamps)

    @property
    def names(self) -> Sequence[str]:
        return self._names

    @property
    def sizes(self) -> Sequence[int]:
        return self.contents.sizes

    @property
    def stamps(self) -> Sequence[str]:
        return self._stamps

    def read(self, ranges: Ranges) -> Sequence[Bytes]:
        return self.contents.read(ranges)

    def prepare(self, ranges: Ranges) -> None:
        self.contents.prepare(ranges)

    def open(self, number: int) -> IO[bytes]:
        return self.contents.open(number)


def inflated(files: Files, *, cache: Path | None = None) -> Inflated:
    """Returns what compressed files hold, in local files; they are decompressed where that was not done before.

    They lie in the cache folder (see `RecordIndex.build`), until the compressed file changes: then they are made anew.
    Of several processes that want one at once, one makes it and the others wait.

    **Arguments:** `files`: compressed with gzip, bzip2 or xz. `cache`: a folder for the contents, instead of that.

    **Raises:** `FormatError` for a file that is damaged, or when there is no room.
    """
    room = Room("inflated", cache)
    targets = [_target(files, number, room.folder) for number in range(len(files.names))]
    paths = [target.path for target in targets]
    room.claim(paths)
    missing = [number for number, target in enumerate(targets) if not (files.stamps[number] and target.has_contents())]
    with Progress("inflating", files.names[0], sum(files.sizes[number] for number in missing)) as work:
        pool = ThreadPoolExecutor(_PARALLEL, thread_name_prefix="braidax-inflate")
        try:
            pending = [pool.submit(_inflate, files, number, targets[number], work) for number in missing]
            for number, done in zip(missing, pending, strict=True):
                done.result()
                room.forget(paths[number].parent, paths[number])  # of an earlier state of the file
                room.made(paths[number].stat().st_size)
        finally:
            work.stop.set()
            pool.shutdown(cancel_futures=True)
    found = Inflated(LocalFiles(paths), files.names, files.stamps)
    weakref.finalize(found, room.release)
    return found


def _target(files: Files, number: int, folder: Path) -> Derived:
    """Returns where the contents of a file lie: in a folder for its name, under a name for its state."""
    name = files.names[number]
    place = name if "://" in name else str(Path(name).absolute())
    state = {"kind": "inflated", "name": place, "size": files.sizes[number], "stamp": files.stamps[number]}
    stem = Path(name.rpartition("/")[2])
    inner = stem.stem if stem.suffix.lower() in SUFFIXES else stem.name
    return Derived(folder / _digest(place) / f"{_digest(f'{state}')}-{inner}", state)


def _digest(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode())


def _xz_pieces(file: IO[bytes], name: str, stored_bytes: int) -> Iterator[bytes]:
    """Yields what the streams of an xz file hold; `lzma.open` has no limit for the memory that a dictionary takes."""
    limit = max_bytes(stored_bytes)
    data = file.read(_COPY_BYTES)
    while data:
        stream = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=limit)
        while not stream.eof:
            if stream.needs_input and not data:
                data = file.read(_COPY_BYTES)
                if not data:
                    raise EOFError("it ends before its end mark")
            try:
                piece = stream.decompress(data, _COPY_BYTES)
            except lzma.LZMAError as error:
                if "limit" in str(error):
                    raise needs_much_memory(name, stored_bytes) from error
                raise
            data = b""
            if piece:
                yield piece
        data = stream.unused_data.lstrip(b"\0")  # zeros may stand behind a stream
        while not data and (more := file.read(_COPY_BYTES)):
            data = more.lstrip(b"\0")


def _zstd_pieces(file: IO[bytes], name: str) -> Iterator[bytes]:
    """Yields what the frames of a zstd file hold; its library takes no more than 128 MiB for a window."""
    pyarrow = import_pyarrow(purpose="reading files compressed with zstd")
    with pyarrow.CompressedInputStream(pyarrow.PythonFile(_StaysOpen(file), mode="r"), "zstd") as stream:
        while True:
            try:
                piece = stream.read(_COPY_BYTES)
            except OSError as error:
                if "too much memory" not in str(error):
                    raise
                raise FormatError(
                    f"{name}: to decompress it takes a window of more than 128 MiB of memory; compress it again, "
                    "without zstd's option --long, or with at most --long=27"
                ) from error
            if not piece:
                return
            yield piece


class _StaysOpen:
    """A file that Arrow reads and does not close, as Python's decompressors do not."""

    closed = False

    def __init__(self, file: IO[bytes]) -> None:
        self.read = file.read

    def close(self) -> None:
        """Does nothing."""


class _Pieces(io.RawIOBase):
    """Pieces of bytes, read one behind the other."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._left = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer).cast("B")
        self._left = self._left or memoryview(next(self._pieces, b""))
        length = min(len(view), len(self._left))
        view[:length] = self._left[:length]
        self._left = self._left[length:]
        return length


def _inflate(files: Files, number: int, target: Derived, work: Progress) -> None:
    name = files.names[number]

    def write(out: IO[bytes]) -> Mapping[str, Any]:
        try:
            file = files.open(number)
        except OSError as error:
            raise FormatError(f"{name}: cannot be opened ({error}); restore it or its permissions") from error
        with file:
            compression = compression_of(_read(file.read, name, "compressed", 6))
            file.seek(0)
            with inflating(file, compression, name=name, stored_bytes=files.sizes[number]) as inner:
                while data := _read(inner.read, name, compression, _COPY_BYTES):
                    if work.stop.is_set():
                        raise InterruptedError
                    refuse_larger(name, out.tell() + len(data), files.sizes[number])
                    out.write(data)
                    work.show(number, file.tell())
        return {}

    try:
        target.contents(write, work, number, is_new=not files.stamps[number])
    except InterruptedError:
        return
    except NotKept as error:
        raise _no_room(target.path, error) from error


def _read(read: Callable[[int], bytes], name: str, compression: str, num_bytes: int) -> bytes:
    try:
        return read(num_bytes)
    except (*_CORRUPT, OSError) as error:
        raise _corrupt(name, compression, error) from error


def _corrupt(name: str, compression: str, error: Exception) -> FormatError:
    return FormatError(f"{name}: {compression} data that are truncated or corrupt ({error}); download it again")


def _no_room(target: Path, error: NotKept) -> FormatError:
    return FormatError(
        f"{target}: the decompressed file cannot be written ({error}); make room there, or set the environment "
        "variable BRAIDAX_CACHE to another folder"
    )
