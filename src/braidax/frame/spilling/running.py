"""A plan, computed by ranks whose memory is bounded."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

from braidax.frame.moving.ranks import Ranks
from braidax.frame.operators.placing import INDEX
from braidax.frame.plan.nodes import Node
from braidax.frame.plan.supplying import Reading, schema_of, wanted
from braidax.frame.polars import Schema, pl
from braidax.frame.running import Rule, Runner, Table
from braidax.frame.spilling.store import Rows, Spill
from braidax.frame.spilling.streaming import Batches, Streamed, stream

_ONLY = (0, 0)  # the key of the rows of a table that is in no partitions


@final
class Stored(Streamed):
    """A table that waits. **Arguments:** `rows`: the table. `num_rows`: of it."""

    def __init__(self, rows: Rows, num_rows: int) -> None:
        super().__init__(rows.schema, self._read)
        self.rows, self.num_rows = rows, num_rows

    def _read(self, columns: list[str] | None, predicate: "pl.Expr | None") -> Iterator["pl.DataFrame"]:
        for batch in self.rows.batches():
            yield wanted(batch, columns, predicate)


SpillingRule = Callable[["Spilling", Node, bool], Table]
"""Computes a node in bounded memory. See `braidax.frame.running.Rule`."""


@final
class Spilling:
    """Computes the nodes of a plan on this rank in bounded memory: a runner, and what it has no room for.

    All tables are in one bucket. **Arguments:** `spill`: where rows wait. `ranks`, `tables`, `scans`, `rules`,
    `otherwise`: as of `Runner`. `bounded`: rules that come before the others.

    **Fields:** `runner`: computes the nodes; the tables that it keeps wait here.
    """

    def __init__(
        self,
        spill: Spill,
        ranks: Ranks,
        tables: Mapping[str, Table],
        scans: Mapping[Node, Any],
        rules: Mapping[str, Rule],
        otherwise: Rule,
        *,
        bounded: "Mapping[str, SpillingRule]",
    ) -> None:
        self.spill, self.ranks = spill, ranks
        rules = {**rules, **{kind: self._as_rule(rule) for kind, rule in bounded.items()}}
        self.runner = Runner(ranks, tables, scans, rules, otherwise, keep=self.compute)

    def _as_rule(self, rule: SpillingRule) -> Rule:
        return lambda _, node, ordered: self._measured(node, rule(self, node, ordered))

    def _measured(self, node: Node, table: Table) -> Table:
        """Returns the result of a node, whose rows are counted when they are read as they are."""
        reading = reading_of(table)
        if not isinstance(reading, Streamed) or isinstance(reading, Stored):
            return table

        def batches(columns: list[str] | None, predicate: "pl.Expr | None") -> Iterator["pl.DataFrame"]:
            rows = reading.batches_of(columns, predicate)
            return self.ranks.meter.result(node, rows) if predicate is None else rows

        return self.runner.read(Streamed(reading.schema, batches), reading.schema, table.keys)

    def compute(self, table: Table) -> Table:
        """Returns the table with its rows computed: they wait."""
        reading = reading_of(table)
        if reading is not None and (isinstance(reading, Stored) or not isinstance(reading, Streamed)):
            return table
        schema, num_rows = schema_of(table.node), 0
        store, owner = None, self.ranks.meter.owner(table.node)
        for batch in self.stream(table):
            if batch.height and store is None:
                store, schema = self.spill.store(batch.schema, owner=owner), batch.schema
            if store is not None:
                store.append(_ONLY, batch)
            num_rows += batch.height
        rows = Rows(self.spill.store(schema) if store is None else store, (_ONLY,))
        return self.runner.read(Stored(rows, num_rows), schema, table.keys)

    def streamed(self, batches: Batches, schema: Schema, keys: Sequence[str] | None = None) -> Table:
        """Returns what is computed batch by batch, whenever it is read, as a table."""
        meter, owner = self.ranks.meter, self.ranks.meter.owner()

        def measured(columns: list[str] | None, predicate: "pl.Expr | None") -> Iterator["pl.DataFrame"]:
            return meter.batches(owner, batches(columns, predicate))

        return self.runner.read(Streamed(schema, measured), schema, keys)

    def stream(self, table: Table) -> Iterator["pl.DataFrame"]:
        """Yields the rows of a table here, in their order, as they are computed. **Raises:** what Polars does."""
        rows = stream(table, most_bytes=self.spill.budget.batch_bytes)
        return rows if table.node.kind == "Supplied" else self.ranks.meter.piece(table.node, rows)

    def size_of(self, table: Table) -> tuple[int, int]:
        """Returns how many rows and bytes a table has here that is computed."""
        reading = reading_of(table)
        if isinstance(reading, Stored):
            return reading.num_rows, reading.rows.num_bytes
        frame = self.runner.computed(table)
        return frame.height, int(frame.estimated_size())

    def few(self, table: Table) -> "pl.DataFrame | None":
        """Returns the rows of all ranks, where each may have them all, else None; the table can be read again."""
        limit, size = self.spill.budget.block_bytes, 0
        found: list[pl.DataFrame] = []
        for batch in self.stream(table):
            found.append(batch)
            size += int(batch.estimated_size())
            if size > limit:
                break
        if self.ranks.all([size]).sum() > limit:
            return None
        return self.ranks.share(pl.concat(found) if found else pl.DataFrame(schema=schema_of(table.node)))

    def indexed(self, table: Table, name: str = INDEX) -> Table:
        """Returns a table with the places of its rows among those of all ranks."""
        table = self.compute(table)
        first = int(self.ranks.all([self.size_of(table)[0]])[: self.ranks.rank].sum())

        def batches(columns: list[str] | None, predicate: "pl.Expr | None") -> Iterator["pl.DataFrame"]:
            place = first
            for batch in self.stream(table):
                yield wanted(_numbered(batch, name, place), columns, predicate)
                place += batch.height

        schema = pl.Schema({name: pl.Int64(), **schema_of(table.node)})
        return self.streamed(batches, schema, table.keys)


def reading_of(table: Table) -> Reading | None:
    """Returns what a table reads that is nothing else."""
    return table.buckets[0][table.node.fields["table"].name] if table.node.kind == "Supplied" else None


def _numbered(batch: "pl.DataFrame", name: str, first: int) -> "pl.DataFrame":
    return batch.with_row_index(name, offset=first).with_columns(pl.col(name).cast(pl.Int64))
