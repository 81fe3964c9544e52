"""The cases: what is measured of whom, and what is claimed."""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.cylon import data
from benchmarks.cylon.measuring import MEAN, TIME, Bench, Way, add_means, measure
from benchmarks.cylon.worlds import (
    DAFT,
    DAFT_RAY,
    DASK,
    DUCKDB,
    OURS,
    OURS_1,
    OURS_4,
    OURS_DASK,
    OURS_RAY,
    OURS_UCX,
    PANDAS,
    POLARS,
    RAY,
    SAIL,
    STREAMING,
    AbsentError,
)
from benchmarks.harness import say

PEERS = (POLARS, STREAMING, DUCKDB, PANDAS, DAFT, DAFT_RAY, DASK, RAY)
ONE_POLARS = (POLARS, STREAMING)
GIB = 1 << 30
_QUERIES = [f"q{number}" for number in range(1, 23)]
_GROUP_BYS, _JOINS = [f"g{number}" for number in range(1, 11)], [f"j{number}" for number in range(1, 6)]
_MEMORY, _PARQUET = "in memory", "from Parquet"
_LINES = (("90 %", "join"), ("90 %", "groupby"), ("90 %", "sort"), ("90 %", "pipeline"), ("0.001 %", "groupby"))
_MORE_LINES = (("0.001 %", "pipeline"), ("Zipf", "pipeline"), ("strings", "pipeline"))


@dataclass(frozen=True)
class Scale:
    """How much is measured: full, or `--quick`.

    **Fields:** `rows`: of the claims' tables. `few_rows`: of those of single operations. `question_rows`: of h2o.ai's.
    `growth`: rows of the tables that growth is told from. `tpch`, `big`: factors of TPC-H. `lines`: single operations.
    """

    rows: int
    few_rows: int
    question_rows: int
    start_rows: int
    growth: Sequence[int]
    tpch: float
    big: float
    rounds: int
    lines: Sequence[tuple[str, str]]
    queries: Sequence[str]
    questions: Sequence[str]


FULL = Scale(
    rows=10_000_000,
    few_rows=1_000_000,
    question_rows=1_000_000,
    start_rows=100_000,
    growth=(1_000_000, 10_000_000, 50_000_000),
    tpch=1.0,
    big=10.0,
    rounds=3,
    lines=(*_LINES, *_MORE_LINES),
    queries=_QUERIES,
    questions=(*_GROUP_BYS, *_JOINS),
)
QUICK = Scale(
    20_000, 10_000, 10_000, 10_000, (10_000, 20_000), 0.05, 0.05, 1, (("90 %", "groupby"),), _QUERIES[::7], ("g1", "j5")
)
QUICK_CASES: Mapping[str, Sequence[str]] = {
    DASK: [f"pipeline, {_MEMORY}"],
    PANDAS: [f"group-by questions, {QUICK.question_rows:,} rows"],
    DUCKDB: [f"pipeline, {_MEMORY}", f"TPC-H {QUICK.tpch:g}, {_PARQUET}"],
    OURS_1: [f"pipeline, {_MEMORY}"],
    DAFT: [f"pipeline, {_MEMORY}", f"TPC-H {QUICK.tpch:g}, {_PARQUET}"],
    SAIL: [f"TPC-H {QUICK.tpch:g}, {_PARQUET}"],
    DAFT_RAY: [],
    RAY: [],
    OURS_RAY: [],
}
"""Those with which `--quick` starts a system that takes long to start, or is one of many; a Ray it does not start."""


def pipeline(bench: Bench, scale: Scale) -> None:
    """join → groupby sum → sort → add, of tables in memory; what comes out stays where it was computed."""
    case, files = f"pipeline, {_MEMORY}", data.paper(bench.folder, scale.rows, "90 %")
    names = (OURS, OURS_1, OURS_4, OURS_UCX, *PEERS)
    with bench.worlds(case, names, files, memory=True, first=_small(bench, scale)) as worlds:
        measure(bench, case, worlds, "pipeline", Way(scale.rounds), at=_rows(scale.rows))
    report = bench.report
    report.against("polars", case, TIME, ours=OURS, peers=ONE_POLARS, at_least=1 / 1.05)
    report.against("sequential", case, TIME, ours=OURS_1, peers=ONE_POLARS, at_least=1 / 1.05)
    report.against("dask", case, TIME, ours=OURS, peers=[DASK], at_least=5)
    report.against("ray", case, TIME, ours=OURS, peers=[RAY], at_least=7)
    report.against("daft", case, TIME, ours=OURS, peers=[DAFT, DAFT_RAY], at_least=3)


