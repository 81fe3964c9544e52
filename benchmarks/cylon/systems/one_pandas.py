"""pandas in one process, which uses one core of those that it may."""

from pathlib import Path
from typing import Any, final

import pandas as pd

from benchmarks.cylon.systems.system import Files
from benchmarks.cylon.tasks.pandas_api import TASKS
from benchmarks.cylon.tasks.pandas_tpch_first import Ordered


@final
class OnePandas:
    """pandas; from Parquet it reads all columns."""

    def __init__(self) -> None:
        self._files: Files = {}
        self._tables: dict[str, Any] = {}

    def load(self, files: Files, *, memory: bool) -> None:
        self._files = files
        self._tables = _read(files) if memory else {}

    def run(self, task: str, *, scale: float, to_caller: bool) -> Any:
        found = TASKS[task](self._tables or _read(self._files))
        if isinstance(found, Ordered):
            return found.of(found.frame)
        return pd.DataFrame({name: [value] for name, value in found.items()}) if isinstance(found, dict) else found

    def write(self, result: Any, path: Path) -> None:
        result.to_parquet(path, index=False)

    def close(self) -> None:
        self._tables = {}


def opened(*, num_cores: int) -> OnePandas:
    return OnePandas()


def _read(files: Files) -> dict[str, Any]:
    read: Any = pd.read_parquet  # its stubs know no list of files
    return {name: read(list(paths)) for name, paths in files.items()}
