"""Compressed shards of MosaicML's MDS format: decompressed once, into the cache folder."""

import bz2
import contextlib
import gzip
import hashlib
import os
import tempfile
import zlib
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from braidax.data.formats.tables.tables import arrow
from braidax.data.storage.derived import cache_folder
from braidax.data.storage.files import Files
from braidax.data.storage.progress import Progress
from braidax.errors import FormatError, MissingExtra

_CODECS = {"zstd": "zstd", "br": "brotli", "snappy": "snappy"}  # the names that Arrow knows them by
_PARALLEL = 4  # shards that are decompressed at a time; each is in memory as a whole


@dataclass(frozen=True)
class Shard:
    """What index.json says about a shard: its samples, its file, and the compressed one if there is one."""

    name: str
    num_samples: int
    num_bytes: int
    compression: str | None = None
    packed_name: str | None = None
    hashes: Mapping[str, str] = field(default_factory=dict[str, str])


def decompressed(files: Files, shards: Sequence[Shard], *, cache: Path | None) -> list[Path]:
    """Returns local files with the shards' contents, checked against the hashes that index.json has.

    A file appears under its name when it is complete, so several processes may do this at once. It is used again as
    long as the compressed one has the same size and stamp.

    **Arguments:** `files`: the compressed ones, one a shard. `cache`: a folder for the contents; by default `mds` in
    the cache folder, see `RecordIndex.build`.

    **Raises:** `FormatError` for a shard that is damaged, or a folder that cannot be written; `MissingExtra`.
    """
    folder = cache or cache_folder() / "mds"
    targets = [folder / _state(files, number) / shard.name for number, shard in enumerate(shards)]
    missing = [number for number, target in enumerate(targets) if not _is_there(target, shards[number])]
    if not missing:
        return targets
    num_bytes = sum(shards[number].num_bytes for number in missing)
    with (
        Progress("decompressing", files.names[0], num_bytes) as progress,
        ThreadPoolExecutor(_PARALLEL, thread_name_prefix="braidax-decompress") as pool,
    ):

        def decompress(number: int) -> None:
            _decompress(files, number, shards[number], targets[number])
            progress.show(number, shards[number].num_bytes)

        pending = [pool.submit(decompress, number) for number in missing]
        try:
            for done in pending:
                done.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return targets


def _state(files: Files, number: int) -> str:
    state = "\0".join((files.names[number], str(files.sizes[number]), files.stamps[number]))
    return xxhash.xxh3_128_hexdigest(state.encode())


def _is_there(target: Path, shard: Shard) -> bool:
    try:
        return target.stat().st_size == shard.num_bytes
    except OSError:
        return False


def _decompress(files: Files, number: int, shard: Shard, target: Path) -> None:
    name = files.names[number]
    with files.open(number) as file:
        packed = file.read()
    contents = _contents(packed, shard, name)
    if len(contents) != shard.num_bytes:
        raise FormatError(
            f"{name}: holds {len(contents):,} bytes, expected {shard.num_bytes:,} as index.json says; copy it again"
        )
    for algorithm, expected in shard.hashes.items():
        found = _digest(algorithm, contents)
        if found not in (None, expected):
            raise FormatError(
                f"{name}: its contents have the {algorithm} {found}, expected {expected} as index.json says; copy it "
                "again"
            )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, part = tempfile.mkstemp(prefix=target.name, suffix=".part", dir=target.parent)
        with _removed(Path(part)), os.fdopen(descriptor, "wb") as out:
            out.write(contents)
            out.flush()
            os.fsync(descriptor)
            Path(part).replace(target)
    except OSError as error:
        raise FormatError(
            f"{target}: the decompressed shard cannot be written ({error}); make room there, or set the environment "
            "variable BRAIDAX_CACHE to another folder"
        ) from error


@contextlib.contextmanager
def _removed(part: Path) -> Generator[None]:
    try:
        yield
    finally:
        part.unlink(missing_ok=True)


def _contents(packed: bytes, shard: Shard, name: str) -> Any:
    codec = (shard.compression or "").partition(":")[0] if shard.packed_name else ""
    try:
        match codec:
            case "":
                return packed
            case "gz":
                return gzip.decompress(packed)
            case "bz2":
                return bz2.decompress(packed)
            case "zstd" | "br" | "snappy":
                return memoryview(_arrow(codec).decompress(packed, shard.num_bytes, codec=_CODECS[codec]))
            case _:
                pass
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise FormatError(
            f"{name}: {len(packed):,} bytes that are no whole {codec} data ({error}); copy it again"
        ) from error
    raise FormatError(
        f"{name}: is compressed with {shard.compression!r}; expected br, bz2, gz, snappy or zstd: write the shards anew"
    )


def _arrow(codec: str) -> Any:
    try:
        return arrow()
    except MissingExtra as error:
        raise MissingExtra(
            f'shards compressed with {codec} need pyarrow; install it with: pip install "braidax[arrow]"'
        ) from error


def _digest(algorithm: str, contents: Any) -> str | None:
    if algorithm in hashlib.algorithms_available:
        return hashlib.new(algorithm, contents, usedforsecurity=False).hexdigest()
    if algorithm in xxhash.algorithms_available:
        return getattr(xxhash, f"{algorithm}_hexdigest")(contents)
    return None
