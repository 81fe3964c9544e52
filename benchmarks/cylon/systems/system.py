"""What a system has to do, and how it says that it cannot."""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

Files = Mapping[str, Sequence[str]]


class UnsupportedError(Exception):
    """The system has no way to do a task; the message says why."""


class System(Protocol):
    """One system in a process of its own."""

    def load(self, files: Files, *, memory: bool) -> None:
        """Takes tables instead of those that it had.

        **Arguments:** `files`: by table. `memory`: whether tasks find them in memory, or read them from Parquet.
        """

    def run(self, task: str, *, scale: float, to_caller: bool) -> Any:
        """Does a task to its end.

        **Arguments:** `task`: its name. `scale`: the factor of TPC-H. `to_caller`: whether the result comes to this
        process, or may stay in the memory of whoever has computed it.
        """

    def write(self, result: Any, path: Path) -> None:
        """Writes what `run` has returned as one Parquet file, in the order of its rows."""

    def close(self) -> None:
        """Ends what it has started."""


MODULES: Mapping[str, str] = {
    "ours": "ours",
    "polars": "one_polars",
    "duckdb": "one_duckdb",
    "pandas": "one_pandas",
    "dask": "dask_frames",
    "ray": "ray_data",
    "daft": "daft_frames",
    "sail": "sail",
}
"""By kind of system the module of this folder that opens it."""


def opened(kind: str, options: Mapping[str, Any], num_cores: int) -> System:
    """Starts a system. **Raises:** `ImportError` if what it needs is not installed."""
    module = importlib.import_module(f"benchmarks.cylon.systems.{MODULES[kind]}")
    return module.opened(num_cores=num_cores, **options)


def write_arrow(table: Any, path: Path) -> None:
    """Writes a table of pyarrow."""
    importlib.import_module("pyarrow.parquet").write_table(table, path)
