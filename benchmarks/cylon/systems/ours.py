"""Ours: frames on a gang of local processes, of Dask's workers or of Ray's actors."""

import contextlib
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import polars as pl

from benchmarks.cylon.systems.system import Files
from benchmarks.cylon.tasks.verbs import TASKS
from benchmarks.harness.clusters import dask_cluster, ray_cluster
from braidax import frame
from braidax.gang import LocalGang


@final
class Ours:
    """Frames; what stays where it was computed is persisted in the ranks' memory."""

    def __init__(self, num_cores: int, gang: str, ranks: int, transport: str) -> None:
        self._open = contextlib.ExitStack()
        self._environment = {"POLARS_MAX_THREADS": str(num_cores)}  # the others compute while one waits for rows
        self._ranks = ranks
        self._transport = transport
        self._gang = self._open.enter_context(_GANGS[gang](ranks, transport, self._environment))
        self._files: Files = {}
        self._tables: dict[str, Any] = {}

    def load(self, files: Files, *, memory: bool) -> None:
        self._files, self._tables = files, {}
        scanned = {name: frame.scan_parquet(list(paths), gang=self._gang) for name, paths in files.items()}
        self._tables = {name: table.persist() for name, table in scanned.items()} if memory else scanned

    def run(self, task: str, *, scale: float, to_caller: bool) -> Any:
        if task == "start":
            with LocalGang(self._ranks, transport=self._transport, environment=self._environment) as gang:
                scanned = {name: pl.scan_parquet(list(paths)) for name, paths in self._files.items()}
                return frame.collect(TASKS["pipeline"](scanned), gang)
        planned = TASKS[task](self._tables)
        return planned.collect() if to_caller else planned.persist()

    def write(self, result: Any, path: Path) -> None:
        (result if isinstance(result, pl.DataFrame) else result.collect()).write_parquet(path)

    def close(self) -> None:
        self._tables = {}
        self._open.close()


def opened(*, num_cores: int, ranks: int, gang: str = "local", transport: str = "tcp") -> Ours:
    """A gang that has started. **Arguments:** `gang`: "local", "dask" or "ray"."""
    return Ours(num_cores, gang, ranks, transport)


@contextmanager
def _local(ranks: int, transport: str, environment: Mapping[str, str]) -> Generator[Any]:
    with LocalGang(ranks, transport=transport, environment=environment) as gang:
        yield gang


@contextmanager
def _on_dask(ranks: int, transport: str, environment: Mapping[str, str]) -> Generator[Any]:
    from braidax.gang.dask import DaskGang

    os.environ.update(environment)  # a worker has that of this process
    with dask_cluster(ranks) as client, DaskGang(client, ranks, transport=transport) as gang:
        yield gang


@contextmanager
def _on_ray(ranks: int, transport: str, environment: Mapping[str, str]) -> Generator[Any]:
    from braidax.gang.ray import RayGang

    with ray_cluster(ranks), RayGang(ranks, transport=transport, environment=environment) as gang:
        yield gang


_GANGS = {"local": _local, "dask": _on_dask, "ray": _on_ray}
