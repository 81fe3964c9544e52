"""Distinct rows of tables that do not fit: partitions in turn."""

from collections.abc import Iterator

from braidax.frame.operators import uniqueness
from braidax.frame.operators.placing import INDEX
from braidax.frame.operators.sorting import restored
from braidax.frame.operators.uniqueness import in_place
from braidax.frame.plan.expressions import Expression, column, expanded, is_rowwise
from braidax.frame.plan.nodes import Node
from braidax.frame.plan.supplying import schema_of
from braidax.frame.polars import Schema, pl
from braidax.frame.running import Table
from braidax.frame.spilling.partwise import Partwise, computed_by_keys
from braidax.frame.spilling.running import Spilling
from braidax.frame.spilling.store import blocks
from braidax.frame.spilling.streaming import computed_on


def distinct(spilling: Spilling, node: Node, ordered: bool) -> Table:
    """Keeps one row of those that are equal in some columns, or none of them."""
    options = node.fields["options"]
    keeps = ordered and options["maintain_order"]
    keep = options["keep_strategy"]
    source = spilling.runner.run(node.inputs[0], ordered=keeps or keep in ("First", "Last"))
    keys = _keys(node, schema_of(node.on(source.node)))
    if not keys:
        return uniqueness.distinct(spilling.runner, node, ordered)
    plain = node.but(options={**options, "maintain_order": False})
    if keeps:
        source = spilling.indexed(source)
        plain = plain.but(options={**plain.fields["options"], "subset": keys})
    one = in_place(plain)

    def fewer(block: "pl.DataFrame") -> "pl.DataFrame":
        return computed_on(one, [block]).collect()

    def first(found: Iterator["pl.DataFrame"]) -> Iterator["pl.DataFrame"]:
        for block in found:
            yield fewer(block)

    batches = spilling.stream(source)
    what = Partwise(plain, keys)
    if keep != "None":
        what = Partwise(plain, keys, fewer, plain)
        batches = first(blocks(batches, spilling.spill.budget.block_bytes))
    names = [key["Column"] for key in keys if "Column" in key]
    by = tuple(names) if len(names) == len(keys) and not keeps else None
    table = computed_by_keys(spilling, batches, schema_of(source.node), what, names=by)
    return restored(spilling.runner, table, [INDEX]) if keeps else table


def _keys(node: Node, schema: Schema) -> list[Expression] | None:
    """Returns what must differ; None where that depends on other rows."""
    subset = node.fields["options"]["subset"]
    keys = [column(name) for name in schema] if subset is None else []
    for one in subset or []:
        several = expanded(one, schema)
        if several is None or not all(map(is_rowwise, several)):
            return None
        keys += several
    return keys
