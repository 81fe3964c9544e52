"""A progress bar on stderr, for what opening a data set may have to do once."""

import threading
import time
from pathlib import Path
from typing import Any

_QUIET_SECONDS = 1.0  # what takes longer shows a bar
_REDRAW_SECONDS = 0.1


class Progress:
    """A bar for work on files that takes longer than a second, drawn by the threads that work.

    `stop` asks them to end.

    **Arguments:** `doing`: what is done, such as `"index of"`. `name`: of the first file. `num_bytes`: of all files.
    """

    def __init__(self, doing: str, name: str, num_bytes: int) -> None:
        self.stop = threading.Event()
        self._text = f"{doing} {Path(name).name}"
        self._num_bytes = num_bytes
        self._done: dict[int, int] = {}
        self._lock = threading.Lock()
        self._next = time.monotonic() + _QUIET_SECONDS
        self._bar: Any = None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.refresh()
            self._bar.stop()

    def show(self, number: int, done_bytes: int) -> None:
        """Takes note of how far the work on a file is; draws the bar ten times a second at most."""
        with self._lock:
            self._done[number] = max(done_bytes, self._done.get(number, 0))
            if time.monotonic() < self._next:
                return
            self._next = time.monotonic() + _REDRAW_SECONDS
            if self._bar is None:
                self._bar = self._new_bar()
            self._bar.update(self._bar.task_ids[0], completed=sum(self._done.values()))
            self._bar.refresh()

    def _new_bar(self) -> Any:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        bar = Bar(*columns, console=Console(stderr=True), auto_refresh=False)
        bar.add_task(self._text, total=self._num_bytes)
        bar.start()
        return bar
