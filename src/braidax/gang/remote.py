"""What runs on each host of `braidax launch --hosts`: it starts that host's ranks, and ends them with its own input.

The launching machine starts it over ssh. The first line of its input says what to start: arguments could be read by
anybody on the host. Lines of ranks go out with their prefix, which begins with `[`; a line that begins with `{` tells
of a rank that failed. What ends then is decided by the launching machine, which closes the input or, where the whole
job was told to stop, says so before: then the ranks have time for a last checkpoint.
"""

import contextlib
import json
import math
import os
import selectors
import signal
import sys
import time
from collections.abc import Generator
from dataclasses import asdict
from typing import Any

from braidax.gang.processes import Command, Ending, Processes, print_lines

FORCE_SECONDS = 5.0
"""Between the signals that end the ranks of a host, where they are not told to stop."""

STOP = b"stop\n"
"""The line that tells the ranks to stop."""

_READ_BYTES = 1 << 10


def order(commands: list[tuple[tuple[str, ...], dict[str, str], str]], folder: str, grace_seconds: float) -> bytes:
    """Returns what to write to the input of this program.

    **Arguments:** `commands`: for each rank the arguments of Python, the variables besides those of the host, and the
    prefix of its lines, which begins with `[`. `folder`: the working folder. `grace_seconds`: that they may take to
    end after `STOP`, or SIGTERM to this process.
    """
    return json.dumps({"commands": commands, "folder": folder, "grace_seconds": grace_seconds}).encode() + b"\n"


def read_report(line: str) -> Ending | None:
    """Returns how a rank failed, if a line tells that; its `number` counts the ranks of the host."""
    if not line.startswith("{"):
        return None
    told: dict[str, Any] = json.loads(line)
    told["log"] = tuple(told["log"])
    return Ending(**told)


def main() -> None:
    """Serves one order until its ranks have ended or its input has; exits as the first rank that failed did."""
    with _terminations() as terminations, open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as told:
        ordered = json.loads(told.readline())  # and nothing of what is told later
        prefixes = [prefix for _, _, prefix in ordered["commands"]]
        commands = [
            Command((sys.executable, *arguments), {**os.environ, **environment}, ordered["folder"])
            for arguments, environment, _ in ordered["commands"]
        ]
        processes = Processes(commands, write=print_lines(prefixes), grace_seconds=FORCE_SECONDS)
        try:
            host = _Host(processes, len(commands), ordered["grace_seconds"])
            host.serve(told.fileno(), terminations)
        finally:
            processes.end()
    sys.exit(0 if host.failed is None else host.failed.exit_code)


@contextlib.contextmanager
def _terminations() -> Generator[int, None, None]:
    """Gives a descriptor that has `STOP` to read once this process has been told to end, as when its host goes down."""
    read, write = os.pipe()
    before = signal.signal(signal.SIGTERM, lambda number, frame: os.write(write, STOP))
    try:
        yield read
    finally:
        signal.signal(signal.SIGTERM, before)
        os.close(read)
        os.close(write)


class _Host:
    """The ranks of this host while they run. **Fields:** `failed`: the first one that did."""

    def __init__(self, processes: Processes, num_alive: int, grace_seconds: float) -> None:
        self._processes = processes
        self._num_alive = num_alive
        self._grace_seconds = grace_seconds
        self._asked_by: int | None = None  # the descriptor that said so
        self._deadline = math.inf
        self.failed: Ending | None = None

    def serve(self, told: int, terminations: int) -> None:
        """Reports the ranks that fail, until all have ended or their time to stop is over, or what is told has an end.

        **Arguments:** `told`, `terminations`: descriptors that have `STOP` to read once the launching machine, or this
        one, ends the ranks.
        """
        with selectors.DefaultSelector() as selector:
            for source in (self._processes, told, terminations):
                selector.register(source, selectors.EVENT_READ)
            while self._num_alive and self._advance(selector):
                pass
        if self._deadline < math.inf:
            self._processes.end(grace_seconds=0.0)  # they had their time
            self._note_endings()

    def _advance(self, selector: selectors.BaseSelector) -> bool:
        """Waits for what is next; False when that is the end."""
        left = None if self._deadline == math.inf else max(0.0, self._deadline - time.monotonic())
        ready = selector.select(left)
        for key, _ in ready:
            if key.fileobj is self._processes:
                self._note_endings()
            elif os.read(key.fd, _READ_BYTES):
                self._ask(key.fd)
            elif self._asked_by in (None, key.fd):
                return False
            else:  # this machine goes down, and the first rank that did was reported: the others still save
                selector.unregister(key.fileobj)
                self._deadline = min(self._deadline, time.monotonic() + FORCE_SECONDS)
        return bool(ready)

    def _ask(self, asked_by: int) -> None:
        if self._asked_by is None:
            self._asked_by = asked_by
            self._deadline = time.monotonic() + self._grace_seconds
            self._processes.ask()

    def _note_endings(self) -> None:
        for ending in self._processes.wait(timeout_seconds=0):
            self._num_alive -= 1
            if ending.status != 0:
                self.failed = self.failed or ending
                _report(ending)


def _report(ending: Ending) -> None:
    with contextlib.suppress(OSError):  # the connection is gone, and so is the input
        sys.stdout.write(json.dumps(asdict(ending)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
