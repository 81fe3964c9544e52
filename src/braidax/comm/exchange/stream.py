"""A stream between all ranks of a group, drawn by who iterates over what comes."""

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from braidax.comm.exchange.frames import Geometry, item_bytes, rounded_up
from braidax.comm.exchange.inlet import Arrived, Inlet
from braidax.comm.exchange.outlet import Outlet
from braidax.comm.exchange.spilling import SpillFile
from braidax.comm.group import Group
from braidax.comm.group_messages import CREDIT, MAX_NUMBER, STREAM, tag_of
from braidax.comm.messages import buffers_of, empty
from braidax.comm.request import run
from braidax.comm.transports.transport import Buffer, Operation
from braidax.comm.waiting import AnyOf
from braidax.comm.watch import Notice
from braidax.errors import ArgumentError, WaitTimeout
from braidax.spans import Trace

Item = tuple[int, list[memoryview]]
"""A rank, and the buffers for it or from it."""

_LEAST_CHUNK_BYTES = 1 << 10
_MAX_AHEAD = 16  # receives that are posted ahead of each source
_FLIGHT_BYTES = 1 << 21  # that the transport has at once: more than keeps it busy would have to be asked for over TCP
_SLOW_SECONDS = 1e-3  # of a producer, behind which what it gave waits for nothing more
_LOOK_SECONDS = 0.05  # how often a full window is looked at, that only the caller can free
_TABLE_BYTES = 1 << 12  # of a chunk, so that an item of `chunk_bytes` fits in one


