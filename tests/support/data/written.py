"""A table that writes itself."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl

ROWS = 40


class Table:
    """Writes numbers into two files, and counts how often it was asked to."""

    def __init__(self, frame: pl.DataFrame | None = None, error: BaseException | None = None) -> None:
        self.frame = pl.DataFrame({"x": np.arange(ROWS)}) if frame is None else frame
        self.error = error
        self.num_writes = 0

    def sink_arrow(self, folder: str | os.PathLike[str]) -> Sequence[int]:
        self.num_writes += 1
        Path(folder).mkdir()
        parts = [self.frame[: ROWS // 4], self.frame[ROWS // 4 :]]
        for number, part in enumerate(parts):
            part.write_ipc(Path(folder) / f"part-{number}.arrow", compat_level=pl.CompatLevel.oldest())
        if self.error is not None:
            raise self.error
        return [part.height for part in parts]
