"""The benchmark of frames asks all systems for the same, and notices when one of them finds something else."""

import os
from collections.abc import Generator
from pathlib import Path

import polars as pl
import pytest

from benchmarks.cylon import cases, data, worlds
from benchmarks.cylon.equal import ORDERS, assert_same
from benchmarks.cylon.measuring import MEAN, Bench, Way, add_means, measure
from benchmarks.cylon.tasks import sql, verbs
from benchmarks.cylon.tasks.pandas_api import TASKS as PANDAS_TASKS
from benchmarks.cylon.worlds import DUCKDB, POLARS, STREAMING, AbsentError, System, World
from benchmarks.harness import Report, arguments

FOUND = pl.DataFrame({"k": [1, 2, 2], "a": [0.1, 0.2, None], "b": ["x", "y", "z"]})
IN_SQL_OF_POLARS = [*sql.PAPER, *sql.JOINS, "g1", "g2", "g3", "g4", "g5", "g7", "g10"]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, list[str]]:
    return dict(data.paper(tmp_path / "tables", 1000, "90 %"))


@pytest.fixture
def world() -> Generator[World]:
    with World(POLARS, peers=None, num_cores=1) as started:
        yield started


def bench(folder: Path) -> Bench:
    return Bench(Report(arguments("cylon", "Frames.").parse_args([])), folder, None, "", 1)


def tables(folder: Path) -> dict[str, pl.LazyFrame]:
    h2o = data.h2o(folder, 2000)
    made = {**data.paper(folder, 1000, "strings"), **h2o}
    return {name: pl.scan_parquet(list(paths)) for name, paths in made.items()}


def test_every_task_is_said_in_every_language() -> None:
    assert set(verbs.TASKS) == set(sql.TASKS) == set(PANDAS_TASKS)
    assert set(ORDERS) < set(verbs.TASKS)
    assert len(verbs.TPCH) == 22
    assert {query for query, text in sql.QUERIES.items() if "order by" in text} == set(ORDERS) & set(sql.QUERIES)


@pytest.mark.parametrize("task", IN_SQL_OF_POLARS)
def test_verbs_and_sql_ask_for_the_same(task: str, tmp_path: Path) -> None:
    made = tables(tmp_path)
    if task in verbs.GROUP_BYS:
        made["x"] = made["g"]
    named = {sql.NAMES.get(name, name): table for name, table in made.items()}
    with pl.SQLContext(frames=named) as context:
        by_sql = context.execute(sql.text_of(task, 1.0)).collect()
    found = verbs.TASKS[task](made).collect()
    assert found.height
    assert_same(task, found, by_sql)


def test_the_share_of_query_11_falls_as_tables_grow() -> None:
    assert "0.000100000000" in sql.text_of("q11", 1.0)
    assert "0.000010000000" in sql.text_of("q11", 10.0)


def test_widths_columns_and_rows_without_order_may_differ() -> None:
    other = FOUND.select("b", pl.col("a").fill_null(float("nan")) * (1 + 1e-12), pl.col("k").cast(pl.UInt8))
    assert_same("join", other.reverse(), FOUND)


@pytest.mark.parametrize(
    "other",
    [
        FOUND.with_columns(a=pl.col("a") * (1 + 1e-6)),
        FOUND.with_columns(b=pl.lit("x")),
        FOUND.head(2),
        pl.concat([FOUND, FOUND.tail(1)]),
        FOUND.drop("b"),
        FOUND.with_columns(a=pl.col("a").fill_null(0.0)),
    ],
)
def test_another_result_is_noticed(other: pl.DataFrame) -> None:
    with pytest.raises(AssertionError):
        assert_same("join", other, FOUND)


def test_rows_in_another_order_are_noticed_where_a_task_orders_them() -> None:
    assert_same("sort", FOUND.select(pl.all().gather([0, 2, 1])), FOUND)
    with pytest.raises(AssertionError, match="sort: the rows are not ordered by k"):
        assert_same("sort", FOUND.reverse(), FOUND)


