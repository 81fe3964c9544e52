"""Compressed files, which cannot be read at random: decompressed once, into the cache folder."""

import bz2
import gzip
import lzma
import os
import tempfile
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from io import BufferedIOBase
from pathlib import Path
from typing import IO, Any

import xxhash

from braidax.data.storage.derived import cache_folder
from braidax.data.storage.files import Files
from braidax.data.storage.local import LocalFiles
from braidax.data.storage.progress import Progress
from braidax.errors import FormatError

_MAGICS = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_OPENERS: dict[str, Callable[[IO[bytes]], Any]] = {"gzip": gzip.open, "bzip2": bz2.open, "xz": lzma.open}
SUFFIXES = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd"}
_CORRUPT = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)
_PARALLEL = 4
_COPY_BYTES = 1 << 20


def compression_of(head: bytes) -> str:
    """Returns how a file is compressed, by its first bytes: `"gzip"`, `"bzip2"`, `"xz"`, `"zstd"`, or `""`."""
    return next((name for magic, name in _MAGICS.items() if head.startswith(magic)), "")


def inflated_head(file: IO[bytes], compression: str, num_bytes: int, *, name: str) -> bytes:
    """Returns the first bytes of what a compressed file holds.

    **Raises:** `FormatError` for data that are damaged, or compressed in a way that is not known here.
    """
    with _opened(file, compression, name) as inner:
        try:
            return inner.read(num_bytes)
        except (*_CORRUPT, OSError) as error:
            raise _corrupt(name, compression, error) from error


def inflated(files: Files, *, cache: Path | None = None) -> LocalFiles:
    """Returns what compressed files hold, as local files; they are decompressed where that was not done before.

    They lie in the cache folder (see `RecordIndex.build`) below `inflated`, until the compressed file changes: then
    they are made anew in their place. A file appears under its name when it is complete.

    **Arguments:** `files`: compressed with gzip, bzip2 or xz. `cache`: a folder for the contents, instead of that.

    **Raises:** `FormatError` for a file that is damaged, or when there is no room.
    """
    folder = cache_folder() / "inflated" if cache is None else cache
    targets = [_target(files, number, folder) for number in range(len(files.names))]
    missing = [
        number for number, target in enumerate(targets) if not (files.stamps[number] and target.exists())
    ]  # nothing tells whether a file without a stamp changed
    with Progress("inflating", files.names[0], sum(files.sizes[number] for number in missing)) as progress:
        pool = ThreadPoolExecutor(_PARALLEL, thread_name_prefix="braidax-inflate")
        try:
            for future in [pool.submit(_inflate, files, number, targets[number], progress) for number in missing]:
                future.result()
        finally:
            progress.stop.set()
            pool.shutdown(cancel_futures=True)
    return LocalFiles(targets)


def _target(files: Files, number: int, folder: Path) -> Path:
    """Returns where the contents of a file lie: a folder for its name, in it a name for its state."""
    name = files.names[number]
    place = name if "://" in name else str(Path(name).absolute())
    state = f"{files.sizes[number]}\0{files.stamps[number]}"
    stem = Path(name.rpartition("/")[2])
    inner = stem.stem if stem.suffix.lower() in SUFFIXES else stem.name
    return folder / _digest(place) / f"{_digest(state)}-{inner}"


def _digest(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode())


def _opened(file: IO[bytes], compression: str, name: str) -> BufferedIOBase:
    if compression not in _OPENERS:
        raise FormatError(
            f"{name}: is compressed with {compression or 'nothing that is known'}, which cannot be read at random; "
            "decompress it, or compress it with gzip, bzip2 or xz: these are decompressed into the cache folder once"
        )
    return _OPENERS[compression](file)


def _inflate(files: Files, number: int, target: Path, progress: Progress) -> None:
    name = files.names[number]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, part = tempfile.mkstemp(prefix=".", suffix=".part", dir=target.parent)
    except OSError as error:
        raise _no_room(target, error) from error
    try:
        with os.fdopen(descriptor, "wb") as out, files.open(number) as file:
            compression = compression_of(file.read(6))
            file.seek(0)
            with _opened(file, compression, name) as inner:
                while data := _read(inner, name, compression):
                    if progress.stop.is_set():
                        return
                    try:
                        out.write(data)
                    except OSError as error:
                        raise _no_room(target, error) from error
                    progress.show(number, file.tell())
            out.flush()
            os.fsync(out.fileno())
        Path(part).replace(target)
        for other in target.parent.iterdir():  # of an earlier state of the file; whoever has it open keeps it
            if other != target and other.suffix != ".part":
                other.unlink(missing_ok=True)
    finally:
        Path(part).unlink(missing_ok=True)


def _read(inner: BufferedIOBase, name: str, compression: str) -> bytes:
    try:
        return inner.read(_COPY_BYTES)
    except (*_CORRUPT, OSError) as error:
        raise _corrupt(name, compression, error) from error


def _corrupt(name: str, compression: str, error: Exception) -> FormatError:
    return FormatError(f"{name}: {compression} data that are truncated or corrupt ({error}); download it again")


def _no_room(target: Path, error: OSError) -> FormatError:
    return FormatError(
        f"{target}: the decompressed file cannot be written ({error}); make room there, or set the environment "
        "variable BRAIDAX_CACHE to another folder"
    )
