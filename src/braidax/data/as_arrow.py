"""Tables that are slow at random, converted once to Arrow without compression, which is gathered as it lies."""

import os
import tempfile
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from braidax.data.formats.tables.arrow import open_arrow
from braidax.data.formats.tables.blocks import Blocks, BlockSource
from braidax.data.formats.tables.tables import arrow, arrow_ipc, plain_table
from braidax.data.open import open as open_source
from braidax.data.source import Source
from braidax.data.storage.derived import cache_folder
from braidax.data.storage.progress import Progress
from braidax.errors import FormatError

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

    **Raises:** what `braidax.open` raises; `FormatError` where there is no room.
    """
    options: dict[str, Any] = {"split": split, "columns": columns}
    given = {name: value for name, value in options.items() if value is not None}
    source = open_source(where, cache_bytes=1 << 62, **given)  # nothing is kept of what is decoded here
    if not isinstance(source, BlockSource):
        return source
    table = source.table
    target = _target(table, Path(cache) if cache is not None else cache_folder() / "arrow")
    if not (all(table.stamps) and target.exists()):  # nothing tells whether a file without a stamp changed
        _write(table, target)
    return open_arrow(target)


def _target(table: Blocks, folder: Path) -> Path:
    """Returns where the copy lies: a folder for the names of files and leaves, in it a name for the files' states."""
    names = [name if "://" in name else str(Path(name).absolute()) for name in table.names]
    what = _digest([*names, "", *(leaf.name for leaf in table.leaves)])
    states = [f"{size} {stamp}" for size, stamp in zip(table.sizes, table.stamps, strict=True)]
    return folder / what / f"{_digest(states)}.arrow"


def _digest(texts: Sequence[str]) -> str:
    return xxhash.xxh3_64_hexdigest("\0".join(texts).encode())


def _write(table: Blocks, target: Path) -> None:
    """Writes the copy under another name, and gives it its own when it is whole and durable."""
    part = ""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, part = tempfile.mkstemp(prefix=".", suffix=".part", dir=target.parent)
        with os.fdopen(descriptor, "wb") as file:
            _write_blocks(table, file)
            file.flush()
            os.fsync(file.fileno())
        Path(part).replace(target)
        for other in target.parent.iterdir():  # of an earlier state of the files; whoever has it mapped keeps it
            if other != target and other.suffix != ".part":
                other.unlink(missing_ok=True)
    except OSError as error:
        raise FormatError(
            f"{target}: cannot be written ({error}); make room there, or give another folder with cache="
        ) from error
    finally:
        if part:
            Path(part).unlink(missing_ok=True)


def _write_blocks(table: Blocks, file: Any) -> None:
    """Decodes the blocks, several at a time, and writes them in their order."""
    num_blocks, name = len(table.blocks), table.names[0]
    pool = ThreadPoolExecutor(_PARALLEL, thread_name_prefix="braidax-convert")
    writer: Any = None
    try:
        with Progress("conversion to Arrow of", name, sum(block.num_bytes for block in table.blocks)) as progress:
            pending = deque(pool.submit(table.load, index) for index in range(min(_PARALLEL, num_blocks)))
            for index in range(num_blocks):
                found = plain_table(pending.popleft().result())
                if index + _PARALLEL < num_blocks:
                    pending.append(pool.submit(table.load, index + _PARALLEL))
                writer = writer or arrow_ipc().new_file(file, found.schema)
                writer.write_table(found, max_chunksize=_BATCH_ROWS)
                progress.show(index, table.blocks[index].num_bytes)
    except arrow().ArrowException as error:
        raise FormatError(f"{name}: cannot be converted to Arrow ({error}); leave columns out with columns=") from error
    finally:
        pool.shutdown(cancel_futures=True)
    writer.close()
