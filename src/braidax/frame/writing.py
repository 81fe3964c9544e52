"""Tables of a gang as folders of files, one of each rank: all of them or none."""

import os
import secrets
import shutil
from pathlib import Path
from typing import Literal

from braidax.comm import Communicator
from braidax.errors import ArgumentError
from braidax.frame.collecting import Partition
from braidax.frame.polars import pl
from braidax.gang import Gang
from braidax.gang.keeping.kept import Kept

Format = Literal["arrow", "parquet"]


def write(gang: Gang, table: Kept, folder: str | os.PathLike[str], format: Format) -> list[int]:
    """Writes what ranks keep of a table into a new folder, which is there when all of it is.

    **Arguments:** `folder`: on a disk that all ranks and this process share; it must not be there. `format`: `arrow`
    without compression, which a loader reads by row, or `parquet`.

    **Returns:** the rows of each file. **Raises:** `ArgumentError` for a path that is taken, or a format that is not
    known; `CallFailed` naming the rank whose disk is full.
    """
    path = Path(folder).absolute()
    if format not in ("arrow", "parquet"):
        raise ArgumentError(f"{format=}: expected 'arrow' or 'parquet'")
    if path.exists() or path.is_symlink():
        raise ArgumentError(f"folder={str(folder)!r}: is there already, and would be overwritten; give another path")
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}.unfinished")
    unfinished.mkdir(parents=True)
    try:
        num_rows = gang.run(_write, table, str(unfinished), format)
        unfinished.rename(path)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return num_rows


def _write(comm: Communicator, part: Partition, folder: str, format: Format) -> int:
    path = Path(folder) / f"part-{comm.rank:05d}.{format}"
    with path.open("xb") as file:
        if format == "arrow":
            part.frame.write_ipc(file, compat_level=pl.CompatLevel.oldest())
        else:
            part.frame.write_parquet(file)
        file.flush()
        os.fsync(file.fileno())
    return part.frame.height
