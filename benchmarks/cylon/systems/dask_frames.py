"""Dask's frames on a cluster of this machine, one thread a worker."""

import tempfile
from pathlib import Path
from typing import Any, final

import dask as _dask
import dask.dataframe as dd
import distributed as _distributed
import pandas as pd

from benchmarks.cylon.systems.system import Files, UnsupportedError
from benchmarks.cylon.tasks.pandas_api import TASKS
from benchmarks.cylon.tasks.pandas_tpch_first import Ordered

dask: Any = _dask
distributed: Any = _distributed
_UNSUPPORTED = {"g6": "its group-by with std and median at once", "g8": "`head` of each group"}


@final
class DaskFrames:
    """A partition a file; results stay in the workers' memory unless the caller wants them."""

    def __init__(self, num_workers: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        settings = {
            "distributed.scheduler.worker-ttl": None,  # between its turns the whole cluster rests
            "distributed.logging.distributed": "error",
            "temporary-directory": self._folder.name,
        }
        dask.config.set(settings)
        self._cluster = distributed.LocalCluster(
            n_workers=num_workers, threads_per_worker=1, processes=True, memory_limit=0, dashboard_address=None
        )
        self._client = distributed.Client(self._cluster)
        self._tables: dict[str, Any] = {}

    def load(self, files: Files, *, memory: bool) -> None:
        self._tables = {}
        read = {name: dd.read_parquet(list(paths), dtype_backend="pyarrow") for name, paths in files.items()}
        if memory:
            read = {name: table.persist() for name, table in read.items()}
            distributed.wait(list(read.values()))
        self._tables = read

    def run(self, task: str, *, scale: float, to_caller: bool) -> Any:
        if task in _UNSUPPORTED:
            raise UnsupportedError(f"Dask has no {_UNSUPPORTED[task]}")
        found = TASKS[task](self._tables)
        if isinstance(found, Ordered):
            return found.of(found.frame.compute())
        if isinstance(found, dict):
            (values,) = dask.compute(found)
            return pd.DataFrame({name: [value] for name, value in values.items()})
        if to_caller:
            return found.compute()
        kept = found.persist()
        distributed.wait(kept)
        return kept

    def write(self, result: Any, path: Path) -> None:
        frame = result if isinstance(result, pd.DataFrame) else result.compute()
        frame.to_parquet(path, index=False)

    def close(self) -> None:
        self._tables = {}
        self._client.close()
        self._cluster.close()
        self._folder.cleanup()


def opened(*, num_cores: int) -> DaskFrames:
    return DaskFrames(num_cores)
