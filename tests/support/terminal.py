"""A terminal on which a process writes its errors: what a person would see there."""

import contextlib
import os
import pty
import re
import selectors
import subprocess
import time
from collections.abc import Generator, Sequence
from pathlib import Path

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
CURSOR_HIDDEN, CURSOR_SHOWN = "\x1b[?25l", "\x1b[?25h"


class Terminal:
    """What a process has written to its terminal. **Fields:** `process`: its stdout is a pipe. `written`: so far."""

    def __init__(self, process: "subprocess.Popen[str]", end: int) -> None:
        self.process = process
        self.written = ""
        self._end = end

    @property
    def text(self) -> str:
        """What was written, without what moves the cursor and colors."""
        return _CONTROL.sub("", self.written)

    def until(self, pattern: str, *, timeout_seconds: float = 60.0) -> None:
        """Reads until a regular expression is found in the text."""
        deadline = time.monotonic() + timeout_seconds
        while not re.search(pattern, self.text):
            left = deadline - time.monotonic()
            assert left > 0, f"{pattern!r} was not written: {self.text[-2000:]!r}"
            assert self._read(left), f"the process ended without {pattern!r}: {self.text[-2000:]!r}"

    def rest(self, *, timeout_seconds: float = 60.0) -> str:
        """Reads until the process ends. **Returns:** its stdout."""
        deadline = time.monotonic() + timeout_seconds
        while self._read(deadline - time.monotonic()):
            assert time.monotonic() < deadline, f"the process goes on: {self.text[-2000:]!r}"
        told, _ = self.process.communicate(timeout=timeout_seconds)
        return told

    def _read(self, seconds: float) -> bool:
        with selectors.DefaultSelector() as selector:
            selector.register(self._end, selectors.EVENT_READ)
            if not selector.select(seconds):
                return True
        try:
            data = os.read(self._end, 1 << 16)
        except OSError:  # as the end of a terminal is told
            return False
        self.written += data.decode(errors="replace")
        return bool(data)


@contextlib.contextmanager
def on_terminal(command: Sequence[str], folder: Path) -> Generator[Terminal]:
    """Starts a process whose stderr is a terminal of 160 columns, and ends it with the block."""
    here, there = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "160", "LINES": "24"}
    try:
        with subprocess.Popen(
            list(command),
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=there,
            text=True,
        ) as process:
            os.close(there)
            try:
                yield Terminal(process, here)
            finally:
                process.kill()
    finally:
        os.close(here)
