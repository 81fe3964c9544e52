"""Expressions that look at other rows: computed into hidden columns, or into values, before what uses them.

Of an expression that looks at other rows, the innermost parts that do so are taken out: one value for all rows
(`sum`), one for each group (`over`), or one for each row (`shift`). What is left looks at one row alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from braidax.frame.moving.ranks import Ranks
from braidax.frame.operators.alone import compute_first
from braidax.frame.operators.neighbors import with_neighbors
from braidax.frame.operators.placing import destinations
from braidax.frame.operators.prefixes import carried_on
from braidax.frame.plan.building import HIDDEN, select, select_columns, value_of, with_columns
from braidax.frame.plan.expressions import (
    Expression,
    aggregation,
    alias,
    column,
    columns_of,
    is_rowwise,
    is_rowwise_itself,
    is_scalar,
    kind_of,
    parts,
    polars_of,
    with_parts,
    written,
)
from braidax.frame.plan.supplying import schema_of
from braidax.frame.plan.ways import way_of
from braidax.frame.polars import pl
from braidax.frame.running import Runner, Table

_Beside = Callable[[Ranks, "pl.DataFrame", Expression, str], "pl.DataFrame"]
"""Computes a column with rows of other ranks. **Arguments:** the columns that are read, the expression, its name."""


class NotSpread(Exception):
    """An expression that only one rank can compute. **Arguments:** what of it."""


@dataclass
class Taken:
    """Expressions whose parts have been taken out. **Fields:** `table`: with the hidden columns they use."""

    table: Table
    expressions: list[Expression]
    hidden: list[str]


def computed_beside(runner: Runner, table: Table, expressions: Sequence[Expression]) -> tuple[Table, list[Expression]]:
    """Returns a table with hidden columns for those expressions that look at other rows, and what to use for each."""
    used: list[Expression] = []
    for expression in expressions:
        if is_rowwise(expression):
            used.append(expression)
            continue
        taken = take_out(runner, table, [expression], prefix=f"key-{len(used)}-part")
        name = f"{HIDDEN}key-{len(used)}"
        table = runner.local(with_columns(taken.table.node, [alias(taken.expressions[0], name)]), taken.table)
        used.append(column(name))
    return table, used


def take_out(runner: Runner, table: Table, expressions: Sequence[Expression], *, prefix: str = "part") -> Taken:
    """Replaces the parts that look at other rows by hidden columns and values.

    **Arguments:** `table`: its rows are in order. `expressions`: without selectors.

    **Raises:** `NotSpread` for a part that gives neither one value nor one for each row.
    """
    table = runner.compute(table)
    taking = _Taking(runner, table, prefix)
    new = [taking.replaced(one) for one in expressions]
    return Taken(taking.table, new, taking.hidden)


class _Taking:
    def __init__(self, runner: Runner, table: Table, prefix: str) -> None:
        self._runner = runner
        self.table = table
        self._prefix = prefix
        self.hidden: list[str] = []

    def replaced(self, expression: Expression) -> Expression:
        """Returns what is left of an expression."""
        if is_rowwise(expression):
            return expression
        if is_rowwise_itself(expression) and parts(expression):
            if kind_of(expression) == "KeepName":
                return alias(self.replaced(parts(expression)[0]), polars_of(expression).meta.root_names()[0])
            return with_parts(expression, [self.replaced(part) for part in parts(expression)])
        new = self._value(expression) if is_scalar(expression) else self._column(expression)
        return alias(new, polars_of(expression).meta.output_name())

    def _value(self, expression: Expression) -> Expression:
        """Returns one value for all rows."""
        found = aggregation(expression)
        if way_of(expression) == "combined":
            of = self.replaced(found[1]) if found is not None else None
            return self._combined(expression, found[0] if found else "Len", of)
        self._note_alone(expression)
        columns = self._columns_of(expression)
        frame = self._runner.computed(self._runner.local(select_columns(self.table.node, columns), self.table))
        whole = self._runner.ranks.gather(frame)
        node = select(self._runner.held(whole).node, [alias(expression, "value")])
        return value_of(self._runner.ranks.share(compute_first(self._runner, node, [whole])), "value")

    def _combined(self, expression: Expression, name: str, of: Expression | None) -> Expression:
        """Returns an aggregation of all rows, made of those of the ranks."""
        runner = self._runner
        dtype = schema_of(select(self.table.node, [alias(expression, "value")]))["value"]
        if name == "Mean":
            if not dtype.is_float():
                raise NotSpread(f"{polars_of(expression)}")
            inner = polars_of(of).cast(pl.Float64)
            sums = [inner.sum().alias("value"), polars_of(of).count().alias("count")]
        elif of is None:
            sums = [pl.len().alias("value")]
        else:
            sums = [polars_of(_again(expression, of)).alias("value")]
        mine = runner.computed(runner.local(select(self.table.node, [written(one) for one in sums]), self.table))
        every = runner.ranks.share(mine)
        if name == "Mean":
            value = every.select(
                pl.when(pl.col("count").sum() > 0).then(pl.col("value").sum() / pl.col("count").sum()).cast(dtype)
            )
        else:
            combined = pl.sum("value")
            if name in ("Min", "Max"):
                combined = polars_of(_again(expression, column("value")))
            value = every.select(combined.cast(dtype))
        return value_of(value, "value")

    def _column(self, expression: Expression) -> Expression:
        """Returns a hidden column with one value for each row."""
        way = way_of(expression)
        if way == "table":
            raise NotSpread(f"{polars_of(expression)}")
        if way in ("neighbors", "carried"):
            return self._of_rows_beside(expression, with_neighbors if way == "neighbors" else carried_on)
        name = f"{HIDDEN}{self._prefix}-{len(self.hidden)}"
        columns = self._columns_of(expression)
        runner = self._runner
        frame = runner.computed(runner.local(select_columns(self.table.node, columns), self.table))
        if way == "dealt":
            mine = self._over(frame, expression, expression["Over"]["partition_by"], name)
        else:
            self._note_alone(expression)
            mine = self._on_one_rank(frame, expression, name)
        return self._added(mine, name)

    def _added(self, mine: "pl.DataFrame", name: str) -> Expression:
        """Adds a hidden column to the table."""
        whole = pl.concat([self._runner.computed(self.table), mine], how="horizontal")
        self.table = self._runner.held(whole, self.table.keys)
        self.hidden.append(name)
        return column(name)

    def _of_rows_beside(self, expression: Expression, compute: _Beside) -> Expression:
        """Returns a hidden column for which ranks need some rows of others: what it is computed of comes before."""
        runner = self._runner
        new = [_unnamed(self.replaced(part)) for part in parts(expression)]
        read = {str(i): part for i, part in enumerate(new) if not is_scalar(part)}
        node = select(self.table.node, [alias(part, name) for name, part in read.items()])
        frame = self._settled(runner.computed(runner.local(node, self.table)))
        of = with_parts(expression, [column(str(i)) if str(i) in read else part for i, part in enumerate(new)])
        name = f"{HIDDEN}{self._prefix}-{len(self.hidden)}"
        return self._added(self._settled(compute(runner.ranks, frame, of, name)), name)

    def _settled(self, frame: "pl.DataFrame") -> "pl.DataFrame":
        """Returns rows of which those ranks that have none take the dtypes of the others."""
        schema, _ = self._runner.ranks.agreed(frame.schema, num_rows=frame.height)
        return frame if frame.height else pl.DataFrame(schema=schema)

    def _over(
        self, frame: "pl.DataFrame", expression: Expression, keys: Sequence[Expression], name: str
    ) -> "pl.DataFrame":
        """Deals the rows by the keys of a window, and sends what it gives for each back to its place."""
        ranks = self._runner.ranks
        to = destinations(frame, keys, ranks.size)
        parts_ = [frame.filter(to == rank) for rank in range(ranks.size)]
        came = ranks.swap(parts_, frame.schema)
        results = pl.concat(came).select(polars_of(expression).alias(name))
        back = ranks.send_back(results, [one.height for one in came])
        stable = pl.DataFrame({"to": to}).with_row_index("row").sort("to", maintain_order=True)["row"]
        return pl.DataFrame({"row": stable, name: back[name]}).sort("row").select(name)

    def _on_one_rank(self, frame: "pl.DataFrame", expression: Expression, name: str) -> "pl.DataFrame":
        """Lets rank 0 compute a column for all, of the columns it needs."""
        runner = self._runner
        lengths = runner.ranks.all([frame.height])[:, 0].astype(int).tolist()
        whole = runner.ranks.gather(frame)
        node = select(runner.held(whole).node, [alias(expression, name)])
        result = compute_first(runner, node, [whole])
        if runner.ranks.rank == 0 and result.height != whole.height:
            raise NotSpread(f"{polars_of(expression)}")
        return runner.ranks.send_back(result, lengths if runner.ranks.rank == 0 else [0] * runner.ranks.size)

    def _note_alone(self, expression: Expression) -> None:
        self._runner.ranks.meter.alone(lambda: str(polars_of(expression)))

    def _columns_of(self, expression: Expression) -> list[str]:
        """Returns the columns that are read, at least one, so that the number of rows is known."""
        names = list(schema_of(self.table.node))
        used = [name for name in columns_of(expression) if name in names]
        return used or names[:1]


def _unnamed(expression: Expression) -> Expression:
    """Returns what an expression gives, whatever its name."""
    while kind_of(expression) in ("Alias", "KeepName", "RenameAlias"):
        (expression,) = parts(expression)
    return expression


def _again(expression: Expression, of: Expression) -> Expression:
    """Returns the same aggregation of something else."""
    if kind_of(expression) == "Function":
        return {"Function": {**expression["Function"], "input": [of]}}
    ((name, value),) = expression["Agg"].items()
    return {"Agg": {name: {**value, "input": of} if isinstance(value, dict) and "input" in value else of}}


__all__ = ["NotSpread", "Taken", "computed_beside", "take_out"]
