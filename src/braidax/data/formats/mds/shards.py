"""Compressed shards of MosaicML's MDS format: decompressed once, into the cache folder."""

import bz2
import gzip
import hashlib
import io
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import xxhash

from braidax.data.formats.tables.tables import arrow
from braidax.data.storage.derived import Derived
from braidax.data.storage.files import Files
from braidax.data.storage.limits import refuse_larger
from braidax.data.storage.locks import NotKept
from braidax.data.storage.progress import Progress
from braidax.data.storage.room import Room
from braidax.errors import FormatError, MissingExtra

_CODECS = {"zstd": "zstd", "br": "brotli"}  # the names that Arrow knows them by
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


def decompressed(files: Files, shards: Sequence[Shard], *, cache: Path | None) -> tuple[list[Path], Room]:
    """Makes local files with the shards' contents, checked against the hashes that index.json has.

    Of several processes that want a shard at once, one decompresses it and the others wait. It is used again as long as
    the compressed one has the same size and stamp.

    **Arguments:** `files`: the compressed ones, one a shard. `cache`: a folder for the contents, instead of the cache
    folder, see `RecordIndex.build`.

    **Returns:** the files, and what keeps them from being removed.

    **Raises:** `FormatError` for a shard that is damaged, or a folder that cannot be written; `MissingExtra`.
    """
    room = Room("mds", cache)
    targets = [Derived.named(room.folder, _state(files, number, shard)) for number, shard in enumerate(shards)]
    room.claim([target.path for target in targets])
    missing = [number for number, target in enumerate(targets) if not target.has_contents()]
    num_bytes = sum(shards[number].num_bytes for number in missing)
    with (
        Progress("decompressing", files.names[0], num_bytes) as work,
        ThreadPoolExecutor(_PARALLEL, thread_name_prefix="braidax-decompress") as pool,
    ):

        def decompress(number: int) -> None:
            _decompress(files, number, shards[number], targets[number], work)
            work.show(number, shards[number].num_bytes)
            room.made(shards[number].num_bytes)

        pending = [pool.submit(decompress, number) for number in missing]
        try:
            for done in pending:
                done.result()
        except BaseException:
            work.stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [target.path for target in targets], room


def _state(files: Files, number: int, shard: Shard) -> dict[str, Any]:
    name = files.names[number]
    place = name if "://" in name else str(Path(name).absolute())
    state = {"kind": "mds", "name": place, "size": files.sizes[number], "stamp": files.stamps[number]}
    return state | {"bytes": shard.num_bytes, "hashes": dict(shard.hashes)}


def _decompress(files: Files, number: int, shard: Shard, target: Derived, work: Progress) -> None:
    name = files.names[number]

    def write(out: IO[bytes]) -> Mapping[str, Any]:
        try:
            with files.open(number) as file:
                packed = file.read()
        except OSError as error:
            raise FormatError(f"{name}: cannot be read ({error}); copy it again, or restore its permissions") from error
        refuse_larger(name, shard.num_bytes, len(packed))
        contents = _contents(packed, shard, name)
        if len(contents) != shard.num_bytes:
            raise FormatError(
                f"{name}: holds {'more' if len(contents) > shard.num_bytes else f'{len(contents):,}'} bytes, expected "
                f"{shard.num_bytes:,} as index.json says; copy it again"
            )
        for algorithm, expected in shard.hashes.items():
            found = _digest(algorithm, contents)
            if found not in (None, expected):
                raise FormatError(
                    f"{name}: its contents have the {algorithm} {found}, expected {expected} as index.json says; copy "
                    "it again"
                )
        out.write(contents)
        return {}

    try:
        target.contents(write, work, number, is_new=not files.stamps[number])
    except NotKept as error:
        raise FormatError(
            f"{target.path}: the decompressed shard cannot be written ({error}); make room there, or set the "
            "environment variable BRAIDAX_CACHE to another folder"
        ) from error


def _contents(packed: bytes, shard: Shard, name: str) -> Any:
    """Returns what a shard holds, and at most one byte more than index.json says, so that a bomb stays packed."""
    codec = (shard.compression or "").partition(":")[0] if shard.packed_name else ""
    most = shard.num_bytes + 1
    try:
        match codec:
            case "":
                return packed
            case "gz":
                return gzip.open(io.BytesIO(packed)).read(most)
            case "bz2":
                return bz2.open(io.BytesIO(packed)).read(most)
            case "zstd" | "br":
                with _arrow(codec).CompressedInputStream(io.BytesIO(packed), _CODECS[codec]) as file:
                    return file.read(most)
            case "snappy":
                return _unsnapped(packed, most)
            case _:
                pass
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise FormatError(
            f"{name}: {len(packed):,} bytes that are no whole {codec} data ({error}); copy it again"
        ) from error
    raise FormatError(
        f"{name}: is compressed with {shard.compression!r}; expected br, bz2, gz, snappy or zstd: write the shards anew"
    )


def _unsnapped(packed: bytes, most: int) -> bytes:
    """Returns what Snappy's data hold: of them the length stands first, as a varint, which Arrow takes from us."""
    num_bytes = 0
    for place, byte in enumerate(packed[:5]):
        num_bytes |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return memoryview(_arrow("snappy").decompress(packed, min(num_bytes, most), codec="snappy")).tobytes()
    raise ValueError("they begin with no length")


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
