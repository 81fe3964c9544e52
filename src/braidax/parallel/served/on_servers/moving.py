"""Rows that a server copies from others, where a part of the tables is to be on it."""

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from braidax.errors import ArgumentError, CommError, PeerLost
from braidax.parallel.served.on_servers.growing.moving_seen import MovingSeen, SeenBlock
from braidax.parallel.served.on_servers.growing.seen_shard import SeenShard
from braidax.parallel.served.row_memory import check_rows
from braidax.parallel.served.wire import Message, packed, unpacked

from .copying import progressions
from .server import TableServer

_BLOCK_BYTES = 16 << 20  # a message
_NUM_ASKED = 4  # blocks under way
_MOST_BYTES = 1 << 29  # until who waits for it is told of it
_MOST_AHEAD_BYTES = 1 << 26  # the same, where others train meanwhile


class _Block(NamedTuple):
    """Rows of a table of a message. **Fields:** `rows`: there, in part `source`. `place`: here."""

    table: str
    source: int
    rows: slice
    place: slice


class _Before(NamedTuple):
    """What a server told before rows were copied from it. **Fields:** `step`: how many updates it had taken. `changes`:
    by table how often rows were changed there other than by a gradient."""

    step: int
    changes: dict[str, tuple[int, int]]


@final
class Moving:
    """Fills a part with rows from the servers that have them.

    It may begin *ahead*, while they train on. Then a server is asked first how many updates it has taken, and once
    more for the rows that later ones have moved, when nothing changes any more.

    **Arguments:** `part`: that is filled, for which there is room. `having`: by former part the servers that have it.
    `own`: former parts that are here, `between` whose requests nothing changes. `ask`: asks another server.

    **Fields:** `is_copied`: whether all rows were copied. `is_full`: whether all is there as it is now. `num_bytes`:
    that came from other servers.
    """

    def __init__(
        self,
        part: TableServer,
        having: Sequence[Sequence[int]],
        own: Mapping[int, TableServer],
        between: AbstractContextManager[Any],
        ask: Callable[[int, Any], Any],
    ) -> None:
        self._part, self._having, self._own, self._between, self._ask = part, having, own, between, ask
        self._fixed, self._growing = self._blocks(), dict[str, MovingSeen]()
        self._left = itertools.chain(self._fixed, self._blocks_of_growing())
        self._before: dict[int, _Before] = {}  # by former part, where it began ahead
        self._lock = threading.Lock()  # guards the number
        self.is_copied, self.is_full, self.num_bytes = False, False, 0

    def copy_ahead(self) -> None:
        """Copies some of the rows, as many as take a while, or the last, though they may change meanwhile; of tables
        that grow none.

        **Raises:** `PeerLost` where a server is lost; what it raises.
        """
        if not self._before:
            self._before = {source: _before(self._found(source, "state", {})) for source in self._sources()}
        self.is_copied = self._copy_some(self._fixed, _MOST_AHEAD_BYTES, num_asked=1)

    def advance(self) -> None:
        """Copies some of the rows, as many as take a while, or the last; nothing changes meanwhile.

        **Raises:** `PeerLost` where nobody has some of them any more; what a server raises.
        """
        if self._copy_some(self._left, _MOST_BYTES, num_asked=_NUM_ASKED):
            every = range(len(self._having)) if self._part.wanted else self._sources()
            states = {source: self._found(source, "state", {}) for source in every}
            for source, before in self._before.items():
                self._copy_changed(source, before, _before(states[source]))
            self._part.take_whole(self._found_whole())
            self._part.follow([*states.values()])
            self.is_full = True

    def _found_whole(self) -> dict[str, NDArray[Any]]:
        """Returns what this part is to have whole, and former parts have."""
        found, wanted = dict[str, NDArray[Any]](), self._part.wanted
        for source in range(len(self._having) if wanted else 0):
            names = [name for name in wanted if name not in found]
            came = self._found(source, "read dense", {"names": names}).arrays
            self.num_bytes += 0 if source in self._own else sum(one.nbytes for one in came.values())
            found |= came
        return found

    def _copy_changed(self, source: int, before: _Before, now: _Before) -> None:
        """Copies once more what is not as it was when rows were copied ahead."""
        for name, changes in now.changes.items():
            if changes == before.changes[name]:
                self._copy_moved(name, source, before.step)
                continue
            for block in self._blocks_of(name, source):
                self._copy(block)

    def _copy_some(self, blocks: Iterator[_Block | SeenBlock], most: int, *, num_asked: int) -> bool:
        """Returns whether none is left."""
        some, size = list[_Block | SeenBlock](), 0
        for block in blocks:
            some.append(block)
            length = len(block.slots) if isinstance(block, SeenBlock) else _length(block.place)
            size += self._part.shards[block.table].row_bytes * length
            if size >= most:
                break
        with ThreadPoolExecutor(num_asked, thread_name_prefix="braidax-moving") as threads:
            for _ in threads.map(self._copy, some):
                pass
        return size < most

    def _sources(self) -> list[int]:
        """Returns the former parts that have some of the rows."""
        return sorted({one.source for one in progressions(self._part.number, self._part.size, len(self._having), 0)})

    def _blocks(self) -> Iterator[_Block]:
        """Yields what is to be copied of tables that do not grow; one source after the other in turn."""
        for name, shard in self._part.shards.items():
            if not isinstance(shard, SeenShard):
                yield from self._blocks_of(name, None)

    def _blocks_of_growing(self) -> Iterator[SeenBlock]:
        """Yields what is to be copied of tables that grow, where all have room for it."""
        for name, shard in self._part.shards.items():
            if isinstance(shard, SeenShard):
                self._growing[name] = MovingSeen(shard, self._sources(), self._found)
        for moving in self._growing.values():
            yield from moving.blocks(_BLOCK_BYTES)

    def _blocks_of(self, name: str, source: int | None) -> Iterator[_Block]:
        """Yields what is to be copied of a table. **Arguments:** `source`: the former part; None is all of them."""
        shard = self._part.shard_of_all(name)
        most = max(1, _BLOCK_BYTES // max(1, shard.row_bytes))
        found = progressions(self._part.number, self._part.size, len(self._having), shard.num_rows)
        found = [one for one in found if source in (None, one.source)]
        for start in range(0, max((one.length for one in found), default=0), most):
            for one in found:
                stop = min(start + most, one.length)
                if start < stop:
                    rows = slice(one.start + start * one.every, one.start + (stop - 1) * one.every + 1, one.every)
                    place = slice(one.first + start * one.step, one.first + (stop - 1) * one.step + 1, one.step)
                    yield _Block(name, one.source, rows, place)

    def _copy(self, block: _Block | SeenBlock) -> None:
        if isinstance(block, SeenBlock):
            num_bytes = self._growing[block.table].copy(block)
            with self._lock:
                self.num_bytes += 0 if block.source in self._own else num_bytes
            return
        shard = self._part.shard_of_all(block.table)
        if block.source in self._own:
            found: Sequence[NDArray[Any]] = self._own[block.source].shard_of_all(block.table).lying(block.rows)
        else:
            rows = {"start": block.rows.start, "stop": block.rows.stop, "every": block.rows.step}
            found = self._came(block.source, self._found(block.source, "copy", {"table": block.table, **rows}))
        _check_forms(block.table, found, shard.lying_forms(_length(block.place)))
        shard.lay(block.place, found)

    def _copy_moved(self, name: str, source: int, since: int) -> None:
        """Copies rows once more that a gradient has moved. **Arguments:** `since`: in this step, or behind it."""
        shard, start = self._part.shard_of_all(name), 0
        to = {"to": self._part.number, "among": self._part.size, "since": since}
        most = max(1, _BLOCK_BYTES // max(1, shard.row_bytes))
        num_there = len(range(source, shard.form.shape[0], len(self._having)))
        while start < num_there:
            answer = self._found(source, "copy again", {"table": name, **to, "start": start, "most": most})
            ids, found = answer.arrays["ids"], self._came(source, answer)
            check_rows(ids, f"rows of {name} that were moved", shard.num_rows, f"part {self._part.number} has as many")
            _check_forms(name, found, shard.lying_forms(len(ids)))
            shard.lay_at(ids, found)
            if not start < (looked := int(answer.fields["looked"])) <= num_there:
                raise CommError(f"a server has looked at {looked} rows of {name}: expected {start + 1} to {num_there}")
            start = looked

    def _came(self, source: int, answer: Message) -> list[NDArray[Any]]:
        """Returns the rows of an answer, which are counted where they come from others."""
        found = [answer.arrays[str(at)] for at in range(len({*answer.arrays} - {"ids"}))]
        if source not in self._own:
            with self._lock:
                self.num_bytes += sum(one.nbytes for one in found)
        return found

    def _found(self, source: int, kind: str, fields: Mapping[str, Any]) -> Message:
        """Asks whoever of those that have a former part is there; ahead always the same one."""
        told = {**fields, "run": self._part.run, "part": source, "parts": len(self._having)}
        if source in self._own:
            with self._between:
                return unpacked(self._own[source].answer(-1, Message(kind, told, {})))
        some = self._having[source]
        turned = self._part.number % len(some)  # so that not all ask the same one
        last: PeerLost | None = None
        for rank in (*some[turned:], *some[:turned])[: 1 if self._before else None]:
            try:
                return unpacked(self._ask(rank, packed(kind, told)))
            except PeerLost as error:
                last = error
        raise PeerLost(
            f"all servers that have part {source} of {len(self._having)} are lost, {[*some]}: {last}",
            -1 if last is None else last.rank,
        ) from last


def _before(state: Message) -> _Before:
    begun, settled = state.fields["begun"], state.fields["settled"]
    return _Before(int(state.fields["step"]), {name: (int(begun[name]), int(settled[name])) for name in settled})


def _check_forms(
    table: str, found: Sequence[NDArray[Any]], expected: Sequence[tuple[tuple[int, ...], np.dtype[Any]]]
) -> None:
    told = [(one.shape, one.dtype) for one in found]
    if told != [*expected]:
        raise CommError(f"rows of {table} came as {told}, expected {expected} of a server of this version")


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
