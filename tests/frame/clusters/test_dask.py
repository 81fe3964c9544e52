"""Tables of Dask as frames and back, on a real cluster of processes: values, places, bad input, what moves."""

import datetime
from collections.abc import Iterator
from typing import Any

import dask
import dask.dataframe as dd
import distributed
import numpy as np
import pandas as pd
import polars as pl
import pytest
from polars.testing import assert_frame_equal

import braidax.frame as bf
from braidax.comm import Communicator
from braidax.errors import ArgumentError, GangError, MissingExtra
from braidax.frame.clusters import partitions
from braidax.gang import LocalGang
from braidax.gang.dask import DaskGang
from tests.support.comm.ranks import outcomes
from tests.support.frame.clusters.moved import moved_bytes
from tests.support.frame.running import names_kept
from tests.support.gang.clusters import until

ROWS = 200_000  # of a part


@pytest.fixture(scope="module")
def client() -> Iterator[distributed.Client]:
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address="127.0.0.1:0"
        ) as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def gang(client: distributed.Client) -> Iterator[DaskGang]:
    with DaskGang(client) as gang:
        yield gang


def part(number: int) -> pd.DataFrame:
    """Returns numbers, on the worker that asks."""
    rng = np.random.default_rng(number)
    return pd.DataFrame({"k": rng.integers(0, 50, ROWS), "x": rng.random(ROWS), "y": np.full(ROWS, number)})


def test_partitions_go_over_where_they_lie_and_come_back(client: distributed.Client, gang: DaskGang) -> None:
    whole = pl.concat([pl.from_pandas(part(number)) for number in range(6)])
    parts = dd.from_delayed([dask.delayed(part)(number) for number in range(6)], meta=part(0).head(0))
    before = moved_bytes()
    assert before > 1000  # it does count
    futures = client.compute(list(parts.to_delayed()))
    with client.as_current():
        distributed.wait(futures)
    owned = owners(client, futures)
    places = {worker: {at for at, owner in enumerate(owned) if owner == worker} for worker in gang.workers}
    frame = bf.from_dask(futures, gang)
    table = frame.with_columns((pl.col("x") * 2).alias("z"))
    back = bf.to_dask(table)
    rows = client.compute(back.shape[0]).result()
    moved = moved_bytes() - before
    assert rows == 6 * ROWS
    assert moved < whole.estimated_size() / 20, "rows went through this process"
    for worker, seen in zip(gang.workers, gang.run(numbers_there, gang.kept(gang.names()[0])), strict=True):
        assert set(seen) == places[worker]
    ordered = whole.with_columns((pl.col("x") * 2).alias("z")).sort("y", "x")
    assert_frame_equal(pl.from_pandas(client.compute(back).result()).sort("y", "x"), ordered)
    found = frame.group_by("k").agg(pl.col("x").sum(), pl.len()).sort("k").collect()
    assert_frame_equal(found, whole.group_by("k").agg(pl.col("x").sum(), pl.len()).sort("k"))
    assert moved_bytes() - before > whole.estimated_size()  # as when they do


def owners(client: distributed.Client, futures: list[Any]) -> list[str]:
    return [client.who_has([future])[future.key][0] for future in futures]


def numbers_there(comm: Any, kept: Any) -> list[int]:
    del comm
    return sorted(set(kept.frame["y"].to_list()))


