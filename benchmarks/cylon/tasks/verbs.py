"""Every task in Polars' verbs: the paper's operations, the questions of h2o.ai, TPC-H.

A task takes the tables by name, LazyFrames or Frames of ours, and returns one that nobody has computed yet.
"""

from collections.abc import Callable, Mapping
from typing import Any

import polars as pl

from benchmarks.cylon.tasks import verbs_tpch_first, verbs_tpch_last

Tables = Mapping[str, Any]
Task = Callable[[Tables], Any]
SCALAR = 1


def _join(tables: Tables) -> Any:
    return tables["left"].join(tables["right"], on="k")


def _group_by(tables: Tables) -> Any:
    return tables["left"].group_by("k").agg(pl.col("a").sum())


def _sort(tables: Tables) -> Any:
    return tables["left"].sort("k")


def _pipeline(tables: Tables) -> Any:
    return (
        _join(tables)
        .group_by("k")
        .agg(pl.col("a").sum(), pl.col("b").sum())
        .sort("k")
        .with_columns(pl.col("a", "b") + SCALAR)
    )


def _largest_two(tables: Tables) -> Any:
    return tables["x"].group_by("id6").agg(largest2_v3=pl.col("v3").top_k(2)).explode("largest2_v3")


def _regression(tables: Tables) -> Any:
    return tables["x"].group_by("id2", "id4").agg(r2=pl.corr("v1", "v2") ** 2)


GROUP_BYS: Mapping[str, Task] = {
    "g1": lambda tables: tables["x"].group_by("id1").agg(v1=pl.col("v1").sum()),
    "g2": lambda tables: tables["x"].group_by("id1", "id2").agg(v1=pl.col("v1").sum()),
    "g3": lambda tables: tables["x"].group_by("id3").agg(v1=pl.col("v1").sum(), v3=pl.col("v3").mean()),
    "g4": lambda tables: tables["x"].group_by("id4").agg(pl.col("v1", "v2", "v3").mean()),
    "g5": lambda tables: tables["x"].group_by("id6").agg(pl.col("v1", "v2", "v3").sum()),
    "g6": lambda tables: (
        tables["x"].group_by("id4", "id5").agg(median_v3=pl.col("v3").median(), sd_v3=pl.col("v3").std())
    ),
    "g7": lambda tables: tables["x"].group_by("id3").agg(range_v1_v2=pl.col("v1").max() - pl.col("v2").min()),
    "g8": _largest_two,
    "g9": _regression,
    "g10": lambda tables: (
        tables["x"].group_by("id1", "id2", "id3", "id4", "id5", "id6").agg(v3=pl.col("v3").sum(), number=pl.len())
    ),
}
"""The ten group-by questions."""

JOINS: Mapping[str, Task] = {
    "j1": lambda tables: tables["x"].join(tables["small"], on="id1"),
    "j2": lambda tables: tables["x"].join(tables["medium"].select("id2", "w"), on="id2"),
    "j3": lambda tables: tables["x"].join(tables["medium"].select("id2", "w"), on="id2", how="left"),
    "j4": lambda tables: tables["x"].join(tables["medium"].select("id5", "w"), on="id5"),
    "j5": lambda tables: tables["x"].join(tables["big"], on="id3"),
}
"""The five join questions."""

PAPER: Mapping[str, Task] = {"join": _join, "groupby": _group_by, "sort": _sort, "pipeline": _pipeline}
TPCH: Mapping[str, Task] = {
    f"q{number}": getattr(verbs_tpch_first if number < 12 else verbs_tpch_last, f"q{number}") for number in range(1, 23)
}
TASKS: Mapping[str, Task] = {**PAPER, **GROUP_BYS, **JOINS, **TPCH}
