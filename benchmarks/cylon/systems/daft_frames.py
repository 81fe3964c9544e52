"""Daft, in one process or on Ray: the paper's operations by its frames, questions and TPC-H by its SQL."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, final

import daft

from benchmarks.cylon.systems.system import Files, UnsupportedError, write_arrow
from benchmarks.cylon.tasks.sql import text_of

_PAPER: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "join": lambda tables: tables["left"].join(tables["right"], on="k"),
    "groupby": lambda tables: tables["left"].groupby("k").agg(daft.col("a").sum()),
    "sort": lambda tables: tables["left"].sort("k"),
    "pipeline": lambda tables: (
        tables["left"]
        .join(tables["right"], on="k")
        .groupby("k")
        .agg(daft.col("a").sum(), daft.col("b").sum())
        .sort("k")
        .select("k", daft.col("a") + 1, daft.col("b") + 1)
    ),
}

# What its SQL lacks, said otherwise: `exists` with an inequality to the outer query, and `corr`.
_OTHERWISE: Mapping[str, str] = {
    "q21": """
with late as (select l_orderkey as late_order, l_suppkey as late_supplier from lineitem
              where l_receiptdate > l_commitdate),
     alone as (select late_order as alone_order from late group by late_order having count(distinct late_supplier) = 1),
     several as (select l_orderkey as several_order from lineitem
                 group by l_orderkey having count(distinct l_suppkey) > 1)
select s_name, count(*) as numwait
from supplier, late, alone, several, orders, nation
where s_suppkey = late_supplier and late_order = alone_order and late_order = several_order
  and late_order = o_orderkey and o_orderstatus = 'F' and s_nationkey = n_nationkey and n_name = 'SAUDI ARABIA'
group by s_name
order by numwait desc, s_name
limit 100
""",
    "g9": """
select id2, id4, (n * xy - x * y) * (n * xy - x * y) / ((n * xx - x * x) * (n * yy - y * y)) as r2
from (select id2, id4, cast(count(*) as double) as n, cast(sum(v1) as double) as x, cast(sum(v2) as double) as y,
             cast(sum(v1 * v2) as double) as xy, cast(sum(v1 * v1) as double) as xx,
             cast(sum(v2 * v2) as double) as yy
      from x group by id2, id4) as sums
""",
}


@final
class DaftFrames:
    """Daft, whose runner is chosen already."""

    def __init__(self) -> None:
        self._tables: dict[str, Any] = {}

    def load(self, files: Files, *, memory: bool) -> None:
        self._tables = {}
        scanned = {name: daft.read_parquet(list(paths)) for name, paths in files.items()}
        self._tables = {name: table.collect() for name, table in scanned.items()} if memory else scanned

    def run(self, task: str, *, scale: float, to_caller: bool) -> Any:
        if task in _PAPER:
            planned = _PAPER[task](self._tables)
        else:
            try:
                planned = daft.sql(_OTHERWISE.get(task) or text_of(task, scale), **self._tables)
            except Exception as error:
                raise UnsupportedError(f"its SQL cannot plan it: {str(error).splitlines()[0][:120]}") from error
        return planned.to_arrow() if to_caller else planned.collect()

    def write(self, result: Any, path: Path) -> None:
        write_arrow(result.to_arrow() if isinstance(result, daft.DataFrame) else result, path)

    def close(self) -> None:
        self._tables = {}


def opened(*, num_cores: int, runner: str) -> DaftFrames:
    """Daft. **Arguments:** `runner`: "native" or "ray"."""
    if runner == "ray":
        ray: Any = __import__("ray")
        ray.init(num_cpus=num_cores, include_dashboard=False, log_to_driver=False, logging_level="error")
        daft.set_runner_ray(noop_if_initialized=True)
    else:
        daft.set_runner_native()
    return DaftFrames()