def test_what_comes_back_stays_behind_the_gang(client: distributed.Client) -> None:
    with DaskGang(client) as gang:
        frame = bf.from_polars(pl.DataFrame({"a": range(10), "s": [f"t{i % 3}" for i in range(10)]}), gang)
        table = frame.with_columns(pl.col("s").cast(pl.Categorical).alias("c"), pl.lit(None).cast(pl.Int8).alias("n"))
        back = bf.to_dask(table.sort("a", descending=True))
        assert gang.names() == ()
    assert back.npartitions == 2
    assert [str(dtype) for dtype in back.dtypes[:2]] == ["int64[pyarrow]", "large_string[pyarrow]"]
    found = client.compute(back).result()
    assert found["a"].tolist() == list(range(9, -1, -1))
    assert found["c"].tolist() == [f"t{i % 3}" for i in range(9, -1, -1)]
    assert found["n"].isna().all()
    with DaskGang(client) as gang:
        again = bf.from_dask(back, gang)
        assert again.collect_schema() == pl.Schema(
            {"a": pl.Int64(), "s": pl.String(), "c": pl.Categorical(), "n": pl.Int8()}
        )
        assert sorted(again.collect()["a"].to_list()) == list(range(10))
    del back

    until(lambda: client.run_on_scheduler(tasks_here) == [])  # nothing else refers to the rows


def test_tables_of_all_kinds_are_taken(gang: DaskGang) -> None:
    table = pl.DataFrame(
        {
            "i": [1, None, 3],
            "s": ["a", None, "c"],
            "d": [datetime.date(2020, 1, 1), None, datetime.date(2021, 1, 1)],
            "l": [[1], [], None],
            "t": [{"a": 1}, {"a": 2}, None],
        }
    )
    named = table.to_pandas(use_pyarrow_extension_array=True).set_index("i")
    one = [
        dask.delayed(made) for made in (table, table.lazy(), table.to_arrow(), table.to_arrow().to_batches()[0], named)
    ]
    found = bf.from_dask(one, gang).collect()
    assert found.height == 15
    assert_frame_equal(found.unique(maintain_order=True).sort("s"), table.sort("s"))
    nulls = [dask.delayed(made) for made in (table.clear(), table.with_columns(pl.lit(None).alias("s")), table)]
    assert bf.from_dask(nulls, gang).collect().schema == table.schema
    assert bf.from_dask([dask.delayed(table.clear())], gang).collect().equals(table.clear())
    assert bf.from_dask(dd.from_pandas(pd.DataFrame({"x": [1.5, np.nan]}), npartitions=1), gang).collect()[
        "x"
    ].to_list() == [1.5, None]


def tasks_here(dask_scheduler: Any) -> list[str]:
    """Returns the tasks that made rows or hold them."""
    return [key for key in map(str, dask_scheduler.tasks) if "braidax" not in key]


def failing() -> pd.DataFrame:
    raise LookupError("no such file")


OBJECTS = pd.DataFrame({"a": [1, 2], "b": [object(), 3]})
NUMBERS = pd.DataFrame({"a": [1, 2], "b": [3, 4]})


CANNOT_BE: list[tuple[list[Any], type[Exception], str]] = [
    (
        [NUMBERS, {"b": [1j, 2j]}],
        ArgumentError,
        r"^partition 1: the column 'b' has complex128, which Polars cannot repr",
    ),
    (
        [{"b": [1, "x"]}],
        ArgumentError,
        r"^partition 0: the column 'b' has object, which Polars cannot represent \(Could not",
    ),
    (
        [{"p": pd.period_range("2020", periods=2, freq="M")}],
        ArgumentError,
        r"^partition 0: the column 'p' has Extension\(",
    ),
    ([{1: [1]}], ArgumentError, r"^partition 0: the name of a column, 1, is no text; rename it before"),
    ([NUMBERS[["a", "a"]]], ArgumentError, r"^partition 0: the name of a column, 'a', is there twice"),
    (
        [NUMBERS, NUMBERS, {"a": [1.5], "b": [1]}],
        ArgumentError,
        r"^partition 2 has Float64 in the column 'a', and partition 0 Int64; expected one dtype in all: cast it",
    ),
    (
        [NUMBERS, {"b": [1]}],
        ArgumentError,
        r"^partition 1 has the columns \['b'\], and partition 0 \['a', 'b'\]; expected",
    ),
    ([pd.DataFrame(index=range(3))], ArgumentError, r"^partition 0 has no columns; expected"),
    ([7], ArgumentError, r"^partition 0 is a builtins.int; expected a table of pandas, pyarrow or Polars"),
    ([failing], LookupError, "no such file"),
]
# One that a rank finds, one that ranks find out of all partitions, and one that Dask does.
ON_A_CLUSTER = (0, 5, 9)


