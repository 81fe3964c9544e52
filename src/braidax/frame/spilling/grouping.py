"""Groups of tables that do not fit: partitions in turn; what blocks have of a group is aggregated before if that pays.

As in "Cache-Efficient Aggregation: Hashing Is Sorting" (Müller et al. 2015), a table is partitioned only as far as its
groups do not become few by aggregating what is at hand.
"""

from collections.abc import Iterator
from itertools import chain

from braidax.frame.operators import grouping
from braidax.frame.operators.grouping import Small, columns_among, repeats
from braidax.frame.operators.placing import INDEX
from braidax.frame.operators.sorting import restored
from braidax.frame.plan.expressions import (
    Expression,
    alias,
    all_expanded,
    column,
    depends_on_order,
    is_rowwise,
    is_scalar,
    names_of,
    written,
)
from braidax.frame.plan.nodes import Node
from braidax.frame.plan.supplying import schema_of
from braidax.frame.polars import pl
from braidax.frame.running import Table
from braidax.frame.spilling.partwise import Fewer, Partwise, computed_by_keys
from braidax.frame.spilling.running import Spilling
from braidax.frame.spilling.store import blocks
from braidax.frame.spilling.streaming import computed_on


def group(spilling: Spilling, node: Node, ordered: bool) -> Table:
    """Aggregates groups."""
    fields = node.fields
    options, keys = fields["options"], fields["keys"]
    keeps = ordered and fields["maintain_order"]
    is_plain = all(options[name] is None for name in ("dynamic", "rolling", "slice")) and fields["apply"] is None
    needs = not is_plain or keeps or any(map(depends_on_order, [*fields["aggs"], *fields["predicates"]]))
    source = spilling.runner.run(node.inputs[0], ordered=needs)
    schema_of(node.on(source.node))  # raises what Polars does
    schema = schema_of(source.node)
    if not is_plain:
        if not keys or not all(map(is_rowwise, keys)) or keeps:
            return grouping.group(spilling.runner, node, ordered)
        return computed_by_keys(spilling, spilling.stream(source), schema, Partwise(node, keys), names=None)
    keys = all_expanded(keys, schema)
    others = {name: dtype for name, dtype in schema.items() if name not in columns_among(keys or ())}
    aggs = all_expanded(fields["aggs"], pl.Schema(others))
    if not keys or aggs is None or not all(map(is_rowwise, keys)) or all(map(is_scalar, keys)):
        return grouping.group(spilling.runner, node, ordered)
    aggs = [alias(one, name) for one, name in zip(aggs, names_of(aggs, schema), strict=True)]
    node = node.but(keys=keys, aggs=aggs, maintain_order=False)
    if not keeps:
        return _groups(spilling, node, source, keys)
    node = node.but(aggs=[*aggs, written(pl.col(INDEX).min())])
    return restored(spilling.runner, _groups(spilling, node, spilling.indexed(source), keys), [INDEX])


def _groups(spilling: Spilling, node: Node, source: Table, keys: list[Expression]) -> Table:
    schema = schema_of(source.node)
    batches = spilling.stream(source)
    small = Small.of(node, schema)
    names = names_of(keys, schema)
    fewer = None if small is None else _fewer(small, node)
    rest = None if small is None else small.after(node, names)
    if source.keys is not None and set(source.keys) <= set(columns_among(keys)):
        what = Partwise(node, keys, fewer, rest)
        return computed_by_keys(spilling, batches, schema, what, names=source.keys, stay=True)
    found = blocks(batches, spilling.spill.budget.block_bytes)
    first = next(found, pl.DataFrame(schema=schema))
    every = chain([first], found)
    if small is None or fewer is None or rest is None or not repeats(spilling.runner, first, keys):
        what = Partwise(node, keys, fewer, rest)
        return computed_by_keys(spilling, every, schema, what, names=tuple(names))
    partial = _aggregated(fewer, every)
    here = schema_of(small.before(node).on(source.node))
    what = Partwise(rest, [column(name) for name in names])
    return computed_by_keys(spilling, partial, here, what, names=tuple(names))


def _fewer(small: Small, node: Node) -> Fewer:
    """Returns what aggregates a block."""
    return lambda block: computed_on(small.before(node), [block]).collect()


def _aggregated(fewer: Fewer, found: Iterator["pl.DataFrame"]) -> Iterator["pl.DataFrame"]:
    for block in found:
        yield fewer(block)
