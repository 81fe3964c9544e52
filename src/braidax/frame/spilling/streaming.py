"""Tables that are read in batches, once or several times, while a piece of a plan is computed."""

from collections.abc import Callable, Iterator
from typing import Any

from braidax.frame.plan.nodes import Node, supplied
from braidax.frame.plan.supplying import Reading, lazy_of
from braidax.frame.polars import Schema, pl
from braidax.frame.running import Table

_ROWS = 1 << 16  # of a batch, at most
_WIDTHS = {pl.Boolean: 1, pl.Int8: 1, pl.UInt8: 1, pl.Int16: 2, pl.UInt16: 2, pl.Int32: 4, pl.UInt32: 4, pl.Float32: 4}
_LONG = 64  # bytes that a value of other than a fixed length may have

Batches = Callable[[list[str] | None, "pl.Expr | None"], Iterator["pl.DataFrame"]]
"""Yields of a table, anew, the columns and the rows that are wanted: see `wanted`."""


class Streamed(Reading):
    """What a piece reads of a table that is never in memory as a whole.

    **Arguments:** `schema`: of the table. `batches`: yields it.
    """

    def __init__(self, schema: Schema, batches: Batches) -> None:
        super().__init__(pl.DataFrame(schema=schema))
        self._batches = batches

    def whole(self) -> "pl.DataFrame":
        """Returns all rows."""
        return pl.concat([self.frame, *self._batches(None, None)])

    def batches(self) -> Iterator["pl.DataFrame"]:
        """Yields the rows."""
        return self._batches(None, None)

    def __call__(
        self, columns: list[str] | None, predicate: "pl.Expr | None", num_rows: int | None, batch_size: int | None
    ) -> Iterator["pl.DataFrame"]:
        """Is the scan's function. See `polars.io.plugins.register_io_source`."""
        del batch_size
        left = num_rows
        yield wanted(self.frame, columns, predicate)
        for batch in self._batches(columns, predicate):
            yield batch if left is None else batch.head(left)
            if left is not None and (left := left - batch.height) <= 0:
                return


def wanted(frame: "pl.DataFrame", columns: list[str] | None, predicate: "pl.Expr | None") -> "pl.DataFrame":
    """Returns of some rows what is asked for. **Arguments:** `columns`, `predicate`: None is all."""
    if predicate is not None:
        frame = frame.filter(predicate)
    return frame if columns is None else frame.select(columns)


def stream(table: Table, *, most_bytes: int) -> Iterator["pl.DataFrame"]:
    """Yields the rows of a table here, in their order, as they are computed. **Raises:** what Polars does.

    **Arguments:** `most_bytes`: of a batch, about.
    """
    if table.node.kind == "Supplied":
        reading = table.readings[table.node.fields["table"].name]
        yield from reading.batches()
        return
    lazy = lazy_of(table.node, table.readings)
    yield from batches_of(lazy, lazy.collect_schema(), most_bytes=most_bytes)


def batches_of(lazy: "pl.LazyFrame", schema: Schema, *, most_bytes: int) -> Iterator["pl.DataFrame"]:
    """Yields the rows of a plan as they are computed. **Raises:** what Polars does."""
    rows = rows_of_bytes(schema, most_bytes)
    yield from lazy.collect_batches(chunk_size=rows, maintain_order=True, engine="streaming")


def rows_of_bytes(schema: Schema, num_bytes: int) -> int:
    """Returns how many rows have about so many bytes; not more than pay to be moved at once."""
    return max(256, min(_ROWS, num_bytes // max(1, sum(map(_width, schema.values())))))


def streamed(name: str, schema: Schema, batches: Batches) -> Table:
    """Returns a table that is read in batches."""
    return Table(supplied(name, schema), {name: Streamed(schema, batches)})


def computed_on(node: Node, frames: "list[pl.DataFrame]") -> "pl.LazyFrame":
    """Returns the plan of a node whose inputs are these."""
    names = [f"block-{i}" for i in range(len(frames))]
    inputs = [supplied(name, frame.schema) for name, frame in zip(names, frames, strict=True)]
    return lazy_of(node.on(*inputs), {name: Reading(frame) for name, frame in zip(names, frames, strict=True)})


def _width(dtype: Any) -> int:
    if dtype.is_nested() or dtype in (pl.String, pl.Binary):
        return _LONG
    return _WIDTHS.get(dtype.base_type(), 8)