@pytest.mark.parametrize(
    ("parts", "kind", "words"),
    [
        pytest.param(*case, marks=() if number in ON_A_CLUSTER else pytest.mark.slow)
        for number, case in enumerate(CANNOT_BE)
    ],
)
def test_partitions_that_cannot_be_are_named(
    parts: list[Any], kind: type[Exception], words: str, gang: DaskGang
) -> None:
    made = [dask.delayed(each)() if callable(each) else dask.delayed(each) for each in map(table_of, parts)]
    before = names_kept(gang)
    with pytest.raises(kind, match=words):
        bf.from_dask(made, gang)
    assert gang.names() == before
    assert gang.run(numbers_handed) == [0, 0]


@pytest.mark.parametrize(("parts", "kind", "words"), [case for case in CANNOT_BE if case[1] is ArgumentError])
def test_whatever_is_wrong_with_partitions_is_named_where_they_lie(
    parts: list[Any], kind: type[Exception], words: str
) -> None:
    """As ranks do it, without a cluster."""

    def taken(comm: Communicator) -> pl.Schema:
        numbered = partitions._converted(comm, [table_of(each) for each in parts], range(len(parts)))
        return partitions._agreed(partitions._told(comm, numbered))

    (found,) = outcomes(1, taken)
    with pytest.raises(kind, match=words):
        raise found


def table_of(part: Any) -> Any:
    return pd.DataFrame(part) if isinstance(part, dict) else part


def numbers_handed(comm: Any) -> int:
    """Returns how much a rank was handed and has not taken."""
    actors = distributed.worker.Worker._instances  # of this process
    (worker,) = actors
    return sum(len(rank._member._handed) for rank in worker.state.actors.values() if hasattr(rank, "_member"))


@pytest.mark.parametrize(
    ("collection", "words"),
    [
        ([], "collection is empty: expected one partition or more"),
        ([NUMBERS], r"collection\[0\] is a pandas\..*DataFrame: expected a Delayed or a Future of a table"),
        (NUMBERS, r"collection is a pandas\..*DataFrame: expected a dask.dataframe.DataFrame, or a list of"),
        (dd.from_pandas(NUMBERS, npartitions=1)["a"], r"collection is a dask.dataframe\..*Series: expected"),
    ],
)
def test_what_is_no_table_of_dask_is_refused(collection: Any, words: str, gang: DaskGang) -> None:
    with pytest.raises(ArgumentError, match=f"^{words}"):
        bf.from_dask(collection, gang)


def test_gangs_that_do_not_fit_are_refused(gang: DaskGang, client: distributed.Client) -> None:
    local = LocalGang(1)
    with pytest.raises(
        ArgumentError, match=r"^gang is a LocalGang: expected a DaskGang, whose ranks are Dask's workers"
    ):
        bf.from_dask(dd.from_pandas(NUMBERS, npartitions=1), local)
    with pytest.raises(ArgumentError, match=r"^frame is one of a LocalGang: expected one of a DaskGang"):
        bf.to_dask(bf.from_polars(pl.DataFrame({"a": [1]}), local))
    with pytest.raises(GangError, match=r"^the gang can take nothing from its cluster: it does not run; call replace"):
        bf.from_dask([dask.delayed(NUMBERS)], DaskGang(client))
    with pytest.raises(
        ArgumentError, match=r"^the column 'a' has List\(Int128\), which Arrow cannot represent: expected"
    ):
        bf.to_dask(bf.from_polars(pl.DataFrame({"a": [[1]]}, schema={"a": pl.List(pl.Int128)}), gang))


def test_dask_without_its_tables_is_asked_for(gang: DaskGang, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "dask.dataframe", None)
    with pytest.raises(MissingExtra, match=r"braidax\[dask-frame\]"):
        bf.to_dask(bf.from_polars(pl.DataFrame({"a": [1]}), gang))
