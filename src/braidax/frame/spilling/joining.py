"""Joins of tables that do not fit: partitions of both sides in turn, a heavy key's in blocks.

This is the hybrid hash join ("Implementation Techniques for Main Memory Database Systems", DeWitt et al. 1984) with
recursive partitioning. A partition that the hash does not make smaller has a heavy key: of its sides the smaller one is
held, block by block, and the other one streams by.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from braidax.frame.operators import joining
from braidax.frame.operators.placing import key_columns, key_hashes, ranks_of, same_dtypes, shared_dtypes
from braidax.frame.operators.small_sides import SHARED, with_all_of_the_right
from braidax.frame.operators.sorting import restored
from braidax.frame.plan.expressions import Expression, is_rowwise, kind_of, polars_of
from braidax.frame.plan.nodes import Node, supplied
from braidax.frame.plan.supplying import schema_of
from braidax.frame.polars import pl
from braidax.frame.running import Table
from braidax.frame.spilling.dealing import begun, deal
from braidax.frame.spilling.partitions import FANOUT, MAX_LEVEL, Partitioned, by_hash, merged, split
from braidax.frame.spilling.running import Spilling
from braidax.frame.spilling.store import Rows
from braidax.frame.spilling.streaming import batches_of, computed_on

_SHRINKS = 0.5  # what a partition is of the rows before, at most, unless it has a heavy key
_PASSES = 8  # parts of a block that stream by one after the other
_KEEPS = {"Inner": (False, False), "Left": (True, False), "Right": (False, True), "Full": (True, True)}
"""Of which side rows without a partner stay."""


def join(spilling: Spilling, node: Node, ordered: bool) -> Table:
    """Joins two tables; where Polars keeps the order of one, so do the ranks."""
    keys = _keys(node)
    how = kind_of(node.fields["options"]["args"]["how"])
    if how == "AsOf" and keys is not None and all(map(is_rowwise, [*keys[0], *keys[1]])):
        return with_all_of_the_right(spilling.runner, node, ordered=True)
    if keys is None or not all(map(is_rowwise, [*keys[0], *keys[1]])) or how not in (*_KEEPS, "Semi", "Anti"):
        return joining.join(spilling.runner, node, ordered)
    args = node.fields["options"]["args"]
    keeps = args["maintain_order"]
    needs = ordered and keeps != "None"
    left, right = (spilling.runner.run(source, ordered=needs) for source in node.inputs)
    node = node.on(left.node, right.node)
    if needs:
        left, right = spilling.indexed(left, joining.LEFT), spilling.indexed(right, joining.RIGHT)
    plain = node.but(options={**node.fields["options"], "args": {**args, "maintain_order": "None"}})
    table = _equi(spilling, plain, left, right, keys)
    if not needs:
        return table
    order = [joining.LEFT, joining.RIGHT] if keeps.startswith("Left") else [joining.RIGHT, joining.LEFT]
    return restored(spilling.runner, table, [name for name in order if name in schema_of(table.node)])


def _keys(node: Node) -> Sequence[Sequence[Expression]] | None:
    """Returns the keys of both sides; None where rows meet by anything else."""
    condition = node.fields["condition"]
    if kind_of(condition) != "Equi" or node.fields["options"]["args"]["slice"] is not None:
        return None
    return condition["Equi"]["left_on"], condition["Equi"]["right_on"]


def _equi(spilling: Spilling, node: Node, left: Table, right: Table, keys: Sequence[Sequence[Expression]]) -> Table:
    node = node.on(left.node, right.node)
    schema_of(node)  # raises what Polars does for keys that do not fit
    shared = _with_all_of_one(spilling, node, left, right)
    if shared is not None:
        return shared
    dtypes = shared_dtypes(left, keys[0], right, keys[1])
    sides = [_dealt(spilling, table, on, dtypes) for table, on in zip((left, right), keys, strict=True)]
    inputs = [supplied(name, side.schema) for name, side in zip(("left", "right"), sides, strict=True)]
    schema = schema_of(node.on(*inputs))
    pairs = _Pairs(spilling, node, keys, dtypes)
    by = key_columns(keys[0]) if pairs.how in SHARED["right"] and same_dtypes(left, keys[0], dtypes) else None

    def batches(columns: list[str] | None, predicate: "pl.Expr | None") -> Iterator["pl.DataFrame"]:
        for lazy in pairs.of(*sides):
            lazy = lazy if predicate is None else lazy.filter(predicate)
            lazy = lazy if columns is None else lazy.select(columns)
            yield from batches_of(lazy, most_bytes=spilling.spill.budget.batch_bytes)

    return spilling.streamed(batches, schema, by)


def _with_all_of_one(spilling: Spilling, node: Node, left: Table, right: Table) -> Table | None:
    """Returns the join where all ranks can have one side; the other one streams by. None where none is so small."""
    args = node.fields["options"]["args"]
    how = kind_of(args["how"])
    if args["validation"] != "ManyToMany":
        return None
    if how in SHARED["right"] and (few := spilling.few(right)) is not None:
        table = spilling.runner.local(node, left, spilling.runner.held(few))
        return Table(table.node, table.buckets, left.keys)
    if how in SHARED["left"] and (few := spilling.few(left)) is not None:
        return spilling.runner.local(node, spilling.runner.held(few), right)
    return None


def _dealt(spilling: Spilling, table: Table, on: Sequence[Expression], dtypes: Sequence[Any]) -> Partitioned:
    """Returns the rows of a side that are this rank's by the hash of their keys."""
    ranks = spilling.ranks
    stays = table.keys is not None and table.keys == key_columns(on) and same_dtypes(table, on, dtypes)
    schema, batches = begun(ranks, spilling.stream(table), schema_of(table.node))
    into = Partitioned(spilling.spill, schema, by_hash(on, dtypes, 0), size=ranks.size)

    def to(batch: "pl.DataFrame") -> "pl.Series":
        if stays:
            return pl.repeat(ranks.rank, batch.height, dtype=pl.UInt32, eager=True)
        return ranks_of(key_hashes(batch, on, dtypes), ranks.size)

    deal(ranks, batches, to, into, schema)
    return into


