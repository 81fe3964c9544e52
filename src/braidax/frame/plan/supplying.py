"""Tables that pieces of a plan read by name: scans whose rows a rank gives when it computes the piece."""

import io
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from braidax.frame.plan.nodes import Fields, Node, Supplied, label_of, leaf_of, leaf_that_calls, supplied, write
from braidax.frame.polars import Schema, pl, register_io_source

_TABLES: ContextVar[Mapping[str, "Reading"]] = ContextVar("tables of the piece that this thread reads")


_SCHEMAS: WeakKeyDictionary[Node, Schema] = WeakKeyDictionary()  # of nodes that were asked for, which do not change
_SLICE_ROWS = 1 << 16  # Polars' threads take one slice each


@dataclass
class Reading:
    """A table that a piece reads: rows in memory, which Polars gets as they are.

    **Fields:** `frame`: its rows here. `is_streamed`: whether it has none of them, and gives them when it is called, as
    the function of a scan. See `polars.io.plugins.register_io_source`.
    """

    frame: "pl.DataFrame"
    is_streamed: ClassVar[bool] = False

    @property
    def num_bytes(self) -> float:
        """Returns how many bytes the rows here are, about."""
        return float(self.frame.estimated_size())

    def whole(self) -> "pl.DataFrame":
        """Returns all rows here."""
        return self.frame

    def batches(self) -> Iterator["pl.DataFrame"]:
        """Yields all rows here."""
        return self.frame.iter_slices(_SLICE_ROWS)

    def __reduce__(self) -> Any:
        raise TypeError("a table that is read stays in its process")


@dataclass(frozen=True)
class _Stand:
    """What is written in place of a table."""

    name: str

    def __call__(self, *_: Any) -> Iterator["pl.DataFrame"]:
        raise RuntimeError(f"the table {self.name!r} is read outside of its plan: use braidax.frame.collect")

    def __reduce__(self) -> Any:
        return (_stand, (self.name,))


def _stand(name: str) -> Any:
    """Returns the table of that name, where a piece is being read, else what stands for it."""
    reading = _TABLES.get({}).get(name, _Stand(name))
    return partial(_as_plan, reading.frame) if isinstance(reading, Reading) and not reading.is_streamed else reading


def _as_plan(frame: "pl.DataFrame", _: Any) -> Any:
    """Returns rows as the plan that Polars asks for by `leaf_that_calls`."""
    return frame.lazy()._ldf  # pyright: ignore[reportPrivateUsage]


def wanted(frame: "pl.DataFrame", columns: list[str] | None, predicate: "pl.Expr | None") -> "pl.DataFrame":
    """Returns of some rows what is asked for. **Arguments:** `columns`, `predicate`: None is all."""
    if predicate is not None:
        frame = frame.filter(predicate)
    return frame if columns is None else frame.select(columns)


def first_rows(frames: "Iterator[pl.DataFrame]", num_rows: int) -> "Iterator[pl.DataFrame]":
    """Yields the first rows of some frames, before any of them is filtered: so Polars asks a scan for them."""
    for frame in frames:
        yield frame.head(num_rows)
        num_rows -= frame.height
        if num_rows <= 0:
            return


def scan(name: str, schema: Schema) -> "pl.LazyFrame":
    """Returns a scan of a supplied table, for users' plans."""
    return register_io_source(_Stand(name), schema=schema, is_pure=True, explain_name=label_of(name))


@lru_cache(maxsize=1024)
def _fields(name: str, schema: tuple[tuple[str, Any], ...]) -> Fields:
    return leaf_of(scan(name, pl.Schema(schema)))


@lru_cache(maxsize=1024)
def _given(name: str) -> Fields:
    return leaf_that_calls(_Stand(name))


def _scan_of(table: Supplied) -> Fields:
    return _fields(table.name, tuple(table.schema.items()))


def lazy_of(node: Node, tables: Mapping[str, Reading]) -> "pl.LazyFrame":
    """Returns a plan as Polars' own, which reads these tables."""
    return next(lazy_of_each(node, [tables]))


def lazy_of_each(node: Node, buckets: Sequence[Mapping[str, Reading]]) -> "Iterator[pl.LazyFrame]":
    """Yields a plan as Polars' own for each of several sets of tables: all of a name are in memory, or none."""
    first = buckets[0]
    given = {name for name, reading in first.items() if not reading.is_streamed}
    data = write(node, lambda table: _given(table.name) if table.name in given else _scan_of(table))
    for tables in buckets:
        token = _TABLES.set(tables)
        try:
            plan = pl.LazyFrame.deserialize(io.BytesIO(data))
        finally:
            _TABLES.reset(token)
        yield plan


def bytes_of(node: Node) -> bytes:
    """Returns a plan as Polars writes it, with scans for its supplied tables."""
    return write(node, _scan_of)


def schema_of(node: Node) -> Schema:
    """Returns the columns of a node's result. **Raises:** what Polars does for a plan that cannot be."""
    if node.kind == "Supplied":
        return node.fields["table"].schema
    if node not in _SCHEMAS:
        _SCHEMAS[node] = lazy_of(node.on(*_leaves(node)), {}).collect_schema()
    return _SCHEMAS[node]


def _leaves(node: Node) -> list[Node]:
    """Returns the inputs of a node, with tables in place of those nodes whose columns are known."""
    return [
        supplied(f"known-{i}", _SCHEMAS[source]) if source in _SCHEMAS else source.on(*_leaves(source))
        for i, source in enumerate(node.inputs)
    ]