def parquet(bench: Bench, scale: Scale) -> None:
    """The same from Parquet, in the page cache."""
    case, files = f"pipeline, {_PARQUET}", data.paper(bench.folder, scale.rows, "90 %")
    data.warm(files)
    names = (OURS, OURS_1, POLARS, STREAMING, DUCKDB, PANDAS, SAIL, DAFT)
    with bench.worlds(case, names, files, memory=False, first=_small(bench, scale)) as worlds:
        measure(bench, case, worlds, "pipeline", Way(scale.rounds), at=_rows(scale.rows))


def gangs(bench: Bench, scale: Scale) -> None:
    """The same on gangs of Dask and Ray, beside local processes; in a case of its own, as idle clusters use cores."""
    case, files = "pipeline, gangs", data.paper(bench.folder, scale.rows, "90 %")
    names = (POLARS, OURS, OURS_DASK, OURS_RAY)
    with bench.worlds(case, names, files, memory=True, first=_small(bench, scale)) as worlds:
        measure(bench, case, worlds, "pipeline", Way(scale.rounds), at=_rows(scale.rows))


def operations(bench: Bench, scale: Scale) -> None:
    """Single operations, and other keys."""
    case = f"operations, {_rows(scale.few_rows)}, {_MEMORY}"
    names = (OURS, POLARS, STREAMING, DUCKDB, PANDAS, DAFT, DASK)
    first = _small(bench, scale)
    with bench.worlds(
        case, names, data.paper(bench.folder, scale.few_rows, "90 %"), memory=True, first=first
    ) as worlds:
        for kind in dict.fromkeys(kind for kind, _ in scale.lines):
            files = data.paper(bench.folder, scale.few_rows, kind)
            for world in worlds.values():
                world.load(files, memory=True)
            for task in [task for of, task in scale.lines if of == kind]:
                measure(bench, case, worlds, task, Way(min(2, scale.rounds), 1.0), at=f"{task}, keys {kind}")


def tpch(bench: Bench, scale: Scale) -> None:
    """TPC-H from Parquet in the page cache; answers come to the caller."""
    names = (OURS, POLARS, STREAMING, DUCKDB, SAIL, DAFT, DAFT_RAY, DASK)
    case = _tpch(bench, scale, scale.tpch, names, memory=False)
    if not case:
        for claim, target in (("tpch", 1 / 1.3), ("tpch_daft", 3), ("tpch_dask", 3), ("tpch_sail", 1)):
            bench.report.not_measured(claim, f">= {target:g}", "without tpchgen-cli there are no tables")
        return
    claims = (
        ("tpch", ONE_POLARS, 1 / 1.3),
        ("tpch_daft", [DAFT_RAY], 3),
        ("tpch_dask", [DASK], 3),
        ("tpch_sail", [SAIL], 1),
    )
    for claim, peers, target in claims:
        bench.report.against(claim, case, MEAN, ours=OURS, peers=peers, at_least=target)


def tpch_memory(bench: Bench, scale: Scale) -> None:
    """TPC-H of tables in memory: of those that take few seconds for it."""
    _tpch(bench, scale, scale.tpch, (OURS, POLARS, STREAMING, DUCKDB, DAFT), memory=True)


def questions(bench: Bench, scale: Scale) -> None:
    """The questions of h2o.ai, of tables in memory; Sail reads them."""
    made = data.h2o(bench.folder, scale.question_rows)
    parts = {
        "group-by questions": ({"x": made["g"]}, [name for name in scale.questions if name.startswith("g")]),
        "join questions": ({name: paths for name, paths in made.items() if name != "g"}, _JOINS),
    }
    for part, (files, tasks) in parts.items():
        case = f"{part}, {_rows(scale.question_rows)}"
        asked = [task for task in tasks if task in scale.questions]
        names = (OURS, POLARS, STREAMING, DUCKDB, PANDAS, DAFT, DASK)
        with (
            bench.worlds(case, names, files, memory=True, first=(asked[0], None)) as worlds,
            bench.worlds(case, (SAIL,), files, memory=False, first=(asked[0], None)) as reading,
        ):
            for task in asked:
                measure(bench, case, {**worlds, **reading}, task, Way(min(2, scale.rounds), 1.0), at=task)
        add_means(bench.report, case, (*names, SAIL), asked)


