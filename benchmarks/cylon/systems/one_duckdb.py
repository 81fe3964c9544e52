"""DuckDB in one process."""

from pathlib import Path
from typing import Any, final

import duckdb

from benchmarks.cylon.systems.system import Files, write_arrow
from benchmarks.cylon.tasks.sql import NAMES, text_of


@final
class OneDuckdb:
    """DuckDB; results are Arrow tables."""

    def __init__(self, num_cores: int) -> None:
        self._connection = duckdb.connect(config={"threads": num_cores})

    def load(self, files: Files, *, memory: bool) -> None:
        for name, paths in files.items():
            called, kind = NAMES.get(name, name), "table" if memory else "view"
            for old in ("table", "view"):
                if self._is(called, old):
                    self._connection.execute(f"drop {old} {called}")
            self._connection.execute(f"create {kind} {called} as select * from read_parquet({list(paths)!r})")

    def run(self, task: str, *, scale: float, to_caller: bool) -> Any:
        return self._connection.sql(text_of(task, scale)).to_arrow_table()

    def write(self, result: Any, path: Path) -> None:
        write_arrow(result, path)

    def close(self) -> None:
        self._connection.close()

    def _is(self, name: str, kind: str) -> bool:
        kinds = {"table": "BASE TABLE", "view": "VIEW"}
        asked = "select count(*) from information_schema.tables where table_name = ? and table_type = ?"
        found = self._connection.execute(asked, [name, kinds[kind]]).fetchone()
        return bool(found and found[0])


def opened(*, num_cores: int) -> OneDuckdb:
    return OneDuckdb(num_cores)
