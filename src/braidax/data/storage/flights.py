"""Requests in flight: one thread keeps hundreds of them under way, for all readers of a data set together.

What is waited for starts at once. What was asked for ahead starts in the order of asking, as long as all that is
started ahead and not yet read stays within a budget of bytes.
"""

import asyncio
import collections
import contextlib
import itertools
import math
import os
import random
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from braidax.data.storage.hedge import Hedge
from braidax.data.storage.local import most_open_files
from braidax.data.storage.objects import Object, failure, fetch
from braidax.data.storage.options import Remote
from braidax.data.storage.units import Span, Unit, Units, Wait
from braidax.errors import DataError, ReadError, WaitTimeout

_MAX_REQUESTS = 512  # at 20 ms each, 25,000 a second
_GROUP = 10  # ranges that one call of the client reads concurrently: a third of the cost of a call for each
_GROUP_BYTES = 1 << 20  # of them, unless one is larger: the client makes one request of those that touch
_PART_BYTES = 8 << 20  # a longer unit is read in parts, concurrently
_FIRST_PAUSE_SECONDS, _LAST_PAUSE_SECONDS = 0.05, 5.0
_EXIT_SECONDS = 10.0

T = TypeVar("T")


class Flights:
    """The requests of one data set, and the thread that keeps them under way; it starts with the first of them.

    **Arguments:** `objects`: of the data set. `remote`: the options.
    """

    def __init__(self, objects: Sequence[Object], remote: Remote) -> None:
        self._objects = objects
        self._remote = remote
        self._units = Units(len(objects))
        self._lock = threading.RLock()  # a collected data set is closed on whatever thread collects it
        self._demanded: collections.deque[Unit] = collections.deque()
        self._ahead: collections.deque[Unit] = collections.deque()
        self._arrived: dict[Unit, float] = {}  # fetched ahead and not read yet: when they came, oldest first
        self._ahead_bytes = 0
        self._in_flight = 0
        self._max_requests = min(_MAX_REQUESTS, most_open_files() // 2)
        self._hedge = Hedge(remote.hedge_seconds)
        self._pauses = random.Random()  # not Python's own, whose numbers belong to the user
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_pumping = self._is_closed = False
        self._process = os.getpid()

    def join(self, ranges: Sequence[Span]) -> list[Unit | None]:
        """Returns for each range the unit that it lies in, where there is one; those not yet started will start now."""
        self._check_open()
        with self._lock:
            found: list[Unit | None] = []
            for span in ranges:
                unit = self._units.keep_promise(span)
                if unit is None:
                    unit = self._units.find(*span)
                    if unit is not None:
                        unit.readers += 1
                found.append(unit)
            self._demand({unit: None for unit in found if unit is not None and not unit.is_started})
        return found

    def demand(self, covered: Sequence[tuple[int, int]], spans: Sequence[Span]) -> list[Unit]:
        """Starts to fetch stretches, unless they are under way already, and returns their units.

        **Arguments:** `covered`: the ranges in each of `spans`, from and to.
        """
        with self._lock:
            found = [self._units.find(*span) or self._units.add(*span) for span in spans]
            for (first, stop), unit in zip(covered, found, strict=True):
                unit.readers += stop - first
            self._demand({unit: None for unit in found if not unit.is_started})
        return found

    def ask_ahead(self, ranges: Sequence[Span], covered: Sequence[tuple[int, int]], spans: Sequence[Span]) -> None:
        """Queues stretches to be fetched ahead.

        **Arguments:** `ranges`: that will be read. `covered`: which of them, from and to, each stretch of `spans` has.
        """
        self._check_open()
        oldest = time.monotonic() - self._remote.timeout_seconds
        with self._lock:
            for unit in list(itertools.takewhile(lambda unit: self._arrived[unit] < oldest, self._arrived)):
                self._drop(unit)  # whoever asked for it has gone
            for (first, stop), span in zip(covered, spans, strict=True):
                unit = self._units.find(*span) or self._units.add(*span)
                is_new = not unit.readers
                for number in range(first, stop):
                    self._units.promise(ranges[number], unit)
                if is_new and unit.readers:
                    self._ahead.append(unit)
                elif is_new:  # other units had promised all of it
                    self._units.remove(unit)
            self._wake()

    def wait(self, units: Sequence[Unit]) -> None:
        """Waits until units are here.

        **Raises:** the error of the first that failed, or `WaitTimeout` naming its URL.
        """
        with self._lock:
            pending = {unit: None for unit in units if not unit.is_done}
            wait = Wait(len(pending))
            for unit in pending:
                unit.waits.append(wait)
        if pending and not wait.event.wait(self._remote.timeout_seconds):
            late = next((unit for unit in pending if not unit.is_done), None)
            if late is not None:
                self.forget(pending)
                raise WaitTimeout(
                    f"{self._objects[late.file].name}: {late.num_bytes:,} bytes at offset {late.start:,} did not come "
                    f"within timeout_seconds={self._remote.timeout_seconds:g}; check the server and the network, or "
                    "raise Remote(timeout_seconds=…)"
                )
        failed = next((unit.error for unit in units if unit.error is not None), None)
        if failed is not None:
            raise type(failed)(str(failed)) from failed

    def release(self, units: Sequence[Unit]) -> None:
        """Says that a range has been read, once for each time that a unit is named; all read, it is given up."""
        with self._lock:
            for unit in units:
                unit.readers -= 1
                if unit.readers <= 0:
                    self._drop(unit)
            self._wake()

    def forget(self, units: "Sequence[Unit] | dict[Unit, None]") -> None:
        """Gives units up, so that the next who wants them fetches them anew."""
        with self._lock:
            for unit in units:
                self._drop(unit)

    def close(self) -> None:
        """Ends the thread and every request; whoever still waits gets an error. May be called twice."""
        with self._lock:
            self._is_closed = True
            loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return
        with contextlib.suppress(RuntimeError):  # it has ended
            loop.call_soon_threadsafe(loop.stop)
        if thread is not threading.current_thread():
            thread.join(_EXIT_SECONDS)

    def _demand(self, units: dict[Unit, None]) -> None:
        wanted = 0
        for unit in units:
            unit.is_started = True
            self._demanded.append(unit)
            wanted += unit.num_bytes
        # What was fetched ahead and is overtaken by so much else will hardly be read any more.
        for unit in list(itertools.takewhile(lambda _: self._ahead_bytes >= self._remote.ahead_bytes, self._arrived)):
            if wanted <= 0:
                break
            wanted -= unit.num_bytes
            self._drop(unit)
        if units:
            self._wake()

    def _drop(self, unit: Unit) -> None:
        self._units.remove(unit)
        self._arrived.pop(unit, None)
        self._ahead_bytes -= unit.budget_bytes
        unit.budget_bytes = 0

    def _check_open(self) -> None:
        if self._is_closed:
            raise ReadError(f"{self._objects[0].name}: was closed; open it again")
        if self._process != os.getpid():
            raise ReadError(
                f"{self._objects[0].name}: was opened before this process was forked from its parent, whose requests "
                "it cannot share; open it again here, or start processes by spawn"
            )

    def _wake(self) -> None:
        if self._is_closed or self._is_pumping or not (self._demanded or self._ahead):
            return
        if self._loop is None:
            self._loop = _Loop()
            self._thread = threading.Thread(target=self._run, args=(self._loop,), name="braidax-remote", daemon=True)
            self._thread.start()
        self._is_pumping = True
        self._loop.call_soon_threadsafe(self._pump)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            for task in self._tasks:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
        finally:
            closed = ReadError("these files were closed while they were being read")
            with self._lock:
                for unit in [*self._demanded, *self._ahead]:
                    unit.finish(None, closed)
            loop.close()

    def _pump(self) -> None:
        with self._lock:
            self._is_pumping = False
        while self._in_flight < self._max_requests and (group := self._next_group()):
            self._spawn(self._fly(group))

    def _next_group(self) -> list[Unit]:
        """Takes units of one file from a queue, and counts their requests."""
        with self._lock:
            queue, is_ahead = self._demanded, False
            if not queue:
                queue, is_ahead = self._ahead, True
            group, num_bytes = list[Unit](), 0
            while queue and len(group) < _GROUP:
                unit = queue[0]
                if is_ahead and (unit.is_started or unit.readers <= 0):
                    queue.popleft()
                    continue
                if group and (unit.file != group[0].file or num_bytes + unit.num_bytes > _GROUP_BYTES):
                    break
                if is_ahead and not self._fits(unit):
                    break
                queue.popleft()
                unit.is_started = True
                num_bytes += unit.num_bytes
                group.append(unit)
            self._in_flight += len(group)
            return group

    def _fits(self, unit: Unit) -> bool:
        """Counts a unit against the budget, if it fits; one larger than all of it may go alone."""
        if self._ahead_bytes and self._ahead_bytes + unit.num_bytes > self._remote.ahead_bytes:
            return False
        unit.budget_bytes = unit.num_bytes
        self._ahead_bytes += unit.num_bytes
        return True

    async def _fly(self, group: list[Unit]) -> None:
        found: list[memoryview] | DataError
        try:
            found = await self._hedged(group)
        except DataError as error:
            found = error
        except asyncio.CancelledError:
            found = ReadError(f"{self._objects[group[0].file].name}: was closed while it was being read")
        except Exception as error:  # noqa: BLE001 (whoever waits for it must get something)
            found = failure(error, self._objects[group[0].file].name).error
        if isinstance(found, ReadError) and len(group) > 1 and not self._is_closed:
            self._in_flight += len(group)
            await asyncio.gather(*(self._fly([unit]) for unit in group))  # so that a bad one fails alone
            self._in_flight -= len(group)
        else:
            with self._lock:
                for number, unit in enumerate(group):
                    if isinstance(found, DataError):
                        self._drop(unit)
                        unit.finish(None, found)
                    else:
                        unit.finish(found[number], None)
                        if unit.budget_bytes:
                            self._arrived[unit] = time.monotonic()
            self._in_flight -= len(group)
        self._pump()

    async def _hedged(self, group: list[Unit]) -> list[memoryview]:
        num_bytes, begin = sum(unit.num_bytes for unit in group), time.monotonic()
        after = self._hedge.after(num_bytes)
        if math.isinf(after):
            found = await self._tried(group)
        else:
            found = await self._raced(group, after)
        self._hedge.note(num_bytes, time.monotonic() - begin)
        return found

    async def _raced(self, group: list[Unit], after: float) -> list[memoryview]:
        """Fetches units twice where the first try is late. The first that comes wins; the other's bytes are its own."""
        tries = [self._spawn(self._tried(group))]
        try:
            done, left = await asyncio.wait(tries, timeout=after)
            if not done and self._hedge.opens(self._in_flight // len(group)):
                tries.append(self._spawn(self._tried(group)))
                left = set(tries)
            while left and not any(item.exception() is None for item in done):
                done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            return next((item for item in done if item.exception() is None), next(iter(done))).result()
        finally:
            if len(tries) > 1:
                self._hedge.closes()
            for item in tries:
                item.cancel()

    async def _tried(self, group: list[Unit]) -> list[memoryview]:
        item = self._objects[group[0].file]
        spans = [
            (start, min(_PART_BYTES, unit.stop - start))
            for unit in group
            for start in range(unit.start, unit.stop, _PART_BYTES)
        ]
        if len(spans) == len(group):
            return await self._fetched(item, spans)
        parts = iter(await self._each_fetched(item, spans))  # one call would put them together again
        return [_joined([next(parts) for _ in range(unit.start, unit.stop, _PART_BYTES)]) for unit in group]

    async def _fetched(self, item: Object, spans: list[tuple[int, int]]) -> list[memoryview]:
        for attempt in itertools.count():
            try:
                return await fetch(item, [start for start, _ in spans], [length for _, length in spans])
            except Exception as error:
                what = failure(error, item.url)
                if not what.is_transient or attempt >= self._remote.retries:
                    raise what.error from error
                if len(spans) > 1:
                    return await self._each_fetched(item, spans)
            await asyncio.sleep(self._pauses.uniform(0, min(_LAST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2**attempt)))
        raise AssertionError  # count does not end

    async def _each_fetched(self, item: Object, spans: list[tuple[int, int]]) -> list[memoryview]:
        each = [self._spawn(self._fetched(item, [span])) for span in spans]
        return [part for parts in await asyncio.gather(*each) for part in parts]

    def _spawn(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class _Loop(asyncio.SelectorEventLoop):
    """An event loop whom the client may still tell of a canceled request when it is closed."""

    def call_soon_threadsafe(self, callback: Callable[..., Any], *args: Any, context: Any = None) -> asyncio.Handle:
        try:
            return super().call_soon_threadsafe(callback, *args, context=context)
        except RuntimeError:
            if not self.is_closed():
                raise
            return asyncio.Handle(callback, args, self)


def _joined(parts: list[memoryview]) -> memoryview:
    return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))
