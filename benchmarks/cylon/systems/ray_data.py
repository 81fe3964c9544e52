"""Ray Data on a Ray of this machine: the paper's operations. It has no plan of several joins, and no SQL."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, final

import pyarrow as pa
import pyarrow.compute
import ray

from benchmarks.cylon.systems.system import Files, UnsupportedError, write_arrow

compute: Any = pyarrow.compute
Tables = Mapping[str, Any]


@final
class RayData:
    """Datasets; results are materialized in Ray's object store. **Arguments:** `num_partitions`: of a join."""

    def __init__(self, num_partitions: int) -> None:
        self._num_partitions = num_partitions
        self._tables: dict[str, Any] = {}
        self._tasks: Mapping[str, Callable[[Tables], Any]] = {
            "join": self._join,
            "groupby": self._group_by,
            "sort": lambda tables: tables["left"].sort("k"),
            "pipeline": self._pipeline,
        }

    def load(self, files: Files, *, memory: bool) -> None:
        self._tables = {}
        read = {name: ray.data.read_parquet(list(paths)) for name, paths in files.items()}
        self._tables = {name: table.materialize() for name, table in read.items()} if memory else read

    def run(self, task: str, *, scale: float, to_caller: bool) -> Any:
        if task not in self._tasks:
            raise UnsupportedError("Ray Data has neither SQL nor all of the operations")
        return self._tasks[task](self._tables).materialize()

    def write(self, result: Any, path: Path) -> None:
        blocks = [block for block in ray.get(result.to_arrow_refs()) if block.num_rows]
        write_arrow(pa.concat_tables(blocks), path)

    def close(self) -> None:
        self._tables = {}
        ray.shutdown()

    def _join(self, tables: Tables) -> Any:
        return tables["left"].join(tables["right"], join_type="inner", num_partitions=self._num_partitions, on=("k",))

    def _group_by(self, tables: Tables) -> Any:
        return _summed(tables["left"].repartition(self._num_partitions, keys=["k"]))

    def _pipeline(self, tables: Tables) -> Any:
        summed = _summed(self._join(tables)).sort("k")  # a join leaves all rows of a key in one block
        return summed.map_batches(_with_scalar, batch_format="pyarrow")


def _summed(dataset: Any) -> Any:
    """Sums by key in each block: `groupby(...).sum` takes a step of Python for each key, 26 s for 60,000 of them."""
    return dataset.map_batches(_sums, batch_size=None, batch_format="pyarrow")


def _sums(block: Any) -> Any:
    names = [name for name in block.column_names if name != "k"]
    if not block.num_rows:
        return block
    found = block.group_by("k").aggregate([(name, "sum") for name in names])
    return pa.table({"k": found["k"], **{name: found[f"{name}_sum"] for name in names}})


def _with_scalar(batch: Any) -> Any:
    return pa.table({"k": batch["k"], **{name: compute.add(batch[name], 1) for name in ("a", "b")}})


def opened(*, num_cores: int) -> RayData:
    ray.init(num_cpus=num_cores, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.target_max_block_size = 1 << 40  # a partition stays one block, so that it has all rows of its keys
    return RayData(num_partitions=2 * num_cores)
