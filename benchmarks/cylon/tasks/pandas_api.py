"""Every task in pandas' API, for pandas, and for Dask as far as it has it."""

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.cylon.tasks import pandas_tpch_first, pandas_tpch_last

Tables = Mapping[str, Any]
Task = Callable[[Tables], Any]


def _pipeline(tables: Tables) -> Any:
    joined = tables["left"].merge(tables["right"], on="k")
    summed = joined.groupby("k").agg({"a": "sum", "b": "sum"}).reset_index().sort_values("k")
    return summed.assign(a=summed.a + 1, b=summed.b + 1)


def _by(tables: Tables, keys: list[str]) -> Any:
    return tables["x"].groupby(keys, sort=False, observed=True)


def _range(tables: Tables) -> Any:
    found = _by(tables, ["id3"]).agg(v1=("v1", "max"), v2=("v2", "min")).reset_index()
    return found.assign(range_v1_v2=found.v1 - found.v2)[["id3", "range_v1_v2"]]


def _largest_two(tables: Tables) -> Any:
    first = tables["x"][["id6", "v3"]].sort_values("v3", ascending=False).groupby("id6").head(2)
    return first.rename(columns={"v3": "largest2_v3"})


def _regression(tables: Tables) -> Any:
    """By sums, which all of them add up quickly; a function for each group is the slow way."""
    x = tables["x"]
    x = x.assign(xy=x.v1 * x.v2, xx=x.v1 * x.v1, yy=x.v2 * x.v2)
    sums = x.groupby(["id2", "id4"], sort=False).agg(
        n=("v1", "count"), x=("v1", "sum"), y=("v2", "sum"), xy=("xy", "sum"), xx=("xx", "sum"), yy=("yy", "sum")
    )
    sums = sums.reset_index()
    both = sums.n * sums.xy - sums.x * sums.y
    spread = (sums.n * sums.xx - sums.x * sums.x) * (sums.n * sums.yy - sums.y * sums.y)
    return sums.assign(r2=both * both / spread)[["id2", "id4", "r2"]]


GROUP_BYS: Mapping[str, Task] = {
    "g1": lambda tables: _by(tables, ["id1"]).agg(v1=("v1", "sum")).reset_index(),
    "g2": lambda tables: _by(tables, ["id1", "id2"]).agg(v1=("v1", "sum")).reset_index(),
    "g3": lambda tables: _by(tables, ["id3"]).agg(v1=("v1", "sum"), v3=("v3", "mean")).reset_index(),
    "g4": lambda tables: (
        _by(tables, ["id4"]).agg(v1=("v1", "mean"), v2=("v2", "mean"), v3=("v3", "mean")).reset_index()
    ),
    "g5": lambda tables: _by(tables, ["id6"]).agg(v1=("v1", "sum"), v2=("v2", "sum"), v3=("v3", "sum")).reset_index(),
    "g6": lambda tables: _by(tables, ["id4", "id5"]).agg(median_v3=("v3", "median"), sd_v3=("v3", "std")).reset_index(),
    "g7": _range,
    "g8": _largest_two,
    "g9": _regression,
    "g10": lambda tables: (
        _by(tables, ["id1", "id2", "id3", "id4", "id5", "id6"])
        .agg(v3=("v3", "sum"), number=("v1", "count"))
        .reset_index()
    ),
}
JOINS: Mapping[str, Task] = {
    "j1": lambda tables: tables["x"].merge(tables["small"], on="id1"),
    "j2": lambda tables: tables["x"].merge(tables["medium"][["id2", "w"]], on="id2"),
    "j3": lambda tables: tables["x"].merge(tables["medium"][["id2", "w"]], on="id2", how="left"),
    "j4": lambda tables: tables["x"].merge(tables["medium"][["id5", "w"]], on="id5"),
    "j5": lambda tables: tables["x"].merge(tables["big"], on="id3"),
}
PAPER: Mapping[str, Task] = {
    "join": lambda tables: tables["left"].merge(tables["right"], on="k"),
    "groupby": lambda tables: tables["left"].groupby("k", sort=False).agg({"a": "sum"}).reset_index(),
    "sort": lambda tables: tables["left"].sort_values("k"),
    "pipeline": _pipeline,
}
TPCH: Mapping[str, Task] = {
    f"q{number}": getattr(pandas_tpch_first if number < 12 else pandas_tpch_last, f"q{number}")
    for number in range(1, 23)
}
TASKS: Mapping[str, Task] = {**PAPER, **GROUP_BYS, **JOINS, **TPCH}
