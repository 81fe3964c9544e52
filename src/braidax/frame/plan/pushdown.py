"""Columns and rows that need not cross an exchange.

Polars itself tells: each part of the plan between two exchanges is given to its optimizer, with empty tables for what
comes over the exchanges; of these it then asks for the columns it needs and the rows that it keeps. The other columns
stay in the plan, so that it means the same, as nulls: those take no time to read, to send or to keep.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from braidax.frame.plan.building import filtered, null, with_columns
from braidax.frame.plan.expressions import Expression, calls_python, written
from braidax.frame.plan.locality import is_local
from braidax.frame.plan.nodes import Interned, Node, supplied, topological
from braidax.frame.plan.supplying import Reading, lazy_of, schema_of
from braidax.frame.polars import msgpack, pl

_RUN = frozenset(
    [
        "Distinct",
        "Filter",
        "GroupBy",
        "HConcat",
        "HStack",
        "Join",
        "MapFunction",
        "MatchToSchema",
        "Pivot",
        "Select",
        "Slice",
        "Sort",
        "Union",
    ]
)


@dataclass
class _Asked(Reading):
    """A table without rows that notes what Polars asks for, as far as it does.

    **Fields:** `columns`, `predicate`: None is all. `num_reads`: how often it did.
    """

    columns: list[str] | None = None
    predicate: "pl.Expr | None" = None
    num_reads: int = 0
    is_streamed: ClassVar[bool] = True

    def __call__(
        self, columns: list[str] | None, predicate: "pl.Expr | None", num_rows: int | None, *_: Any
    ) -> "Iterator[pl.DataFrame]":
        self.num_reads += 1
        self.columns, self.predicate = columns, predicate if num_rows is None else None  # which is of the first rows
        yield self.frame if columns is None else self.frame.select(columns)


@dataclass
class _Request:
    """What is wanted of a node. **Fields:** `columns`: None is all. `predicates`: of each that asks."""

    columns: set[str] | None = field(default_factory=set)
    predicates: list[Expression | None] = field(default_factory=list)

    def add(self, columns: set[str] | None, predicate: Expression | None) -> None:
        """Adds what one more wants."""
        self.columns = None if self.columns is None or columns is None else self.columns | columns
        self.predicates.append(predicate)


def pushed_down(root: Node) -> Node:
    """Returns the same plan, in which each exchange moves only columns and rows that are needed behind it.

    **Raises:** what Polars does for a plan that cannot be.
    """
    schema_of(root)
    return _Pushing(root).run()


def _may_run(node: Node) -> bool:
    """Returns whether a node may be computed on empty tables: it writes nothing, and calls no function of a user."""
    return node.kind == "Supplied" or (
        node.kind in _RUN and node.fields.get("apply") is None and not calls_python(node.fields)
    )


class _Pushing:
    def __init__(self, root: Node) -> None:
        self._root = root
        self._requests: dict[int, _Request] = {}
        self._uses: dict[tuple[int, int], _Request] = {}  # what an exchange wants of one of its inputs
        self._interned = Interned()
        self._new: dict[int, Node] = {}

    def run(self) -> Node:
        order = topological(self._root)
        borders = {id(source) for node in order if not is_local(node) for source in node.inputs}
        self._borders = borders | {id(self._root)}
        self._requests[id(self._root)] = _Request(None, [None])
        for node in reversed(order):
            if id(node) in self._borders and node.kind != "Supplied":
                self._ask(node)
        return self._rebuilt(self._root)

    def _wanted(self, node: Node, request: _Request) -> Node:
        """Returns a node of which only what is wanted is left."""
        predicates = {msgpack.encode(one): one for one in request.predicates}
        if len(predicates) == 1 and (only := next(iter(predicates.values()))) is not None:
            node = filtered(node, only)
        if request.columns is not None:
            schema = schema_of(node)
            unused = [name for name in schema if name not in request.columns]
            node = with_columns(node, [null(schema[name], name) for name in unused]) if unused else node
        return node

    def _ask(self, top: Node) -> None:
        """Lets Polars say what this part of the plan, up to the next exchanges, wants of them."""
        inputs: dict[str, tuple[Node, Node]] = {}
        part = self._cut(self._wanted(top, self._requests[id(top)]), inputs, top)
        leaves = [node for node in topological(part) if node.kind == "Supplied"]
        tables = [node.fields["table"] for node in leaves]
        readings = {table.name: _Asked(pl.DataFrame(schema=table.schema)) for table in tables}
        if inputs and all(map(_may_run, topological(part))):
            try:
                lazy_of(part, readings).collect(engine="in-memory")  # which takes a third of the time for no rows
            except pl.exceptions.PolarsError:
                readings = {}
        else:
            readings = {}
        self._note(inputs, readings)

    def _cut(self, node: Node, inputs: dict[str, tuple[Node, Node]], top: Node) -> Node:
        """Returns a part with tables in place of what comes over exchanges.

        **Arguments:** `inputs`: gets, by the names of the tables, who reads what.
        """
        sources: list[Node] = []
        for source in node.inputs:
            if id(source) not in self._borders or source is top:
                sources.append(self._cut(source, inputs, top))
                continue
            name = next((one for one, (_, other) in inputs.items() if other is source), f"border-{len(inputs)}")
            inputs[name] = (node, source)
            sources.append(supplied(name, schema_of(source)))
        return node.on(*sources)

    def _note(self, inputs: Mapping[str, tuple[Node, Node]], readings: Mapping[str, _Asked]) -> None:
        for name, (reader, node) in inputs.items():
            reading = readings.get(name)
            columns, predicate = None, None
            if reading is not None and reading.num_reads == 1:
                columns = None if reading.columns is None else set(reading.columns)
                predicate = None if reading.predicate is None else written(reading.predicate)
            self._requests.setdefault(id(node), _Request()).add(columns, predicate)
            if not is_local(reader):
                self._uses.setdefault((id(reader), id(node)), _Request()).add(columns, predicate)

    def _rebuilt(self, node: Node) -> Node:
        """Returns the node on inputs of which only what is wanted is left."""
        if id(node) not in self._new:
            inputs: list[Node] = []
            for source in node.inputs:
                new = self._rebuilt(source)
                of_all = self._requests[id(source)] if id(source) in self._borders else None
                if of_all is not None and source.kind != "Supplied":
                    new = self._interned(self._wanted(new, of_all))
                use = self._uses.get((id(node), id(source)))
                if use is not None and (use != of_all or source.kind == "Supplied"):
                    new = self._interned(self._wanted(new, use))
                inputs.append(new)
            self._new[id(node)] = self._interned(node.on(*inputs) if inputs else node)
        return self._new[id(node)]
