"""Tables that are slow at random, converted once to Arrow without compression, which is gathered as it lies."""

import os
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import xxhash

from braidax.data.formats.tables.arrow import open_arrow
from braidax.data.formats.tables.blocks import Blocks, BlockSource
from braidax.data.formats.tables.partitions import Partitioned
from braidax.data.formats.tables.tables import arrow, arrow_ipc, plain_table
from braidax.data.open import is_place, recognized
from braidax.data.open import open as open_source
from braidax.data.registry import FILES, FOLDERS
from braidax.data.source import Source
from braidax.data.storage.derived import Derived
from braidax.data.storage.locks import NotKept
from braidax.data.storage.progress import Progress
from braidax.data.storage.room import Room
from braidax.errors import ArgumentError, FormatError

_PARALLEL = 4  # blocks that are decoded at a time
_BATCH_ROWS = 1 << 16


def as_arrow(
    where: str | os.PathLike[str] | Sequence[str],
    *,
    split: str | None = None,
    columns: Sequence[str] | None = None,
    cache: str | os.PathLike[str] | None = None,
) -> Source:
    """Opens a table of Parquet or compressed Arrow files through a copy in Arrow without compression, made once.

    A global shuffle of a Parquet table that does not fit into memory decodes a whole row group for each record or
    window; the copy is memory-mapped, and a record costs what its own bytes cost. It lies in the cache folder
    (`$BRAIDAX_CACHE`, or else `~/.cache/braidax`) and is made anew when the files have changed. Making it shows a
    progress bar; it takes about as much disk as the decoded table takes memory.

    **Arguments:** `where`, `split`, `columns`: as `braidax.open` takes them. `cache`: a folder for the copy, instead of
    that one.

    **Returns:** the source; the table itself where its files need no copy.

    **Raises:** what `braidax.open` raises; `ArgumentError` for what is no table of Parquet or Arrow files;
    `FormatError` where there is no room.
    """
    _check_table(where)
    options: dict[str, Any] = {"split": split, "columns": columns}
    given = {name: value for name, value in options.items() if value is not None}
    source = open_source(where, cache_bytes=1 << 62, **given)  # nothing is kept of what is decoded here
    blocks = source.source if isinstance(source, Partitioned) else source
    if not isinstance(blocks, BlockSource):
        return source
    table = blocks.table
    room = Room("arrow", Path(cache) if cache is not None else None)
    target = _target(table, room.folder)
    room.claim([target.path])

    def write(file: IO[bytes]) -> Mapping[str, Any]:
        _write_blocks(table, file, work)
        return {}

    try:
        num_bytes = sum(block.num_bytes for block in table.blocks)
        with Progress("conversion to Arrow of", table.names[0], num_bytes) as work:
            target.contents(write, work, is_new=not all(table.stamps))
    except NotKept as error:
        raise FormatError(
            f"{target.path}: the copy in Arrow cannot be written ({error}); make room there, give another folder with "
            "cache=, or set the environment variable BRAIDAX_CACHE to one"
        ) from error
    room.forget(target.path.parent, target.path)  # of an earlier state of the files
    room.made(target.path.stat().st_size)
    found = open_arrow(target.path, columns=[leaf.name for leaf in table.leaves])
    weakref.finalize(found, room.release)
    return replace(source, source=found) if isinstance(source, Partitioned) else found


def _check_table(where: Any) -> None:
    """Raises `ArgumentError` for what is no table that can be copied."""
    known = recognized(where, None)[0] if is_place(where) else None
    if known is None or "cache_bytes" not in known.options:
        takes = ", ".join(one.name for one in (*FILES, *FOLDERS) if "cache_bytes" in one.options)
        what = f"{str(where)!r} was recognized as {known.name!r}" if known else f"a {type(where).__name__}"
        raise ArgumentError(
            f"where: {what}, of which as_arrow makes no copy; the formats it takes are: {takes}: open it with "
            "braidax.open"
        )


def _target(table: Blocks, folder: Path) -> Derived:
    """Returns where the copy lies: in a folder for the names of files and leaves, under a name for their states."""
    names = [name if "://" in name else str(Path(name).absolute()) for name in table.names]
    leaves = [leaf.name for leaf in table.leaves]
    about = {"kind": "arrow", "files": names, "leaves": leaves, "sizes": list(table.sizes), "stamps": [*table.stamps]}
    return Derived.named(folder / _digest([*names, "", *leaves]), about)


def _digest(texts: Sequence[str]) -> str:
    return xxhash.xxh3_64_hexdigest("\0".join(texts).encode())


def _write_blocks(table: Blocks, file: IO[bytes], work: Progress) -> None:
    """Decodes the blocks, several at a time, and writes them in their order."""
    num_blocks, name = len(table.blocks), table.names[0]
    pool = ThreadPoolExecutor(_PARALLEL, thread_name_prefix="braidax-convert")
    writer: Any = None
    try:
        pending = deque(pool.submit(table.load, index) for index in range(min(_PARALLEL, num_blocks)))
        for index in range(num_blocks):
            found = plain_table(pending.popleft().result())
            if index + _PARALLEL < num_blocks:
                pending.append(pool.submit(table.load, index + _PARALLEL))
            writer = writer or arrow_ipc().new_file(file, found.schema)
            writer.write_table(found, max_chunksize=_BATCH_ROWS)
            work.show(index, table.blocks[index].num_bytes)
    except arrow().ArrowException as error:
        raise FormatError(f"{name}: cannot be converted to Arrow ({error}); leave columns out with columns=") from error
    finally:
        pool.shutdown(cancel_futures=True)
    writer.close()