@pytest.mark.parametrize("kind", data.KINDS)
def test_tables_have_the_keys_that_their_name_says(kind: str, tmp_path: Path) -> None:
    made = data.paper(tmp_path, 100_000, kind)
    left, right = (pl.read_parquet(list(made[name])) for name in ("left", "right"))
    assert left.height == 100_000
    assert len(made["left"]) == data.NUM_FILES
    largest = left["k"].value_counts()["count"].max()
    if kind == "0.001 %":
        assert left["k"].n_unique() == right.height == 1
    elif kind == "Zipf":
        assert right["k"].is_unique().all()
        assert largest > 10_000
    else:
        assert left["k"].dtype == (pl.String if kind == "strings" else pl.Int64)
        assert largest < 20
    assert data.paper(tmp_path, 100_000, kind) == made


def test_a_process_does_tasks_and_writes_what_it_found(
    world: World, files: dict[str, list[str]], tmp_path: Path
) -> None:
    for memory in (True, False):
        world.load(files, memory=memory)
        assert world.run("pipeline", to_caller=False, out=tmp_path / "out") > 0
        expected = verbs.TASKS["pipeline"]({name: pl.scan_parquet(paths) for name, paths in files.items()})
        assert_same("pipeline", pl.read_parquet(tmp_path / "out"), expected.collect())


def test_what_a_process_cannot_do_is_told(world: World, files: dict[str, list[str]]) -> None:
    world.load({"left": files["left"]}, memory=False)
    with pytest.raises(RuntimeError, match=r"Polars, pipeline:\n(.|\n)*KeyError: 'right'"):
        world.run("pipeline", to_caller=False)
    assert world.run("groupby", to_caller=False) > 0  # it goes on


def test_a_peer_that_is_not_installed_is_told(tmp_path: Path) -> None:
    with pytest.raises(AbsentError, match=r"not installed \(see --frames\)"):
        World(DUCKDB, peers=None, num_cores=1)


def test_a_process_rests_between_its_turns_and_runs_again_without_its_owner(
    files: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    resting = System("polars", {"mode": "in-memory"}, peer=False, rests=True)
    monkeypatch.setattr(worlds, "SYSTEMS", {POLARS: resting})
    with World(POLARS, peers=None, num_cores=1) as world:
        with world.awake():
            world.load(files, memory=True)
        number = world._process.pid
        os.waitid(os.P_PID, number, os.WSTOPPED | os.WNOWAIT)
        assert state(number) == "T"
        assert world._guard.stdin is not None
        world._guard.stdin.close()  # as when the owner is killed
        world._guard.wait(10)
        assert state(number) != "T"


def state(number: int) -> str:
    return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_case_measures_who_agrees_and_names_who_does_not(
    files: dict[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, task = bench(tmp_path), ("pipeline", None)
    with found.worlds("x", [POLARS, STREAMING, DUCKDB], files, memory=True, first=task) as started:
        assert measure(found, "x", started, "pipeline", Way(rounds=2), at="few") == [POLARS, STREAMING]
        monkeypatch.setattr("benchmarks.cylon.measuring.assert_same", differs_once())
        assert measure(found, "x", started, "sort", Way(rounds=2, patience=0), at="sort") == [POLARS]
    add_means(found.report, "x", [POLARS, STREAMING], ["few", "sort"])
    rows = [(row.system, row.at, row.metric or "missing", row.runs) for row in found.report.rows]
    assert rows == [
        (DUCKDB, "", "missing", 0),
        (POLARS, "few", "time", 2),
        (STREAMING, "few", "time", 2),
        (STREAMING, "sort", "missing", 0),
        (POLARS, "sort", "time", 1),  # it took longer than its patience
        (POLARS, "all queries", MEAN, 1),
        (STREAMING, "all queries", "missing", 0),
    ]
    assert "another result than the others'" in found.report.rows[3].missing


def differs_once() -> object:
    calls: list[str] = []

    def compare(task: str, *_: object) -> None:
        calls.append(task)
        if len(calls) == 2:
            raise AssertionError("differs")

    return compare


def test_claims_are_not_made_where_ours_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object, **__: object) -> World:
        raise AbsentError("not installed")

    monkeypatch.setattr("benchmarks.cylon.measuring.World", absent)
    found = bench(tmp_path)
    for case in (cases.pipeline, cases.tpch, cases.start):
        case(found, cases.QUICK)
    cases.without_big(found)
    names = ["polars", "sequential", "dask", "ray", "daft", "tpch", "tpch_daft", "tpch_dask", "tpch_sail", "start"]
    assert [claim.name for claim in found.report.claims] == [*names, "growth", "tpch_memory"]
    assert all(claim.holds is None and claim.why for claim in found.report.claims)
