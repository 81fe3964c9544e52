"""`select`, `with_columns` and `filter` whose expressions look at other rows than their own."""

from collections.abc import Sequence

from braidax.frame.operators.alone import on_one_rank
from braidax.frame.operators.hidden import NotSpread, take_out
from braidax.frame.plan.building import HIDDEN, filtered, with_columns, without
from braidax.frame.plan.expressions import Expression, alias, column, expanded, is_rowwise, is_scalar, names_of
from braidax.frame.plan.nodes import Node
from braidax.frame.plan.supplying import schema_of
from braidax.frame.running import Runner, Table


def select(runner: Runner, node: Node, ordered: bool) -> Table:
    """Selects; what is one value for all rows is one row, on rank 0."""
    source = runner.run(node.inputs[0], ordered=True)
    named = _named(node.on(source.node), source, node.fields["expr"])
    if named is None:
        return on_one_rank(runner, node, ordered)
    are_scalar = all(map(is_scalar, named))
    try:
        taken = take_out(runner, source, named)
    except NotSpread:
        return on_one_rank(runner, node, ordered)
    fields = node.but(expr=taken.expressions)
    if not are_scalar:
        return runner.local(fields, taken.table)
    frame = runner.computed(runner.local(fields, taken.table))
    return runner.held(frame if runner.ranks.rank == 0 else frame.clear())


def stack(runner: Runner, node: Node, ordered: bool) -> Table:
    """Adds columns."""
    source = runner.run(node.inputs[0], ordered=True)
    named = _named(node.on(source.node), source, node.fields["exprs"])
    if named is None:
        return on_one_rank(runner, node, ordered)
    try:
        taken = take_out(runner, source, named)
    except NotSpread:
        return on_one_rank(runner, node, ordered)
    done = runner.local(node.but(exprs=taken.expressions), taken.table)
    return runner.local(without(done.node, taken.hidden), done) if taken.hidden else done


def filter_(runner: Runner, node: Node, ordered: bool) -> Table:
    """Keeps rows."""
    if len(node.inputs) != 1:
        return on_one_rank(runner, node, ordered)
    source = runner.run(node.inputs[0], ordered=True)
    named = _named(node.on(source.node), source, [node.fields["predicate"]])
    if named is None or len(named) != 1:
        return on_one_rank(runner, node, ordered)
    try:
        taken = take_out(runner, source, named)
    except NotSpread:
        return on_one_rank(runner, node, ordered)
    name = HIDDEN + "predicate"
    tested = runner.local(with_columns(taken.table.node, [alias(taken.expressions[0], name)]), taken.table)
    kept = runner.local(filtered(tested.node, column(name)), tested)
    return runner.local(without(kept.node, [*taken.hidden, name]), kept)


def _named(node: Node, source: Table, expressions: Sequence[Expression]) -> list[Expression] | None:
    """Returns the expressions, each for one column, under the names of what they give."""
    schema_of(node)  # raises what Polars does
    schema = schema_of(source.node)
    found: list[Expression] = []
    for one in expressions:
        several = [one] if is_rowwise(one) and not is_scalar(one) else expanded(one, schema)
        if several is None:
            return None
        for each in several:
            if is_rowwise(each) and not is_scalar(each):
                found.append(each)
            else:
                (name,) = names_of([each], schema)
                found.append(alias(each, name))
    return found


__all__ = ["filter_", "select", "stack"]
