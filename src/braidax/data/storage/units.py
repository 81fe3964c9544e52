"""Units: stretches of objects that are wanted, on their way or here, found by the ranges that lie in them."""

import bisect
import threading

from braidax.errors import DataError

Span = tuple[int, int, int]  # file, start, stop


class Wait:
    """A reader that waits for several units."""

    __slots__ = ("event", "left")

    def __init__(self, left: int) -> None:
        self.left = left
        self.event = threading.Event()


class Unit:
    """A stretch of an object that is fetched once, for all the ranges that lie in it and all who want them.

    `readers`: ranges of it that were promised and not read yet. `budget_bytes`: what it takes of the budget for what
    is fetched ahead. Once it `is_done` it has `data` or an `error`.
    """

    __slots__ = (
        "budget_bytes",
        "data",
        "error",
        "file",
        "is_done",
        "is_kept",
        "is_started",
        "promised",
        "readers",
        "start",
        "stop",
        "waits",
    )

    def __init__(self, file: int, start: int, stop: int) -> None:
        self.file, self.start, self.stop = file, start, stop
        self.is_started = self.is_done = self.is_kept = False
        self.data: memoryview | None = None
        self.error: DataError | None = None
        self.readers = 0
        self.promised: list[Span] = []
        self.budget_bytes = 0
        self.waits: list[Wait] = []

    @property
    def num_bytes(self) -> int:
        """The bytes of the stretch."""
        return self.stop - self.start

    def finish(self, data: memoryview | None, error: DataError | None) -> None:
        """Sets what came of it, and wakes those for whom it was the last."""
        self.data, self.error, self.is_done = data, error, True
        for wait in self.waits:
            wait.left -= 1
            if not wait.left:
                wait.event.set()
        self.waits = []


class Units:
    """The units of a data set.

    **Arguments:** `num_files`: in the data set.
    """

    def __init__(self, num_files: int) -> None:
        self._starts: list[list[int]] = [[] for _ in range(num_files)]
        self._units: list[dict[int, Unit]] = [{} for _ in range(num_files)]
        self._promises: dict[Span, tuple[Unit, int]] = {}

    def __len__(self) -> int:
        return sum(len(starts) for starts in self._starts)

    def find(self, file: int, start: int, stop: int) -> Unit | None:
        """Returns a unit that a range lies in, if there is one."""
        starts = self._starts[file]
        place = bisect.bisect_right(starts, start) - 1
        if place < 0:
            return None
        unit = self._units[file][starts[place]]
        return unit if unit.stop >= stop else None

    def add(self, file: int, start: int, stop: int) -> Unit:
        """Adds a unit, in the place of one with the same start."""
        unit = Unit(file, start, stop)
        if start not in self._units[file]:
            bisect.insort(self._starts[file], start)
        self._units[file][start] = unit
        return unit

    def promise(self, span: Span, unit: Unit) -> None:
        """Takes note that a range will be read from a unit; where another unit has promised it, from that."""
        unit, count = self._promises.get(span, (unit, 0))
        self._promises[span] = (unit, count + 1)
        unit.promised.append(span)
        unit.readers += 1

    def keep_promise(self, span: Span) -> Unit | None:
        """Returns the unit that has promised a range, if one has, and strikes that promise out."""
        unit, count = self._promises.pop(span, (None, 0))
        if count > 1 and unit is not None:
            self._promises[span] = (unit, count - 1)
        return unit

    def remove(self, unit: Unit) -> None:
        """Removes a unit and its promises, as far as they are still there."""
        for span in unit.promised:
            if self._promises.get(span, (None, 0))[0] is unit:
                del self._promises[span]
        if self._units[unit.file].get(unit.start) is unit:
            del self._units[unit.file][unit.start]
            starts = self._starts[unit.file]
            del starts[bisect.bisect_left(starts, unit.start)]
