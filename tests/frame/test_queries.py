"""Every query of the catalogue on 1 to 4 ranks gives what one process of Polars gives."""

from collections.abc import Callable

import pytest

from tests.support.frame.queries.catalogue import CATALOGUE
from tests.support.frame.queries.query import Query
from tests.support.frame.running import Asked
from tests.support.frame.tables import SHAPES, Tables
from tests.support.frame.worlds import Worlds

OTHERS = [name for name in SHAPES if name != "usual"]
# By default one query of thirty-six on the usual tables, and one on others; `slow` asks all of them of all tables.
# Those of every other stride are asked by night in these ways as well.
STRIDE = 18
USUAL = [
    pytest.param(query, id=query.name, marks=() if number % 2 == 0 else pytest.mark.slow)
    for number, query in enumerate(CATALOGUE[::STRIDE])
]
OTHER = [
    pytest.param(
        query, shape, size, id=f"{query.name}-{shape}-{size}", marks=() if number % 4 < 2 else pytest.mark.slow
    )
    for number, query in enumerate(CATALOGUE[3::STRIDE])
    for shape, size in [(OTHERS[number % len(OTHERS)], (2, 4)[number % 2])]
]


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("query", USUAL)
def test_three_ranks(query: Query, tables: Callable[[str], Tables], worlds: Worlds) -> None:
    Asked.of(query, tables("usual")).on_ranks(3, worlds)


@pytest.mark.usefixtures("dealt")
@pytest.mark.parametrize(("query", "shape", "size"), OTHER)
def test_other_tables(query: Query, shape: str, size: int, tables: Callable[[str], Tables], worlds: Worlds) -> None:
    Asked.of(query, tables(shape)).on_ranks(size, worlds)


@pytest.mark.slow
@pytest.mark.usefixtures("dealt")
@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("query", CATALOGUE, ids=lambda query: query.name)
def test_all_tables_on_one_to_four_ranks(
    query: Query, shape: str, tables: Callable[[str], Tables], worlds: Worlds
) -> None:
    asked = Asked.of(query, tables(shape))
    for size in (1, 2, 3, 4):
        asked.on_ranks(size, worlds)