@final
@dataclass(frozen=True)
class Window:
    """What a stream may take. **Arguments:** see `Communicator.exchange`. **Raises:** `ArgumentError`."""

    chunk_bytes: int
    window_bytes: int
    spill: str | os.PathLike[str] | None

    def __post_init__(self) -> None:
        for name, least in (("chunk_bytes", _LEAST_CHUNK_BYTES), ("window_bytes", 1)):
            value = getattr(self, name)
            if not isinstance(value, int | np.integer) or value < least:
                raise ArgumentError(f"{name}={value!r}: expected a whole number of bytes, at least {least:,}")

    def geometry(self, size: int) -> Geometry:
        """Returns what becomes of it for so many ranks. **Raises:** `ArgumentError` for a window that is too small."""
        chunk_bytes = rounded_up(self.chunk_bytes + max(256, min(_TABLE_BYTES, self.chunk_bytes // 16)))
        num_chunks = self.window_bytes // 16 * 15 // size // chunk_bytes
        if num_chunks < 2:
            least = -(-2 * chunk_bytes * size * 16 // 15) + 16
            raise ArgumentError(
                f"window_bytes={self.window_bytes:,}: expected room for two chunks of each of {size} ranks, "
                f"{least:,} bytes for chunk_bytes={self.chunk_bytes:,}; raise the former, or lower the latter"
            )
        return Geometry(
            chunk_bytes, num_chunks, min(num_chunks, _MAX_AHEAD), min(self.window_bytes // 16, _FLIGHT_BYTES)
        )


@final
class Exchange(Iterator[Item]):
    """One rank's end of a stream; made by `Communicator.exchange`, which says what it gives.

    **Arguments:** `group`: whose ranks take part. `parts`: what this rank sends. `window`: what it may take. `limit`:
    returns the limit of a wait. `trace`: gets a span for each item.

    **Raises:** what a collective raises, when the ranks do not bring the same.
    """

    def __init__(
        self, group: Group, parts: Iterable[Any], window: Window, *, limit: Callable[[], float], trace: Trace
    ) -> None:
        self._is_over = True  # until there is something to be closed
        geometry = window.geometry(group.size)
        self._group, self._progress = group, group.domain
        self._window, self._geometry, self._pair_bytes = window, geometry, geometry.pair_bytes
        self._limit, self._trace = limit, trace
        self._parts: Iterator[Any] | None = iter(parts)
        self._ready: deque[Arrived] = deque()
        self._given: list[Buffer] = []  # to the caller, until the next item
        self._own: deque[list[Buffer]] = deque()  # from this rank to itself
        self._flight_bytes = 0
        self._draw_bytes = max(geometry.chunk_bytes, geometry.flight_bytes // 2)  # before others have their turn
        self._is_sent = False  # whether all this rank sends has arrived
        self._spill = None if window.spill is None else SpillFile(window.spill, geometry.chunk_bytes)
        self._inlets: list[Inlet] = []
        self._outlets: dict[int, Outlet] = {}
        try:
            messages = group.stream(window.chunk_bytes, window.window_bytes)
            number = messages.tag & MAX_NUMBER
            tags = tag_of(group.number, STREAM, number), tag_of(group.number, CREDIT, number)
            for distance in range(1, group.size):
                rank = (group.rank + distance) % group.size
                peer = group.ranks[rank]
                self._inlets.append(Inlet(self._progress, rank, peer, tags, geometry, self._ready.append))
                self._outlets[rank] = Outlet(self._progress, peer, tags, geometry, self._spill)
            run(self._progress, group.arrays.meet(messages), time.monotonic() + limit())
        except BaseException as error:
            self._fail(error)
            raise
        self._is_over = False

    def __iter__(self) -> "Exchange":
        return self

    def __next__(self) -> Item:
        if self._is_over:
            raise StopIteration
        began = time.perf_counter()
        try:
            source, buffers = self._next()
        except StopIteration:
            self._end()
            raise
        except BaseException as error:
            self._fail(error)
            raise
        self._trace.note("comm", "exchange", began, sum(map(len, buffers)))
        return source, buffers

    def close(self) -> None:
        """Ends the stream before its end, and with it the generation: the other ranks raise `Aborted`, which says so.

        A stream that has ended has nothing to be closed.
        """
        if not self._is_over:
            self._end()
            self._progress.fail(self._notice())

    def __del__(self) -> None:
        if not self._is_over:
            self._end()
            self._progress.fail_later(self._notice())

    def _notice(self) -> Notice:
        how = "exchange was left before its end; expected every rank to take all items: for … in comm.exchange(…)"
        return Notice("aborted", self._progress.world.rank, how)

    def _fail(self, error: BaseException) -> None:
        self._end()
        self._group.failed("exchange", error, self._limit())

    def _end(self) -> None:
        self._is_over = True
        self._parts = None
        self._inlets, self._outlets = [], {}
        self._ready.clear()
        self._own.clear()
        self._given = []
        if self._spill is not None:
            self._spill.close()

    def _next(self) -> Item:
        """Returns the next item. **Raises:** `StopIteration` behind the last."""
        for view in self._given:
            try:  # noqa: SIM105 (for every item: quicker than suppress())
                view.release()
            except BufferError:  # something was made of it, which keeps its part of the window
                pass
        self._given = []
        while True:
            self._progress.check()
            self._progress.hurried = True
            if self._is_sent and self._ready:  # as much as is here, before others are looked at
                return self._take_ready()
            is_drawn = self._draw()
            self._move()
            if self._own:
                return self._hand_over(self._group.rank, self._own.popleft())
            if self._ready:
                return self._take_ready()
            if not is_drawn:
                if self._finish():
                    raise StopIteration
                self._wait()
            elif self._spill is not None:
                self._wait(0.0)

    def _take_ready(self) -> Item:
        first = self._ready[0]
        buffers = first.take()
        if not first.items:
            self._ready.popleft()
        return self._hand_over(first.source, buffers)

    def _hand_over(self, source: int, buffers: list[Buffer]) -> Item:
        self._given = list(buffers)
        return source, buffers

    def _draw(self) -> bool:
        """Draws from what this rank sends, some chunks or as far as there is room. **Returns:** whether anything."""
        num_bytes = 0
        while self._parts is not None and num_bytes < self._draw_bytes and not self._is_blocked():
            began = time.monotonic()
            try:
                given = next(self._parts)
            except StopIteration:
                self._parts = None
                break
            num_bytes += self._put(given) + 1
            if time.monotonic() - began > _SLOW_SECONDS:
                self._flush()
        return bool(num_bytes)

    def _is_blocked(self) -> bool:
        if self._own:
            return True
        for outlet in self._outlets.values():  # noqa: SIM110 (asked for every item, and quicker than any())
            if outlet.is_blocked:
                return True
        return False

    def _put(self, given: Any) -> int:
        """Sends an item, or begins to. **Returns:** its bytes."""
        try:
            dest, value = given
        except (TypeError, ValueError):
            raise ArgumentError(
                f"parts= yields a {type(given).__name__}: expected pairs of a rank and the buffers for it"
            ) from None
        outlet = self._outlets.get(dest) if type(dest) is int else None
        if outlet is None:
            self._group.check_rank(dest, "parts' rank")
        buffers = buffers_of(value, "parts")
        num_bytes = item_bytes(buffers)
        if num_bytes > self._pair_bytes:
            raise self._too_long(dest, sum(map(len, buffers)), num_bytes)
        if dest == self._group.rank:
            self._own.append(_copies(buffers))
            return num_bytes
        outlet = outlet or self._outlets[int(dest)]
        outlet.add(buffers if self._progress.on_loss == "generation" else _copies(buffers), num_bytes)
        self._flight_bytes = outlet.move(self._flight_bytes)
        if outlet.open_bytes and self._num_open_bytes() > self._geometry.flight_bytes:
            self._flush()
        return num_bytes

    def _num_open_bytes(self) -> int:
        return sum(outlet.open_bytes for outlet in self._outlets.values())

    def _too_long(self, dest: int, item: int, num_bytes: int) -> ArgumentError:
        return ArgumentError(
            f"parts= yields an item of {item:,} bytes for rank {dest}, {num_bytes:,} with its table, where "
            f"window_bytes={self._window.window_bytes:,} has room for {self._pair_bytes:,} of each of "
            f"{self._group.size} ranks; raise window_bytes=, or yield the item in smaller ones"
        )

    def _flush(self) -> None:
        """Lets no item wait longer for others."""
        for outlet in self._outlets.values():
            if outlet.open_bytes:
                outlet.flush()
                self._flight_bytes = outlet.move(self._flight_bytes)

    def _move(self) -> None:
        """Moves what can be moved."""
        for inlet in self._inlets:
            inlet.give_back()
            inlet.move()
        if not self._is_sent:
            for outlet in self._outlets.values():
                self._flight_bytes = outlet.move(self._flight_bytes)

    def _finish(self) -> bool:
        """Ends what has nothing more to send. **Returns:** whether all is over, here and on the way."""
        self._flush()
        if self._parts is None and not self._is_sent:
            for outlet in self._outlets.values():
                outlet.end()
            self._is_sent = all(outlet.is_delivered for outlet in self._outlets.values())
        return self._is_sent and all(inlet.is_ended for inlet in self._inlets)

    def _wait(self, seconds: float | None = None) -> None:
        """Waits until something moves. **Arguments:** `seconds`: for so long only; the limit if None."""
        if seconds is None and self._parts is not None and not self._is_blocked():
            return  # there is room again to draw
        operations: list[Operation] = []
        for end in (*self._inlets, *self._outlets.values()):
            operations += end.waited_for()
        if not operations or any(operation.done for operation in operations):
            return
        deadline = time.monotonic() + (self._limit() if seconds is None else seconds)
        while True:
            is_held = any(inlet.is_held for inlet in self._inlets)
            until = min(deadline, time.monotonic() + _LOOK_SECONDS) if is_held else deadline
            try:
                self._progress.wait(AnyOf(operations), until)
                return
            except WaitTimeout:
                if seconds is not None or (is_held and self._is_freed()):
                    return
                if time.monotonic() >= deadline:
                    raise self._late() from None

    def _is_freed(self) -> bool:
        before = [inlet.is_held for inlet in self._inlets]
        for inlet in self._inlets:
            inlet.give_back()
        return before != [inlet.is_held for inlet in self._inlets]

    def _late(self) -> WaitTimeout:
        """Returns the error of a stream that stands still."""
        world = self._progress.world
        me = world.describe(world.rank)
        held = [inlet.source for inlet in self._inlets if inlet.is_held]
        if held:
            return WaitTimeout(
                f"{me} waited for the next item of a stream up to the limit, with its window full of items of ranks "
                f"{', '.join(map(str, held))} of which something was made that still lives; copy what is kept beyond "
                "the next item, or raise window_bytes="
            )
        full = [outlet.peer for outlet in self._outlets.values() if not outlet.is_sent]
        if full:
            return WaitTimeout(
                f"{me} waited up to the limit for {', '.join(map(world.describe, full[:8]))} to take items of a "
                "stream, as its window is full; expected it to ask for the next one: does it still iterate over "
                "comm.exchange(…)? If it is only slow, raise timeout_seconds="
            )
        peers = [outlet.peer for outlet in self._outlets.values() if not outlet.is_delivered]
        peers += [self._group.ranks[inlet.source] for inlet in self._inlets if not inlet.is_ended]
        return WaitTimeout(
            f"{me} waited up to the limit for {', '.join(map(world.describe, sorted(set(peers))[:8]))} to go on with a "
            "stream; expected items of it, or its end: do its parts end, and does it iterate to the end? If it is only "
            "slow, raise timeout_seconds="
        )


def _copies(buffers: list[Buffer]) -> list[Buffer]:
    """Returns buffers in memory of their own, aligned as those that come from others."""
    memory = empty(item_bytes(buffers))
    copies: list[Buffer] = []
    begin = 0
    for buffer in buffers:
        place = memory[begin : begin + len(buffer)].data
        place[:] = buffer
        copies.append(place)
        begin += rounded_up(len(buffer))
    return copies
