"""Processes that are ranks, and the hand that stops, kills and hears them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, final

import pytest

from tests.support.comm.faults.stalls import Stalls
from tests.support.gang.forks import fork_children
from tests.support.readable import is_readable
from tests.support.tree import ROOT

START_SECONDS = 60.0
_TAIL_CHARS = 4000
_PROGRAM = "tests.support.comm.faults.rank"
_IMPORTED = (  # what programs import
    "tests.support.comm.faults.operations",
    "tests.support.comm.faults.streams",
    "tests.support.comm.relay",
    "tests.support.comm.transports.tcps",
)


@final
class Member:
    """A process that runs a program of the tests.

    **Arguments:** `store`: the folder where ranks meet. `log`: the file for what it says on its standard error.
    `prefix`: what to put before the command, such as what runs it in another network. `program`: its module. `clock`:
    for limits.
    """

    def __init__(
        self,
        store: Path,
        log: Path,
        *,
        prefix: Sequence[str] = (),
        program: str = _PROGRAM,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.log = log
        self._clock = clock
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-W", "always", "-m", program, store],
                cwd=ROOT,
                env={name: value for name, value in os.environ.items() if not name.startswith("BRAIDAX")},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        self._heard = bytearray()

    @property
    def pid(self) -> int:
        return self.process.pid

    def tell(self, what: Any) -> None:
        """Gives it a line."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what).encode() + b"\n")
        self.process.stdin.flush()

    def hear(self, event: str, *, seconds: float, skipped: str = "") -> dict[str, Any]:
        """Returns the next line, which must tell of an event, in time. **Arguments:** `skipped`: may come before it."""
        assert self.process.stdout is not None
        deadline = self._clock() + seconds
        while b"\n" not in self._heard:
            left = deadline - self._clock()
            readable = is_readable(self.process.stdout, max(0.0, left))
            if not readable and self._clock() < deadline:
                continue
            data = os.read(self.process.stdout.fileno(), 65536) if readable else b""
            if not data:
                how = f"said nothing for {seconds:g} s" if not readable else f"ended with {self.process.wait(10)}"
                raise AssertionError(f"a rank that should say {event!r} {how}:\n{self.where()}")
            self._heard += data
        line, _, self._heard = self._heard.partition(b"\n")
        told = json.loads(line)
        if told["event"] == skipped:
            return self.hear(event, seconds=deadline - self._clock())
        assert told["event"] == event, f"a rank should say {event!r}; it said {told}"
        return told

    def where(self) -> str:
        """Returns the stacks of its threads and what it has complained of."""
        if self.process.poll() is None:
            size = self.log.stat().st_size
            self.process.send_signal(signal.SIGCONT)
            self.process.send_signal(signal.SIGUSR1)
            deadline = time.monotonic() + 2
            while self.log.stat().st_size == size and time.monotonic() < deadline:
                time.sleep(0.01)
        return self.log.read_text()[-_TAIL_CHARS:]

    def kill(self) -> None:
        """Ends it as `kill -9` does, frozen or not; one that has ended only gives up its pipes."""
        self.process.kill()
        self.process.wait(10)
        self._close()

    def leave(self, *, seconds: float = 15.0) -> None:
        """Lets it end by itself: in time, with status 0, and without complaints."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            status = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            where = self.where()
            self.kill()
            raise AssertionError(f"a rank did not end within {seconds:g} s:\n{where}") from None
        self._close()
        assert (status, self.log.read_text()) == (0, "")

    def _close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


@final
class Crew:
    """Some members that live through one generation after the other; those that die are replaced.

    **Arguments:** `folder`: for the store and the logs. `size`: how many. `program`: see `Member`.

    **Fields:** `folder`: of these. `stalls`: since it began.
    """

    def __init__(self, folder: Path, *, size: int, spares: int = 0, program: str = _PROGRAM) -> None:
        self.stalls = Stalls()
        self.folder = folder
        self._program = program
        self.generation = 0
        self.members: list[Member] = []
        self._spares: list[Member] = []
        self._all: list[Member] = []
        try:
            for _ in range(size + spares):
                self._spares.append(self._start())
            self.members = [self._hired() for _ in range(size)]
        except BaseException:
            self.end()
            raise

    def replace(self, rank: int) -> None:
        """Puts a fresh process in the place of a dead one, and starts the one that will follow it."""
        self._spares.append(self._start())
        self.members[rank] = self._hired()

    def join(self, size: int, **given: Any) -> None:
        """Tells the first ranks to live through the next generation."""
        for rank in range(size):
            self.members[rank].tell(
                {"rank": rank, "size": size, "generation": self.generation, "job": "faults", **given}
            )
        self.generation += 1

    def __enter__(self) -> "Crew":
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        try:
            if kind is None:
                for member in [*self.members, *self._spares]:
                    member.leave()
        finally:
            self.end()

    def _start(self) -> Member:
        log = self.folder / f"{len(self._all)}.log"
        member = Member(self.folder / "store", log, program=self._program, clock=self.stalls.clock)
        self._all.append(member)
        return member

    def _hired(self) -> Member:
        member = self._spares.pop(0)
        member.hear("there", seconds=START_SECONDS)
        return member

    def end(self) -> None:
        """Ends all by force."""
        self.stalls.close()
        for member in self._all:
            member.kill()


@final
class Harbor:
    """Lends one crew of forks to test after test, since processes take long to start; after a failure, a fresh one.

    **Arguments:** `folders`: makes a folder for each crew. `size`: of the crew. `program`: see `Member`.
    """

    def __init__(self, folders: Callable[[], Path], *, size: int, program: str = _PROGRAM) -> None:
        self._folders = folders
        self._size = size
        self._program = program
        self._stack = contextlib.ExitStack()
        self._crew: Crew | None = None
        self._patch = pytest.MonkeyPatch()
        fork_children(self._patch, *_IMPORTED, modules=[program])

    @contextlib.contextmanager
    def crew(self) -> Iterator[Crew]:
        """Lends the crew, all of whose members wait to join."""
        if self._crew is None:
            self._crew = self._stack.enter_context(
                Crew(self._folders(), size=self._size, spares=1, program=self._program)
            )
        try:
            yield self._crew
        except BaseException:
            self._crew.end()
            self._crew = None
            self._stack.pop_all()
            raise

    def close(self) -> None:
        """Lets the crew go."""
        self._stack.close()
        self._patch.undo()
