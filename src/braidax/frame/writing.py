"""Tables of a gang as folders of files, one of each rank: all of them or none."""

import os
import secrets
import shutil
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, NamedTuple

from braidax.comm import Communicator
from braidax.errors import ArgumentError
from braidax.frame.collecting import Partition, begun, partitions
from braidax.frame.plan.nodes import read_bytes
from braidax.frame.plan.pushdown import pushed_down
from braidax.frame.polars import pl
from braidax.frame.sight.telling import Watcher, metered
from braidax.frame.spilling.memory import Memory
from braidax.frame.spilling.writing import write_stream

Format = Literal["arrow", "parquet"]


@contextmanager
def new_folder(folder: str | os.PathLike[str]) -> Generator[Path]:
    """Yields a folder to write into, which then gets its name; what fails leaves nothing.

    **Arguments:** `folder`: on a disk that all ranks and this process share; it must not be there.

    **Raises:** `ArgumentError` for a path that is taken, or where no folder can be made.
    """
    path = Path(folder).absolute()
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}.unfinished")
    if path.exists() or path.is_symlink():
        raise ArgumentError(f"folder={str(folder)!r}: is there already, and would be overwritten; give another path")
    try:
        unfinished.mkdir(parents=True)
    except OSError as error:
        raise ArgumentError(
            f"folder={str(folder)!r}: cannot be made ({error}); expected a path on a disk that all ranks share"
        ) from error
    try:
        yield unfinished
        unfinished.rename(path)
    except BaseException:
        _remove(unfinished)
        raise


def _remove(folder: Path) -> None:
    """Removes a folder into which ranks may still begin to write: under another name they do not find it."""
    removed = folder.with_suffix(".removed")
    with suppress(OSError):  # it is gone
        folder.rename(removed)
    for one in (removed, folder):
        shutil.rmtree(one, ignore_errors=True)


class Written(NamedTuple):
    """A file that a rank has written."""

    name: str
    num_rows: int
    num_bytes: int


def check_written(folder: Path, files: Sequence[Written]) -> list[int]:
    """Returns the rows of each file. **Raises:** `ArgumentError` for one that is not to be seen from here."""
    for rank, file in enumerate(files):
        path = folder / file.name
        if not path.is_file() or path.stat().st_size != file.num_bytes:
            raise ArgumentError(
                f"folder: rank {rank} has written {file.num_bytes:,} bytes, which are not to be seen from here; "
                "expected a path on a disk that all ranks and this process share"
            )
    return [file.num_rows for file in files]


def write_part(comm: Communicator, part: Partition, folder: str, format: Format) -> Written:
    """Writes what this rank has of a table into a folder.

    **Arguments:** `format`: `arrow`, without compression, which a loader reads by row; or `parquet`.

    **Returns:** what it wrote. **Raises:** `OSError` for a disk that is full.
    """
    name = f"part-{comm.rank:05d}.{format}"
    with (Path(folder) / name).open("xb") as file:
        if format == "arrow":
            part.frame.write_ipc(file, compat_level=pl.CompatLevel.oldest())
        else:
            part.frame.write_parquet(file)
        file.flush()
        os.fsync(file.fileno())
        return Written(name, part.frame.height, file.tell())


def write_bounded(
    comm: Communicator,
    plan: bytes,
    folder: str,
    format: Format,
    memory: Memory,
    watcher: Watcher | None,
    kept: "Mapping[str, Partition]",
    parts: "Mapping[str, pl.DataFrame]",
) -> Written:
    """Computes a plan together with all other ranks, and writes what this one has of the result as it comes.

    **Arguments:** `plan`, `memory`, `watcher`, `kept`, `parts`: as `braidax.frame.collecting.run` gives them. Others:
    as of `write_part`.
    """
    name = f"part-{comm.rank:05d}.{format}"
    with (
        metered(watcher, comm.rank) as meter,
        begun(pushed_down(read_bytes(plan)), partitions(kept, parts), comm, memory, meter=meter) as (spilling, table),
        (Path(folder) / name).open("xb") as file,
    ):
        num_rows = write_stream(spilling, table, file, format)
        os.fsync(file.fileno())
        return Written(name, num_rows, os.fstat(file.fileno()).st_size)
