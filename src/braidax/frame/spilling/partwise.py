"""What is computed of all rows with equal keys: partition by partition."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from braidax.frame.operators.placing import key_hashes, ranks_of
from braidax.frame.plan.engines import streams_wrong
from braidax.frame.plan.expressions import Expression
from braidax.frame.plan.nodes import Node, supplied
from braidax.frame.plan.supplying import schema_of
from braidax.frame.polars import Schema, pl
from braidax.frame.running import Table
from braidax.frame.spilling.dealing import begun, deal
from braidax.frame.spilling.partitions import FANOUT, MAX_LEVEL, Partitioned, by_hash, merged, split
from braidax.frame.spilling.running import Spilling
from braidax.frame.spilling.store import Rows
from braidax.frame.spilling.streaming import batches_of, computed_on

_SHRINKS = 0.5  # what a partition is of the rows before, at most, unless it has a heavy key

Fewer = Callable[["pl.DataFrame"], "pl.DataFrame"]
"""Returns rows of which the same comes as of others, but fewer."""


@dataclass(frozen=True)
class Partwise:
    """What is computed.

    **Fields:** `node`: of the rows of some keys at once. `keys`: rows in which they are equal are needed at once.
    `fewer`, `rest`: what blocks of such rows are made first, and the node of all that; None where a block says nothing.
    """

    node: Node
    keys: Sequence[Expression]
    fewer: Fewer | None = None
    rest: Node | None = None


def computed_by_keys(
    spilling: Spilling,
    batches: Iterator["pl.DataFrame"],
    schema: Schema,
    what: Partwise,
    *,
    names: tuple[str, ...] | None,
    stay: bool = False,
) -> Table:
    """Returns a table of which all rows with equal keys are computed at once.

    **Arguments:** `batches`: the rows here; `schema`: of them, as the plan tells. `names`: the columns of the result
    that are the keys, or None. `stay`: whether all rows with equal keys lie on one rank already.
    """
    ranks, keys = spilling.ranks, what.keys
    schema, batches = begun(ranks, batches, schema)
    into = Partitioned(spilling.spill, schema, by_hash(keys, None, 0), size=ranks.size)

    def to(batch: "pl.DataFrame") -> "pl.Series":
        if stay:
            return pl.repeat(ranks.rank, batch.height, dtype=pl.UInt32, eager=True)
        return ranks_of(key_hashes(batch, keys), ranks.size)

    deal(ranks, batches, to, into, schema)
    pieces = _Pieces(spilling, what)
    engine = "in-memory" if streams_wrong(what.node) else "streaming"

    def every(columns: list[str] | None, predicate: "pl.Expr | None") -> Iterator["pl.DataFrame"]:
        for lazy in pieces.of(into):
            lazy = lazy if predicate is None else lazy.filter(predicate)
            lazy = lazy if columns is None else lazy.select(columns)
            yield from batches_of(lazy, most_bytes=spilling.spill.budget.batch_bytes, engine=engine)

    result = schema_of(what.node.on(supplied("rows", schema)))
    return spilling.streamed(every, result, names)


@dataclass(frozen=True)
class _Pieces:
    spilling: Spilling
    what: Partwise

    def of(self, rows: Partitioned) -> Iterator["pl.LazyFrame"]:
        """Yields plans of which all rows are those of the result."""
        if not rows.is_split:
            yield from self._of_part(rows.all(), rows.num_bytes(), 1)
            return
        whole = rows.num_bytes()
        for (part,) in merged(((rows.partition(number),) for number in range(FANOUT)), self._block_bytes):
            yield from self._of_part(part, whole, 1)

    @property
    def _block_bytes(self) -> int:
        return self.spilling.spill.budget.block_bytes

    def _of_part(self, rows: Rows, before: int, level: int) -> Iterator["pl.LazyFrame"]:
        """Computes a partition. **Arguments:** `before`: the bytes of which it is a part."""
        size = rows.num_bytes
        if size <= self._block_bytes:
            if size:
                yield computed_on(self.what.node, [rows.whole()])
        elif size <= _SHRINKS * before and level <= MAX_LEVEL:
            parts = split(self.spilling.spill, rows, by_hash(self.what.keys, None, level))
            for (part,) in merged(((part,) for part in parts), self._block_bytes):
                yield from self._of_part(part, size, level + 1)
        elif self.what.fewer is None or self.what.rest is None:
            yield computed_on(self.what.node, [rows.whole()])
        else:
            few = [self.what.fewer(block) for block in rows.blocks(self._block_bytes)]
            yield computed_on(self.what.rest, [pl.concat(few)])
