"""What the catalogue is made of: a query, and what Polars says about its result."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import polars as pl

from tests.support.frame.comparison import Order, differences, missing
from tests.support.frame.tables import Tables

FLOATS = 1e-9  # by what a sum of these tables' floats may differ when it is made in another order

Build = Callable[[Tables], pl.LazyFrame]


@dataclass(frozen=True)
class Choice:
    """Polars chooses any of equal rows. **Fields:** `decided`: columns that are the same; `rows`: holds all rows."""

    decided: tuple[str, ...]
    rows: Build


@dataclass(frozen=True)
class Query:
    """**Fields:** `order`: which order of rows Polars defines. `rtol`: by how much floats may differ."""

    name: str
    build: Build
    order: Order = "defined"
    rtol: float = 0.0
    choice: Choice | None = None

    def wrong(self, tables: Tables, found: pl.DataFrame, expected: pl.DataFrame) -> str:
        """Returns what is wrong with a result, and nothing if nothing is."""
        if self.choice is None:
            return differences(found, expected, order=self.order, rtol=self.rtol)
        decided = [pl.col(name) for name in self.choice.decided]
        return differences(
            found.select(decided), expected.select(decided), order=self.order, rtol=self.rtol
        ) or missing(found, self.choice.rows(tables).select(found.columns).collect())


def queries(
    found: Mapping[str, Build], *, order: Order = "defined", rtol: float = 0.0, choice: Choice | None = None
) -> list[Query]:
    """Returns queries of which the same is true."""
    return [Query(name, build, order, rtol, choice) for name, build in found.items()]


def checked(found: Sequence[Query]) -> tuple[Query, ...]:
    """Returns the queries, each of which has a name of its own."""
    names = [query.name for query in found]
    assert len(set(names)) == len(names), sorted({name for name in names if names.count(name) > 1})
    return tuple(found)


def sevenths(value: int) -> int:
    """A function of elements that Polars does not know how to write as an expression."""
    return divmod(value, 7)[1]
