"""Distinct rows: dealt by the hash of what must differ."""

from braidax.frame.operators.alone import on_one_rank
from braidax.frame.operators.placing import INDEX, dealt_by_keys, with_index
from braidax.frame.operators.sorting import restored
from braidax.frame.plan.expressions import column, expanded, is_rowwise
from braidax.frame.plan.nodes import Node
from braidax.frame.plan.supplying import schema_of
from braidax.frame.running import Runner, Table


def distinct(runner: Runner, node: Node, ordered: bool) -> Table:
    """Keeps one row of those that are equal in some columns, or none of them."""
    options = node.fields["options"]
    keeps = ordered and options["maintain_order"]
    keep = options["keep_strategy"]
    source = runner.run(node.inputs[0], ordered=keeps or keep in ("First", "Last"))
    schema = schema_of(node.on(source.node))
    subset = options["subset"]
    keys = [column(name) for name in schema] if subset is None else []
    for one in subset or []:
        several = expanded(one, schema)
        if several is None or not all(map(is_rowwise, several)):
            return on_one_rank(runner, node, ordered)
        keys += several
    if not keys:
        return on_one_rank(runner, node, ordered)
    frame = runner.computed(source)
    plain = node.but(options={**options, "maintain_order": False})
    if keeps:
        frame = with_index(runner.ranks, frame)
        plain = plain.but(options={**plain.fields["options"], "subset": keys})
    if keep != "None" and source.keys is None:
        frame = runner.computed(runner.local(in_place(plain), runner.held(frame)))
    table = runner.in_buckets(plain, dealt_by_keys(runner, frame, keys))
    names = [key["Column"] for key in keys if "Column" in key]
    if not keeps:
        return Table(table.node, table.buckets, tuple(names) if len(names) == len(keys) else None)
    return restored(runner, table, [INDEX])


def in_place(node: Node) -> Node:
    """Returns the operation keeping the order of rows, since another one of the same kind follows."""
    return node.but(options={**node.fields["options"], "maintain_order": True})
