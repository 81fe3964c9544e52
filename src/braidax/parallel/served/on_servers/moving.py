"""Rows that a server copies from others, where a part of the tables is to be on it."""

import itertools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, final

from numpy.typing import NDArray

from braidax.errors import ArgumentError, CommError, PeerLost
from braidax.parallel.served.wire import Message, packed, unpacked

from .server import TableServer

_BLOCK_BYTES = 16 << 20  # a message
_NUM_ASKED = 4  # blocks under way
_MOST_BYTES = 1 << 29  # until who waits for it is told of it


class Progression(NamedTuple):
    """Rows of a part that lie in one part of another number of parts.

    **Fields:** `source`: that part. `start`, `every`: which rows there. `first`, `step`: which rows
    here. `length`: how many.
    """

    source: int
    start: int
    every: int
    first: int
    step: int
    length: int


class _Block(NamedTuple):
    """Rows of a table of a message. **Fields:** `rows`: there, in part `source`. `place`: here."""

    table: str
    source: int
    rows: slice
    place: slice


def progressions(part: int, parts: int, former: int, num_rows: int) -> list[Progression]:
    """Returns where the rows of a part lie in `former` parts. **Arguments:** `num_rows`: of the part."""
    shared = math.gcd(parts, former)
    step, every = former // shared, parts // shared
    ids = [part + parts * first for first in range(step)]
    return [
        Progression(one % former, one // former, every, first, step, len(range(first, num_rows, step)))
        for first, one in enumerate(ids)
    ]


@final
class Moving:
    """Fills a part with rows from the servers that have them, on which nothing changes meanwhile.

    **Arguments:** `part`: that is filled, for which there is room. `having`: by former part the servers that have it.
    `own`: former parts that are here. `ask`: asks another server.

    **Fields:** `is_full`: whether all is there. `num_bytes`: that came from other servers.
    """

    def __init__(
        self,
        part: TableServer,
        having: Sequence[Sequence[int]],
        own: Mapping[int, TableServer],
        ask: Callable[[int, Any], Any],
    ) -> None:
        self._part, self._having, self._own, self._ask = part, having, own, ask
        self._left = self._blocks()
        self._lock = threading.Lock()  # guards the number
        self.is_full, self.num_bytes = False, 0

    def advance(self) -> None:
        """Copies some of the rows, as many as take a while, or the last. **Raises:** `PeerLost` where nobody has some
        of them any more; what a server raises."""
        some, size = list[_Block](), 0
        for block in self._left:
            some.append(block)
            size += self._part.shard_of_all(block.table).row_bytes * _length(block.place)
            if size >= _MOST_BYTES:
                break
        with ThreadPoolExecutor(_NUM_ASKED, thread_name_prefix="braidax-moving") as threads:
            for _ in threads.map(self._copy, some):
                pass
        if size < _MOST_BYTES:
            self._part.follow([self._found(source, "state", {}) for source in self._sources()])
            self.is_full = True

    def _sources(self) -> list[int]:
        """Returns the former parts that have some of the rows."""
        return sorted({one.source for one in progressions(self._part.number, self._part.size, len(self._having), 0)})

    def _blocks(self) -> Iterator[_Block]:
        """Yields what is to be copied; one source after the other in turn."""
        for name in self._part.shards:
            shard = self._part.shard_of_all(name)
            most = max(1, _BLOCK_BYTES // max(1, shard.row_bytes))
            found = progressions(self._part.number, self._part.size, len(self._having), shard.num_rows)
            for start in range(0, max((one.length for one in found), default=0), most):
                for one in found:
                    stop = min(start + most, one.length)
                    if start < stop:
                        rows = slice(one.start + start * one.every, one.start + (stop - 1) * one.every + 1, one.every)
                        place = slice(one.first + start * one.step, one.first + (stop - 1) * one.step + 1, one.step)
                        yield _Block(name, one.source, rows, place)

    def _copy(self, block: _Block) -> None:
        shard = self._part.shard_of_all(block.table)
        if block.source in self._own:
            found: Sequence[NDArray[Any]] = self._own[block.source].shard_of_all(block.table).lying(block.rows)
        else:
            rows = {"start": block.rows.start, "stop": block.rows.stop, "every": block.rows.step}
            arrays = self._found(block.source, "copy", {"table": block.table, **rows}).arrays
            found = [arrays[str(at)] for at in range(len(arrays))]
            with self._lock:
                self.num_bytes += sum(one.nbytes for one in found)
        told, expected = [(one.shape, one.dtype) for one in found], shard.lying_forms(_length(block.place))
        if told != expected:
            raise CommError(f"rows of {block.table} came as {told}, expected {expected} of a server of this version")
        shard.lay(block.place, found)

    def _found(self, source: int, kind: str, fields: Mapping[str, Any]) -> Message:
        """Asks whoever of those that have a former part is there."""
        told = {**fields, "run": self._part.run, "part": source, "parts": len(self._having)}
        if source in self._own:
            return unpacked(self._own[source].answer(-1, Message(kind, told, {})))
        some = self._having[source]
        turned = self._part.number % len(some)  # so that not all ask the same one
        last: PeerLost | None = None
        for rank in (*some[turned:], *some[:turned]):
            try:
                return unpacked(self._ask(rank, packed(kind, told)))
            except PeerLost as error:
                last = error
        raise PeerLost(
            f"all servers that have part {source} of {len(self._having)} are lost, {[*some]}: {last}",
            -1 if last is None else last.rank,
        ) from last


def _length(rows: slice) -> int:
    return len(range(rows.start, rows.stop, rows.step))


def checked_having(told: Any, num_ranks: int) -> list[list[int]]:
    """Returns by part the servers that have it, as a message says. **Raises:** `ArgumentError` for what is none."""
    is_list = isinstance(told, list) and all(isinstance(some, list) and some for some in told)
    if not is_list or not told or any(type(one) is not int or one < 0 for one in itertools.chain(*told)):
        raise ArgumentError(f"having={told!r}: expected for each part the ranks of servers that have it")
    if any(one >= num_ranks for one in itertools.chain(*told)):
        raise ArgumentError(f"having={told!r}: expected ranks below {num_ranks}")
    return told
