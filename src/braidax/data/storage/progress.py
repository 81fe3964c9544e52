"""How far work is that opening a data set may have to do once: shown on stderr, and told to all who wait for it."""

import contextlib
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, Literal

from braidax.program.coordination import say_busy

_QUIET_SECONDS = 1.0  # what takes longer shows a bar
_REDRAW_SECONDS = 0.1
_TELL_SECONDS = 1.0

Unit = Literal["bytes", "documents", "files", "samples"]


class Progress:
    """A bar for work on files that takes longer than a second, drawn by the threads that work.

    `stop` asks them to end.

    **Arguments:** `doing`: what is done, such as `"index of"`. `name`: of the first file. `total`: of all files.
    `unit`: what is counted.
    """

    def __init__(self, doing: str, name: str, total: int, *, unit: Unit = "bytes") -> None:
        self.stop = threading.Event()
        self._text = f"{doing} {Path(name).name}".strip()
        self._total = total
        self._unit = unit
        self._done: dict[int, int] = {}
        self._lock = threading.Lock()
        self._next = time.monotonic() + _QUIET_SECONDS
        self._next_told = 0.0
        self._listeners: list[Callable[[int], None]] = []
        self._bar: Any = None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.refresh()
            self._bar.stop()

    @contextlib.contextmanager
    def heard(self, listener: Callable[[int], None]) -> Generator[None]:
        """Tells a listener, inside the block, how much is done, once a second at most."""
        with self._lock:
            self._listeners.append(listener)
        try:
            yield
        finally:
            with self._lock:
                self._listeners.remove(listener)

    def show(self, number: int, done: int) -> None:
        """Takes note of how far the work on a file is; draws the bar ten times a second at most."""
        with self._lock:
            self._done[number] = max(done, self._done.get(number, 0))
            now = time.monotonic()
            if now >= self._next_told:
                self._next_told = now + _TELL_SECONDS
                self._tell(sum(self._done.values()))
            if now < self._next:
                return
            self._next = now + _REDRAW_SECONDS
            if self._bar is None:
                self._bar = self._new_bar()
            self._bar.update(self._bar.task_ids[0], completed=sum(self._done.values()))
            self._bar.refresh()

    def _tell(self, done: int) -> None:
        for listener in self._listeners:
            listener(done)
        say_busy(f"{self._text} {done}")  # the processes of other machines, which may have nothing to do

    def _new_bar(self) -> Any:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        count = DownloadColumn() if self._unit == "bytes" else MofNCompleteColumn()
        unit = "" if self._unit == "bytes" else f" {self._unit}"
        columns = (TextColumn("{task.description}" + unit), BarColumn(), count, TimeRemainingColumn())
        bar = Bar(*columns, console=Console(stderr=True), auto_refresh=False)
        bar.add_task(self._text, total=self._total)
        bar.start()
        return bar
