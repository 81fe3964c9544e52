"""Polars in one process, by either of its ways to execute a plan."""

from pathlib import Path
from typing import Any, final

import polars as pl

from benchmarks.cylon.systems.system import Files
from benchmarks.cylon.tasks.verbs import TASKS


@final
class OnePolars:
    """Polars. **Arguments:** `mode`: "in-memory" or "streaming"."""

    def __init__(self, mode: Any) -> None:
        self._mode = mode
        self._tables: dict[str, pl.LazyFrame] = {}

    def load(self, files: Files, *, memory: bool) -> None:
        self._tables = {}
        scanned = {name: pl.scan_parquet(list(paths)) for name, paths in files.items()}
        self._tables = {name: table.collect().lazy() for name, table in scanned.items()} if memory else scanned

    def run(self, task: str, *, scale: float, to_caller: bool) -> pl.DataFrame:
        return TASKS[task](self._tables).collect(engine=self._mode)

    def write(self, result: pl.DataFrame, path: Path) -> None:
        result.write_parquet(path)

    def close(self) -> None:
        self._tables = {}


def opened(*, num_cores: int, mode: str) -> OnePolars:
    """Polars with as many threads; they are what POLARS_MAX_THREADS says, which must be set before."""
    if pl.thread_pool_size() != num_cores:
        raise RuntimeError(f"Polars has {pl.thread_pool_size()} threads: expected {num_cores}")
    return OnePolars(mode)
