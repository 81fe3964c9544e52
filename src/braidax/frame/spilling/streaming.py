"""Tables that are read in batches, once or several times, while a piece of a plan is computed."""

from collections.abc import Callable, Iterator
from typing import Literal

from braidax.frame.plan.nodes import Node, supplied
from braidax.frame.plan.supplying import Reading, first_rows, lazy_of, wanted
from braidax.frame.polars import Schema, pl
from braidax.frame.running import Table
from braidax.frame.spilling.store import blocks

_ROWS = 1 << 13  # that Polars gives at once, before it is known how long they are

Engine = Literal["streaming", "in-memory"]
Batches = Callable[[list[str] | None, "pl.Expr | None"], Iterator["pl.DataFrame"]]
"""Yields of a table, anew, the columns and the rows that are wanted: see `wanted`."""


class Streamed(Reading):
    """What a piece reads of a table that is never in memory as a whole.

    **Arguments:** `schema`: of the table. `batches`: yields it. **Fields:** `batches_of`: the same.
    """

    is_streamed = True

    def __init__(self, schema: Schema, batches: Batches) -> None:
        super().__init__(pl.DataFrame(schema=schema))
        self.batches_of = batches

    @property
    def schema(self) -> Schema:
        """The columns."""
        return self.frame.schema

    def whole(self) -> "pl.DataFrame":
        """Returns all rows."""
        return pl.concat([self.frame, *self.batches_of(None, None)])

    def batches(self) -> Iterator["pl.DataFrame"]:
        """Yields the rows."""
        return self.batches_of(None, None)

    def __call__(
        self, columns: list[str] | None, predicate: "pl.Expr | None", num_rows: int | None, batch_size: int | None
    ) -> Iterator["pl.DataFrame"]:
        """Is the scan's function. See `polars.io.plugins.register_io_source`."""
        del batch_size
        yield wanted(self.frame, columns, predicate)
        if num_rows is None:
            yield from self.batches_of(columns, predicate)
            return
        for batch in first_rows(self.batches_of(None, None), num_rows):
            yield wanted(batch, columns, predicate)


def stream(table: Table, *, most_bytes: int) -> Iterator["pl.DataFrame"]:
    """Yields the rows of a table here, in their order, as they are computed. **Raises:** what Polars does.

    **Arguments:** `most_bytes`: of a batch, about.
    """
    if table.node.kind == "Supplied":
        yield from table.buckets[0][table.node.fields["table"].name].batches()
    else:
        yield from batches_of(lazy_of(table.node, table.buckets[0]), most_bytes=most_bytes)


def batches_of(lazy: "pl.LazyFrame", *, most_bytes: int, engine: Engine = "streaming") -> Iterator["pl.DataFrame"]:
    """Yields the rows of a plan as they are computed. **Arguments, Raises:** as `stream`."""
    yield from blocks(lazy.collect_batches(chunk_size=_ROWS, maintain_order=True, engine=engine), most_bytes)


def computed_on(node: Node, frames: "list[pl.DataFrame]") -> "pl.LazyFrame":
    """Returns the plan of a node whose inputs are these."""
    names = [f"block-{i}" for i in range(len(frames))]
    inputs = [supplied(name, frame.schema) for name, frame in zip(names, frames, strict=True)]
    return lazy_of(node.on(*inputs), {name: Reading(frame) for name, frame in zip(names, frames, strict=True)})
