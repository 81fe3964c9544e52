"""Frames on gangs of processes, over TCP and UCX: the plan, the data and the errors pass between them."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack

import polars as pl
import pytest

from braidax.frame import collect
from braidax.gang import LocalGang
from tests.support.frame.queries.catalogue import CATALOGUE
from tests.support.frame.queries.query import Query
from tests.support.frame.running import Asked, Outcome
from tests.support.frame.tables import Tables
from tests.support.gang.forks import fork_children

TRANSPORTS = ["tcp", "ucx"]
# One of each way in which rows go from rank to rank, and of each way in which a plan brings along what it needs.
SELECTED = [
    "select of every dtype",
    "map_elements",
    "map_batches of a frame",
    "sums of floats",
    "scaled by mean and std",
    "rows of over",
    "cumulative",
    "full join on kc",
    "inner join in both orders",
    "asof join by groups",
    "the paper's pipeline",
    "group_by of every dtype",
    "group_by: quantile",
    "group_by in order: implode",
    "group_by_dynamic",
    "sort that is stable",
    "unique last, in order",
    "concat, then a row index",
    "top_k, sorted",
    "explode, then a row index",
    "parquet: every dtype",
    "csv: sort",
    "ndjson: group_by",
    "ipc: with_row_index",
]
QUERIES = [query for query in CATALOGUE if query.name in SELECTED]
assert len(QUERIES) == len(SELECTED), set(SELECTED) - {query.name for query in QUERIES}


# Every other query over each transport; `slow` asks all of them over both.
OVER = [
    pytest.param(
        transport, query, marks=() if number % 2 == place else pytest.mark.slow, id=f"{transport}-{query.name}"
    )
    for place, transport in enumerate(TRANSPORTS)
    for number, query in enumerate(QUERIES)
]


@pytest.fixture(scope="module")
def gangs() -> Iterator[Mapping[str, LocalGang]]:
    """Returns a gang of each transport; a gang of this scope with parameters would begin anew for each test."""
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        fork_children(patch, "braidax.gang.child", "braidax.frame.collecting")
        yield {transport: stack.enter_context(LocalGang(3, transport=transport)) for transport in TRANSPORTS}


@pytest.fixture(params=TRANSPORTS)
def gang(request: pytest.FixtureRequest, gangs: Mapping[str, LocalGang]) -> LocalGang:
    return gangs[request.param]


def on_gang(lazy: pl.LazyFrame, gang: LocalGang) -> Outcome:
    try:
        return collect(lazy, gang)
    except Exception as error:  # noqa: BLE001 (the test compares it)
        return error


@pytest.mark.parametrize(("gang", "query"), OVER, indirect=["gang"])
def test_processes(query: Query, gang: LocalGang, tables: Callable[[str], Tables]) -> None:
    asked = Asked.of(query, tables("usual"))
    asked.check(on_gang(query.build(tables("usual")), gang), f"3 processes over {gang}")


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["usual", "empty", "one giant key"])
@pytest.mark.parametrize("query", CATALOGUE, ids=lambda query: query.name)
def test_all_queries_on_processes(query: Query, shape: str, gang: LocalGang, tables: Callable[[str], Tables]) -> None:
    asked = Asked.of(query, tables(shape))
    if not any(isinstance(expected, BaseException) for expected in asked.expected):
        asked.check(on_gang(query.build(tables(shape)), gang), f"3 processes over {gang}")
