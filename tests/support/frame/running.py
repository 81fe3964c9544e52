"""A query on several ranks, and whether what it gives is what one process of Polars gives."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl
import pytest

from braidax.comm import Communicator
from braidax.errors import Aborted, CommError
from braidax.frame import collect_partition
from braidax.gang import Gang
from tests.support.comm.ranks import outcomes
from tests.support.frame.queries.query import Query
from tests.support.frame.tables import Tables
from tests.support.frame.worlds import LIMIT_SECONDS, Worlds

ENGINES = ("streaming", "in-memory")  # of Polars: the one it takes by itself, and the other

Outcome = pl.DataFrame | BaseException
"""What a query gives or raises."""


@dataclass(frozen=True)
class Asked:
    """A query of tables. **Fields:** `expected`: what one process gives, by each engine; they need not agree."""

    query: Query
    tables: Tables
    expected: tuple[Outcome, ...]

    @classmethod
    def of(cls, query: Query, tables: Tables) -> "Asked":
        return cls(query, tables, tuple(alone(query.build, tables, engine) for engine in ENGINES))

    def on_ranks(self, size: int, worlds: Worlds) -> None:
        """Fails the test if ranks that are threads give something else."""
        lazy = lazy_or_error(self.query.build, self.tables)
        if isinstance(lazy, BaseException):
            self.check(lazy, f"{size} ranks")
        elif any(isinstance(expected, BaseException) for expected in self.expected):  # an error ends a world
            self.check(united(outcomes(size, asking(lazy), timeout_seconds=LIMIT_SECONDS)), f"{size} ranks")
        else:
            self.check(united(worlds.run(size, asking(lazy))), f"{size} ranks")

    def check(self, found: Outcome, where: str) -> None:
        """Fails the test if that is what no engine gives."""
        wrong = [self._wrong(found, expected) for expected in self.expected]
        if all(wrong):
            plan = lazy_or_error(self.query.build, self.tables)
            pytest.fail(f"{self.query.name!r}, {self.tables.shape.name!r}, {where}: {wrong[0]}\n{_explained(plan)}")

    def _wrong(self, found: Outcome, expected: Outcome) -> str:
        if isinstance(expected, BaseException) or isinstance(found, BaseException):
            return "" if type(found) is type(expected) else f"{_named(found)}, expected {_named(expected)}"
        return self.query.wrong(self.tables, found, expected)


def alone(build: Callable[[Tables], pl.LazyFrame], tables: Tables, engine: Any = "auto") -> Outcome:
    """Returns what one process of Polars gives."""
    return outcome_of(lambda: build(tables).collect(engine=engine))


def outcome_of(compute: Callable[[], pl.DataFrame]) -> Outcome:
    """Returns what a function does, or raises."""
    try:
        return compute()
    except (Exception, pl.exceptions.PanicException) as error:  # noqa: BLE001 (the test compares it)
        return error


def lazy_or_error(build: Callable[[Tables], pl.LazyFrame], tables: Tables) -> pl.LazyFrame | Exception:
    """Returns a query that is not run, or what Polars says to it at once."""
    try:
        return build(tables)
    except Exception as error:  # noqa: BLE001 (the test compares it)
        return error


def asking(lazy: pl.LazyFrame) -> Callable[[Communicator], pl.DataFrame]:
    """Returns what each rank calls."""
    return lambda comm: collect_partition(lazy, comm)


def united(found: Sequence[Any]) -> Outcome:
    """Returns the partitions of all ranks as one table, or the error that ended them: all raise, or none."""
    errors = [outcome for outcome in found if isinstance(outcome, BaseException)]
    if not errors:
        schemas = {tuple(part.schema.items()) for part in found}
        assert len(schemas) == 1, f"partitions of several schemas: {schemas}"
        return pl.concat(found)
    assert len(errors) == len(found), f"some ranks raised and some did not: {[_named(outcome) for outcome in found]}"
    own = [error for error in errors if not isinstance(error, Aborted | CommError)]
    assert own, f"no rank says why: {errors}"
    assert len({type(error) for error in own}) == 1, f"ranks raised several errors: {own}"
    return own[0]


def _named(outcome: Outcome) -> str:
    if isinstance(outcome, pl.DataFrame):
        return f"a table of {outcome.height} rows"
    return f"{type(outcome).__name__}: {str(outcome)[:500]}"


def _explained(lazy: pl.LazyFrame | Exception) -> str:
    try:
        return lazy.explain() if isinstance(lazy, pl.LazyFrame) else ""
    except Exception as error:  # noqa: BLE001 (it may be what the test is about)
        return str(error)


def names_kept(gang: Gang) -> tuple[str, ...]:
    """Returns the names of what a gang keeps, when all that tests have dropped is given up."""
    gc.collect()
    gang.run(_nothing)
    return gang.names()


def _nothing(comm: Communicator) -> None:
    del comm