@dataclass(frozen=True)
class _Pairs:
    """What is joined with what. **Fields:** `node`: the join. `keys`: of both sides. `dtypes`: as which they meet."""

    spilling: Spilling
    node: Node
    keys: Sequence[Sequence[Expression]]
    dtypes: Sequence[Any]

    @property
    def how(self) -> str:
        return kind_of(self.node.fields["options"]["args"]["how"])

    def of(self, left: Partitioned, right: Partitioned) -> Iterator["pl.LazyFrame"]:
        """Yields plans of which all rows are those of the join."""
        if left.is_split and right.is_split:
            whole = min(left.num_bytes(), right.num_bytes())
            parts = ((left.partition(number), right.partition(number)) for number in range(FANOUT))
            for one, other in merged(parts, self._block_bytes):
                yield from self._of_pair(one, other, whole, 1)
        else:
            yield from self._in_blocks((left.all(), right.all()))

    def _of_pair(self, left: Rows, right: Rows, before: int, level: int) -> Iterator["pl.LazyFrame"]:
        """Joins two partitions. **Arguments:** `before`: the bytes of the smaller side of which they are parts."""
        smaller = min(left.num_bytes, right.num_bytes)
        if smaller <= self._block_bytes or smaller > _SHRINKS * before or level > MAX_LEVEL:
            yield from self._in_blocks((left, right))
            return
        sides = [
            split(self.spilling.spill, rows, by_hash(on, self.dtypes, level))
            for rows, on in zip((left, right), self.keys, strict=True)
        ]
        for one, other in merged(zip(*sides, strict=True), self._block_bytes):
            yield from self._of_pair(one, other, smaller, level + 1)

    @property
    def _block_bytes(self) -> int:
        return self.spilling.spill.budget.block_bytes

    def _in_blocks(self, sides: tuple[Rows, Rows]) -> Iterator["pl.LazyFrame"]:
        sizes = [rows.num_bytes for rows in sides]
        if not any(sizes):
            return
        if max(sizes) <= self._block_bytes or self.node.fields["options"]["args"]["validation"] != "ManyToMany":
            yield self._joined(0, sides[0].whole(), sides[1].whole())
        elif self.how in _KEEPS:
            held = 0 if sizes[0] <= sizes[1] else 1
            if sizes[held] <= self._block_bytes:
                yield from self._of_block(held, sides[held].whole(), sides[1 - held])
            else:
                yield from self._of_blocks(held, sides[held], sides[1 - held])
        elif sizes[1] <= self._block_bytes:
            whole = sides[1].whole()
            for block in sides[0].blocks(self._passing_bytes(sizes[1])):
                yield self._joined(0, block, whole)
        else:
            yield from self._tested(*sides)

    def _of_block(self, held: int, block: "pl.DataFrame", others: Rows) -> Iterator["pl.LazyFrame"]:
        """Joins all that there is of one side with the other one's rows, which stream by."""
        stays = _KEEPS[self.how][held]
        rest = block
        for other in others.blocks(self._passing_bytes(int(block.estimated_size()))):
            yield self._joined(held, self._matched(held, block, other, "semi") if stays else block, other)
            rest = self._matched(held, rest, other, "anti") if stays else rest
        if stays:
            yield self._joined(held, rest, pl.DataFrame(schema=others.schema))

    def _passing_bytes(self, held_bytes: int) -> int:
        """Returns how much of a side streams by at once: few rows, but more than the table of the other ones costs."""
        return min(self._block_bytes, max(held_bytes, self._block_bytes // _PASSES))

    def _of_blocks(self, held: int, blocks: Rows, others: Rows) -> Iterator["pl.LazyFrame"]:
        """Joins each block of one side with the other one's rows, which stream by once for each."""
        keeps = _KEEPS[self.how]
        for block in blocks.blocks(self._block_bytes):
            rest = block
            for other in others.blocks(self._block_bytes):
                one = self._matched(held, block, other, "semi") if keeps[held] else block
                two = self._matched(1 - held, other, block, "semi") if keeps[1 - held] else other
                yield self._joined(held, one, two)
                rest = self._matched(held, rest, other, "anti") if keeps[held] else rest
            if keeps[held]:
                yield self._joined(held, rest, pl.DataFrame(schema=others.schema))
        if keeps[1 - held]:
            for rest in others.blocks(self._block_bytes):
                for block in blocks.blocks(self._block_bytes):
                    rest = self._matched(1 - held, rest, block, "anti")
                yield self._joined(held, pl.DataFrame(schema=blocks.schema), rest)

    def _tested(self, left: Rows, right: Rows) -> Iterator["pl.LazyFrame"]:
        """Keeps rows of the left that have a partner in any block of the right, or in none."""
        for rest in left.blocks(self._block_bytes):
            for block in right.blocks(self._block_bytes):
                if self.how == "Semi":
                    yield self._joined(0, rest, block)
                rest = self._matched(0, rest, block, "anti")
            if self.how == "Anti":
                yield rest.lazy()

    def _joined(self, side: int, one: "pl.DataFrame", other: "pl.DataFrame") -> "pl.LazyFrame":
        """Returns the join. **Arguments:** `side`: of the first one."""
        return computed_on(self.node, [one, other] if side == 0 else [other, one])

    def _matched(self, side: int, one: "pl.DataFrame", other: "pl.DataFrame", how: Any) -> "pl.DataFrame":
        """Returns the rows of one that have a partner in the other one, or none."""
        mine, others = ([polars_of(key) for key in self.keys[one_side]] for one_side in (side, 1 - side))
        nulls_equal = self.node.fields["options"]["args"]["nulls_equal"]
        return one.join(other, left_on=mine, right_on=others, how=how, nulls_equal=nulls_equal)
