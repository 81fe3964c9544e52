"""A plan, computed by ranks: local pieces go to Polars whole, what lies between them exchanges rows."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from braidax.frame.moving.ranks import Ranks
from braidax.frame.moving.threads import each
from braidax.frame.plan.engines import streams_wrong
from braidax.frame.plan.expressions import calls_python
from braidax.frame.plan.layout import Ranges, keys_behind, ranges_behind, ranges_wanted
from braidax.frame.plan.locality import is_local
from braidax.frame.plan.nodes import Node, supplied, topological
from braidax.frame.plan.supplying import Reading, lazy_of_each
from braidax.frame.polars import Schema, pl
from braidax.frame.summing.grouped import with_groups


@dataclass(frozen=True)
class Table:
    """Rows that are spread over the ranks: what this rank has of them, as far as it is computed.

    **Fields:** `node`: what is still to be computed of the rows here. `buckets`: what it reads, for each part of the
    rows that is computed on its own: one, or so many that each fits into a cache. `keys`: columns by the hash of which
    rows lie, so that those in which they are equal are in one bucket of one rank; None if none are known. `ranges`: in
    which rows lie, so that the same holds for one column; None if in none.
    """

    node: Node
    buckets: tuple[Mapping[str, Reading], ...]
    keys: tuple[str, ...] | None = None
    ranges: Ranges | None = None


Rule = Callable[["Runner", Node, bool], Table]
"""Computes a node that is not local. **Arguments:** of the last one: whether the order of the rows matters."""


class Runner:
    """Computes the nodes of a plan on this rank, as all of two or more ranks do at once.

    **Arguments:** `ranks`: the exchanges. `tables`: the partitions here of the tables that the plan reads, by name.
    `scans`: what is known of those that read files, for their rules. `rules`: how nodes are computed that are not
    local, by kind. `otherwise`: how all other nodes are. `keep`: computes the rows of a table and keeps them until they
    are read; None keeps them in memory.
    """

    def __init__(
        self,
        ranks: Ranks,
        tables: Mapping[str, Table],
        scans: Mapping[Node, Any],
        rules: Mapping[str, Rule],
        otherwise: Rule,
        *,
        keep: Callable[[Table], Table] | None = None,
    ) -> None:
        self.ranks, self.scans = ranks, scans
        self._keep = keep
        self._meter = ranks.meter
        self._tables = tables
        self._rules, self._otherwise = rules, otherwise
        self._known: dict[int, tuple[bool, Table, Node]] = {}
        self._num_uses: Counter[int] = Counter()
        self._num_left: Counter[int] = Counter()  # of these uses, that are to come
        self._wanted: dict[int, Ranges] = {}
        self._num_held = 0

    def begin(self, root: Node) -> Table:
        """Returns the result of a plan, as far as other ranks are needed for it."""
        self._meter.begins(root)
        for node in topological(root):
            self._num_uses.update(map(id, node.inputs))
        self._num_left.update(self._num_uses)
        self._wanted = ranges_wanted(root) if self._keep is None else {}
        return self.run(root, ordered=True)

    def collect(self, root: Node) -> "tuple[pl.DataFrame, tuple[str, ...] | None]":
        """Returns the rows of the result that are this rank's, and the keys by which they are spread."""
        table = self.begin(root)
        return self.computed(table), table.keys

    def run(self, node: Node, *, ordered: bool) -> Table:
        """Returns the result of a node.

        **Arguments:** `ordered`: whether the rows of all ranks, one after the other, must be in Polars' order, where
        Polars defines one.
        """
        known = self._known.get(id(node))
        if known is not None and (known[0] or not ordered):
            return known[1]
        with self._meter.operation(node):
            if node.kind == "Supplied":
                table = self._tables[node.fields["table"].name]
            elif is_local(node):
                table = self.local(node, self.run(node.inputs[0], ordered=ordered))
            else:
                table = self._rules.get(node.kind, self._otherwise)(self, node, ordered)
        self._meter.gave(node, table.node, _rows_of(table))
        if self._num_uses[id(node)] > 1 and node.kind != "Supplied":
            table = self.compute(table)
        is_new = id(node) not in self._known
        self._known[id(node)] = (ordered, table, node)
        for source in node.inputs:  # whose rows go as soon as nobody reads them
            self._num_left[id(source)] -= is_new
            if self._num_left[id(source)] <= 0:
                self._known.pop(id(source), None)
        return table

    def wanted(self, node: Node) -> Ranges | None:
        """Returns the ranges in which the rows of a node of the plan had better lie, for what follows."""
        return self._wanted.get(id(node))

    def run_on(self, node: Node, *inputs: Table) -> Table:
        """Returns the result of a node whose inputs have been computed, in order."""
        for table in inputs:
            self._known[id(table.node)] = (True, table, table.node)
        return self.run(node, ordered=True)

    def local(self, node: Node, *inputs: Table) -> Table:
        """Returns the result of a node of which each rank computes its own part."""
        if not is_local(node.on(*(table.node for table in inputs))):
            inputs = tuple(self.held(self.computed(one), one.keys) if len(one.buckets) > 1 else one for one in inputs)
        return self.in_buckets(node, *inputs)

    def in_buckets(self, node: Node, *inputs: Table) -> Table:
        """Returns the result of a node of which each bucket is computed on its own: all inputs have as many."""
        buckets = tuple(
            {name: reading for readings in several for name, reading in readings.items()}
            for several in zip(*(table.buckets for table in inputs), strict=True)
        )
        keys = keys_behind(node, inputs[0].keys) if len(inputs) == 1 else None
        ranges = ranges_behind(node, inputs[0].ranges) if len(inputs) == 1 else None
        made = node.on(*(table.node for table in inputs))
        self._meter.made(made)
        return Table(made, buckets, keys, ranges)

    def held(self, frame: "pl.DataFrame", keys: Sequence[str] | None = None) -> Table:
        """Returns rows that are computed as a table."""
        return self.held_in_buckets([frame], keys)

    def held_in_buckets(self, frames: "Sequence[pl.DataFrame]", keys: Sequence[str] | None = None) -> Table:
        """Returns buckets of rows that are computed as a table."""
        return self._read([Reading(frame) for frame in frames], frames[0].schema, keys)

    def read(self, reading: Reading, schema: Schema, keys: Sequence[str] | None = None) -> Table:
        """Returns what a piece of the plan reads as a table."""
        return self._read([reading], schema, keys)

    def _read(self, readings: Sequence[Reading], schema: Schema, keys: Sequence[str] | None) -> Table:
        self._num_held += 1
        name = f"piece-{self._num_held}"
        buckets = tuple({name: reading} for reading in readings)
        return Table(supplied(name, schema), buckets, None if keys is None else tuple(keys))

    def computed(self, table: Table) -> "pl.DataFrame":
        """Returns the rows of a table here, one bucket after the other. **Raises:** what Polars does."""
        if table.node.kind == "Supplied":
            name = table.node.fields["table"].name
            return _whole([readings[name].whole() for readings in table.buckets])
        return self._meter.local(table.node, lambda: _whole(self._computed_buckets(table)))

    def _computed_buckets(self, table: Table) -> "list[pl.DataFrame]":
        num_threads = self.ranks.num_threads
        node, buckets = table.node, table.buckets
        if any(calls_python(node.fields) for node in topological(table.node)):
            num_threads = 1  # a user's function may count on it
        elif self._keep is None:
            node, buckets = with_groups(node, buckets, num_threads=num_threads)
        if node.kind == "Supplied":
            return [tables[node.fields["table"].name].whole() for tables in buckets]
        engine = "in-memory" if streams_wrong(node) else "auto"
        return each(lambda lazy: lazy.collect(engine=engine), lazy_of_each(node, buckets), num_threads)

    def compute(self, table: Table) -> Table:
        """Returns the table with its rows computed."""
        if self._keep is not None:
            return self._keep(table)
        if table.node.kind == "Supplied":
            return table
        frames: list[pl.DataFrame] = []

        def compute() -> "pl.DataFrame":
            frames.extend(_typed(self._computed_buckets(table)))
            return _whole(frames)

        self._meter.local(table.node, compute)
        return replace(self.held_in_buckets(frames, table.keys), ranges=table.ranges)


def _whole(frames: "Sequence[pl.DataFrame]") -> "pl.DataFrame":
    return frames[0] if len(frames) == 1 else pl.concat(_typed(frames), rechunk=False)


def _typed(frames: "Sequence[pl.DataFrame]") -> "list[pl.DataFrame]":
    """Returns buckets with the dtypes of those that have rows: a user's function may have told none without."""
    full = next((frame for frame in frames if frame.height), frames[0])
    return [frame if frame.height else full.clear() for frame in frames]


def _rows_of(table: Table) -> "pl.DataFrame | None":
    """Returns the rows here, if they are in memory."""
    if table.node.kind != "Supplied":
        return None
    name = table.node.fields["table"].name
    readings = [readings[name] for readings in table.buckets]
    return None if any(one.is_streamed for one in readings) else _whole([one.frame for one in readings])
