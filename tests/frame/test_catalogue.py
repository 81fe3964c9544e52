"""The catalogue itself: what it calls defined is what both engines of Polars give, however the rows lie in memory."""

from collections.abc import Callable, Iterator

import polars as pl
import pytest

from tests.support.frame.queries.catalogue import CATALOGUE
from tests.support.frame.queries.query import Query
from tests.support.frame.running import alone
from tests.support.frame.tables import SHAPES, Tables

STRIDE = 18  # by default one query of eighteen, as Polars alone computes them; `slow` asks the others
# Where Polars' engines are not of one mind, on tables with next to no rows.
DISAGREEMENTS = {"rle", "correlations", "entropy", "group_by: corr", "group_by in order: corr"}


@pytest.fixture
def small_morsels() -> Iterator[None]:
    """Has the streaming engine work on few rows at a time, so that it has several threads' rows to put in order.

    Polars reads the variable of that size only when it is told to: where something else sets it, all later tests of
    this process have morsels of 4 rows.
    """
    with pl.Config(streaming_chunk_size=4):
        yield


def check_engines(query: Query, tables: Tables) -> None:
    expected = alone(query.build, tables, "in-memory")
    found = alone(query.build, tables, "streaming")
    if isinstance(expected, BaseException) or isinstance(found, BaseException):
        assert type(found) is type(expected), (found, expected)
    else:
        assert query.wrong(tables, found, expected) == ""


@pytest.mark.usefixtures("small_morsels")
@pytest.mark.parametrize(
    "query",
    [
        pytest.param(query, id=query.name, marks=() if number % STRIDE == 0 else pytest.mark.slow)
        for number, query in enumerate(CATALOGUE)
    ],
)
def test_engines_agree(query: Query, tables: Callable[[str], Tables]) -> None:
    check_engines(query, tables("usual"))


@pytest.mark.slow
@pytest.mark.usefixtures("small_morsels")
@pytest.mark.parametrize("shape", [name for name in SHAPES if name != "usual"])
@pytest.mark.parametrize("query", CATALOGUE, ids=lambda query: query.name)
def test_engines_agree_on_other_tables(query: Query, shape: str, tables: Callable[[str], Tables]) -> None:
    if query.name not in DISAGREEMENTS:
        check_engines(query, tables(shape))