def start(bench: Bench, scale: Scale) -> None:
    """From nothing to the first result of a small pipeline from Parquet; of ours also where only the gang is new."""
    case, files = f"start, {_rows(scale.start_rows)}", data.paper(bench.folder, scale.start_rows, "90 %")
    data.warm(files)
    metric = "a gang and its first result"
    try:
        with bench.world(case, OURS) as world:
            world.load(files, memory=False)
            seconds = [world.run("start", to_caller=True) for _ in range(max(2, scale.rounds))]
        bench.report.add(case, OURS, metric, "s", seconds)
        bench.report.at_most("start", seconds, 3)
    except AbsentError as error:
        bench.report.not_measured("start", "<= 3", f"{OURS}: {error}")
    for name in (OURS, POLARS, DUCKDB, SAIL, DAFT, DAFT_RAY, DASK, RAY):
        try:
            bench.report.add(case, name, "a process and its first result", "s", [_first(bench, case, name, files)])
        except (AbsentError, RuntimeError, TimeoutError) as error:
            bench.fail(case, name, error)


def big(bench: Bench, scale: Scale) -> None:
    """What takes long: the cost of a row as tables grow, and the memory of a large TPC-H."""
    _growth(bench, scale)
    case = f"memory, TPC-H {scale.big:g}, {_PARQUET}"
    if not bench.generator:
        bench.report.not_measured("tpch_memory", "<= 4", "without tpchgen-cli there are no tables")
        return
    files = data.tpch(bench.folder, scale.big, bench.generator)
    with bench.worlds(case, (OURS, STREAMING), files, memory=False, first=("q6", None)) as worlds:
        for name, world in worlds.items():
            peaks = [
                world.peak_bytes(lambda query=query, world=world: world.run(query, scale=scale.big, to_caller=True))
                for query in scale.queries
            ]
            largest = bench.report.add(case, name, "at most", "GiB", [max(peaks) / GIB])
            say(f"  {case}: {name} {largest:.3g} GiB")
            if name == OURS:
                bench.report.at_most("tpch_memory", largest, 4)
    if OURS not in worlds:
        bench.report.not_measured("tpch_memory", "<= 4", _why(bench, case))


def without_big(bench: Bench) -> None:
    """Says that claims of `big` are not made."""
    for claim, target in (("growth", "<= 1.3"), ("tpch_memory", "<= 4")):
        bench.report.not_measured(claim, target, "it takes long: see --big")


def _growth(bench: Bench, scale: Scale) -> None:
    case = "growth, pipeline, in memory"
    costs: list[float] = []
    for rows in scale.growth:
        files = data.paper(bench.folder, rows, "90 %")
        with bench.worlds(case, (OURS, POLARS, STREAMING), files, memory=True, first=_small(bench, scale)) as worlds:
            measure(bench, case, worlds, "pipeline", Way(min(2, scale.rounds), 30.0), at=_rows(rows))
    for row in bench.report.rows:
        if (row.case, row.system, row.metric) == (case, OURS, TIME) and row.values:
            costs.append(statistics.median(row.values) / scale.growth[len(costs)])
    if len(costs) == len(scale.growth):
        bench.report.at_most("growth", max(costs) / costs[0], 1.3)
    else:
        bench.report.not_measured("growth", "<= 1.3", _why(bench, case))


def _tpch(bench: Bench, scale: Scale, factor: float, names: Sequence[str], *, memory: bool) -> str:
    """Measures all queries, and returns the name of the case; "" if there are no tables."""
    case = f"TPC-H {factor:g}, {_MEMORY if memory else _PARQUET}"
    if not bench.generator:
        bench.report.note(f"{case} is not measured: tpchgen-cli is not installed (see --frames)")
        return ""
    files = data.tpch(bench.folder, factor, bench.generator)
    data.warm(files)
    with bench.worlds(case, names, files, memory=memory, first=("q6", None)) as worlds:
        way = Way(min(2, scale.rounds), 1.5, factor, to_caller=True)
        for query in scale.queries:
            measure(bench, case, worlds, query, way, at=query)
    add_means(bench.report, case, names, scale.queries)
    return case


def _first(bench: Bench, case: str, name: str, files: data.Files) -> float:
    begin = time.perf_counter()
    with bench.world(case, name) as world:
        with world.awake():
            world.load(files, memory=False)
        with world.awake():
            world.run("pipeline", to_caller=True)
            return time.perf_counter() - begin


def _small(bench: Bench, scale: Scale) -> tuple[str, data.Files]:
    return "pipeline", data.paper(bench.folder, scale.start_rows, "90 %")


def _why(bench: Bench, case: str) -> str:
    return next((f"{OURS}: {row.missing}" for row in bench.report.rows if row.case == case and row.system == OURS), "")


def _rows(number: int) -> str:
    return f"{number:,} rows"
