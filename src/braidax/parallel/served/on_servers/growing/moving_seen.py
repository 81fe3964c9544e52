"""Rows of tables that grow that a server copies from others, where a part of the tables is to be on it."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, final

from braidax.parallel.served.on_servers.growing.seen_shard import SeenShard, Which
from braidax.parallel.served.wire import Message

_LISTS: tuple[Which, ...] = ("rows", "counts")


class SeenBlock(NamedTuple):
    """What one part has in some slots. **Fields:** `table`, `which`: of what. `source`: the part. `slots`: there."""

    table: str
    which: Which
    source: int
    slots: range


class _Held(NamedTuple):
    """What a part has for another one. **Fields:** `num_ids`. `end`: the slot behind the last."""

    num_ids: int
    end: int


@final
class MovingSeen:
    """Fills the part of a table that grows with what is there, and with counts of ids that are not.

    **Arguments:** `shard`: that is filled, and has nothing yet. `sources`: former parts that have ids of it. `found`:
    asks one of those that have a former part: the part, the kind of a request, its fields.

    **Raises:** `ArgumentError` where the part has no room for all; nothing has come then.
    """

    def __init__(
        self,
        shard: SeenShard,
        sources: Sequence[int],
        found: Callable[[int, str, Mapping[str, Any]], Message],
    ) -> None:
        self._shard, self._sources, self._found = shard, sources, found
        self._lock = threading.Lock()  # blocks come on several threads
        self._held: dict[tuple[Which, int], _Held] = {}
        for which in _LISTS:
            for source in sources:
                told = found(source, "count seen", self._fields(which)).fields
                self._held[which, source] = _Held(int(told["count"]), int(told["end"]))
            shard.check_moves(which, sum(self._held[which, source].num_ids for source in sources))

    def _fields(self, which: Which) -> dict[str, Any]:
        return {"table": self._shard.form.name, "which": which, "of": [self._shard.rank, self._shard.size]}

    def blocks(self, block_bytes: int) -> Iterator[SeenBlock]:
        """Yields what is to be copied, one source after the other in turn. **Arguments:** `block_bytes`: at most."""
        most = max(1, block_bytes // self._shard.row_bytes)
        for which in _LISTS:
            ends = {source: self._held[which, source].end for source in self._sources}
            for start in range(0, max(ends.values()), most):
                for source, end in ends.items():
                    if start < end:
                        yield SeenBlock(self._shard.form.name, which, source, range(start, min(start + most, end)))

    def copy(self, block: SeenBlock) -> int:
        """Copies a block. **Returns:** its bytes."""
        slots = {"start": block.slots.start, "stop": block.slots.stop}
        answer = self._found(block.source, "copy seen", {**self._fields(block.which), **slots})
        with self._lock:
            self._shard.check_list(block.which, answer.arrays)
            self._shard.put_listed(block.which, answer.arrays)
        return sum(one.nbytes for one in answer.arrays.values())
