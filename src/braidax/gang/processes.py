"""Processes that live and die together: their lines get a prefix, the first end is noticed, none is left behind."""

import contextlib
import math
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from io import TextIOBase
from typing import IO, Literal, final

from braidax.gang.greetings import Greetings
from braidax.lifeline import LIFELINE

LOG_LINES = 20
"""How many of the last lines of a process are kept."""

_MAX_LINE_BYTES = 1 << 16  # what is longer is cut in two
_CHUNK_BYTES = 1 << 16
_MAX_DRAINED = 1 << 20  # bytes; more than a pipe holds
_SLICE_SECONDS, _KILL_SECONDS = 0.5, 10.0  # of one wait; for the kernel to end what was killed
_END, _LOOK = b"x", b"."  # what wakes the thread that watches
_MAX_TOLD_BYTES = 1 << 8  # of `Processes.tell`
MAX_STDIN_BYTES = (1 << 16) - _MAX_TOLD_BYTES
"""How long `Command.stdin` may be: what a pipe holds before anybody reads, and room for what is told later."""

Stream = Literal["stdout", "stderr"]
Writer = Callable[[int, Stream, str], None]
"""Is given the number of the process, the stream, and a line without its end."""


@dataclass(frozen=True)
class Command:
    """How to start a process.

    **Fields:** `arguments`: the first one is the program. `environment`: all of it; `LIFELINE` is added. `folder`: the
    working folder. `descriptors`: that it inherits under the same numbers. `stdin`: what it reads first, at
    most `MAX_STDIN_BYTES`; the end of its input comes with `Processes.end`. None is no input at all.
    """

    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    folder: str | None = None
    descriptors: tuple[int, ...] = ()
    stdin: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Ending:
    """How a process ended.

    **Fields:** `number`: its place among the commands. `status`: the exit status, or minus the number of the signal.
    `time_seconds`: when it was seen (`time.time`). `log`: its last lines.
    """

    number: int
    pid: int
    status: int
    time_seconds: float
    log: tuple[str, ...]

    @property
    def how(self) -> str:
        """In words."""
        return describe_status(self.status)

    @property
    def exit_code(self) -> int:
        """As a shell tells it: 128 and the signal's number for a process that a signal ended."""
        return self.status if self.status >= 0 else 128 - self.status


def describe_status(status: int) -> str:
    """Returns how a process ended, in words, given its exit status or minus the number of the signal."""
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = "of no name"
    hint = ", as the kernel does when memory runs out" if -status == signal.SIGKILL else ""
    return f"was ended by signal {-status} ({name}){hint}"


def print_lines(prefixes: Sequence[str], file: TextIOBase | None = None) -> Writer:
    """Returns a writer that puts a prefix before each line, by the number of the process.

    **Arguments:** `file`: what is written to; None is the standard stream of the same name, whatever that is then.
    """

    def write(number: int, stream: Stream, line: str) -> None:
        target = file if file is not None else sys.stdout if stream == "stdout" else sys.stderr
        text = f"{prefixes[number]}{line}\n"
        try:
            target.write(text)
        except UnicodeEncodeError:
            target.write(text.encode("ascii", "backslashreplace").decode())
        target.flush()

    return write


@final
class Processes:
    """Starts processes, each the leader of a group of its own, and ends them all together.

    They end with this process, however it ends, if they call `end_with` on their `LIFELINE` or end with their input.

    **Arguments:** `commands`: what to start. `write`: is given every line that they write, by one thread at a time.
    `grace_seconds`: between SIGTERM and SIGKILL, where `end` is not told otherwise.

    **Raises:** `OSError` when one cannot be started; none is left behind then.
    """

    def __init__(self, commands: Sequence[Command], *, write: Writer, grace_seconds: float = 5.0) -> None:
        self._grace_seconds = grace_seconds
        self._processes: list[_Process] = []
        self._unwatched: list[_Process] = []  # started or discarded since the thread last looked
        self._unseen: list[Ending] = []
        self._woken = False
        self._changed = threading.Condition()
        self._pipes = (*os.pipe(), *os.pipe())
        self._wake_read, self._wake_write, self._news_read, self._news_write = self._pipes
        self._thread: threading.Thread | None = None
        self._write: Writer | None = write
        try:
            self.add(commands)
            self._thread = threading.Thread(target=self._watch, name="braidax-watch", daemon=True)
            self._thread.start()
        except BaseException:
            self.end()
            raise

    def add(self, commands: Sequence[Command]) -> list[int]:
        """Starts more processes, and returns their numbers. **Raises:** `OSError`; those before that one run then."""
        first = len(self._processes)
        for command in commands:
            self._processes.append(_Process(len(self._processes), command))
            self._unwatched.append(self._processes[-1])
        os.write(self._wake_write, _LOOK)
        return list(range(first, len(self._processes)))

    def discard(self, number: int) -> None:
        """Ends a process at once, with whatever it started, and gives up what is held of it."""
        process = self._processes[number]
        process.signal(signal.SIGKILL)
        process.is_discarded = True
        self._unwatched.append(process)
        os.write(self._wake_write, _LOOK)

    def fileno(self) -> int:
        """Returns a descriptor that is readable when `wait` has something to return."""
        return self._news_read

    def wait(self, *, timeout_seconds: float | None) -> list[Ending]:
        """Waits until a process has ended, and returns those that did and were not returned before.

        **Arguments:** `timeout_seconds`: None waits for as long as all of them live.

        **Returns:** how they ended, in order; nothing behind the limit, and when `wake` was called.
        """
        with self._changed:
            self._wait_for(lambda: bool(self._unseen) or self._woken, timeout_seconds)
            self._woken = False
            unseen, self._unseen = self._unseen, []
            if unseen and self._pipes:
                os.read(self._news_read, len(unseen))
        return unseen

    def wake(self) -> None:
        """Lets the `wait` that is under way, or else the next one, return at once; any thread may call it."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def ask(self) -> None:
        """Asks all processes to end, by SIGTERM."""
        for process in self._alive():
            process.signal(signal.SIGTERM)
            process.signal(signal.SIGCONT)  # one that is stopped would not hear of it

    def tell(self, line: bytes) -> None:
        """Writes a short line to the input of all processes that have one; who takes no more does not get it."""
        for process in self._alive():
            process.tell(line)

    def wait_for_all(self, timeout_seconds: float) -> bool:
        """Waits until all processes have ended, and says whether they have."""
        if self._thread is not None:
            with self._changed:
                self._wait_for(lambda: not self._alive(), timeout_seconds)
        return not self._alive()

    def end(self, *, leave_seconds: float = 0.0, grace_seconds: float | None = None) -> None:
        """Ends all processes and whatever they started: SIGTERM, then SIGKILL. A second call does nothing.

        **Arguments:** `leave_seconds`: how long they may take to end by themselves, before the first signal, now that
        their input has ended. `grace_seconds`: instead of the constructor's.
        """
        try:
            for process in self._processes:
                process.close_input()
            self.wait_for_all(leave_seconds)
            self.ask()
            self.wait_for_all(self._grace_seconds if grace_seconds is None else grace_seconds)
        finally:
            for process in self._processes:
                process.signal(signal.SIGKILL)
            self.wait_for_all(_KILL_SECONDS)
            self._close()

    def _wait_for(self, is_so: Callable[[], bool], timeout_seconds: float | None) -> None:
        """Waits in slices: a signal that another thread has got is handled when this one, the main one, wakes."""
        deadline = math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds
        while not is_so() and (left := deadline - time.monotonic()) > 0:
            self._changed.wait(min(left, _SLICE_SECONDS))

    def _alive(self) -> list["_Process"]:
        return [process for process in self._processes if process.ending is None]

    def _close(self) -> None:
        if self._thread is not None:
            with contextlib.suppress(OSError):
                os.write(self._wake_write, _END)
            self._thread.join()
            self._thread = None
        for process in self._processes:
            process.close()
        self._processes = []
        pipes, self._pipes = self._pipes, ()
        for descriptor in pipes:
            os.close(descriptor)

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_read, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fd == self._wake_read:
                        if _END in os.read(key.fd, _CHUNK_BYTES):
                            for process in self._processes:
                                process.drain(self._told)
                            return
                        while self._unwatched:
                            self._look(selector, self._unwatched.pop(0))
                        break  # what else is ready may be of a process that was discarded
                    process: _Process = key.data
                    if key.fd == process.pidfd:
                        self._note_ending(selector, process)
                    elif key.fd in selector.get_map() and process.read(key.fd, self._told) == 0:
                        selector.unregister(key.fd)  # of what an event before has given up nothing is read

    def _look(self, selector: selectors.BaseSelector, process: "_Process") -> None:
        """Begins to watch a process, or gives one up that is discarded and has ended."""
        known = selector.get_map()
        if not process.is_discarded:
            for descriptor in process.descriptors:
                selector.register(descriptor, selectors.EVENT_READ, process)
        elif process.ending is not None:
            for descriptor in [key.fd for key in known.values() if key.data is process]:
                selector.unregister(descriptor)
            process.close()
        elif process.pidfd not in known:  # it was discarded before it was ever watched
            selector.register(process.pidfd, selectors.EVENT_READ, process)

    def _note_ending(self, selector: selectors.BaseSelector, process: "_Process") -> None:
        selector.unregister(process.pidfd)
        ending = process.ended(self._told)
        with self._changed:
            self._unseen.append(ending)
            os.write(self._news_write, b"x")
            self._changed.notify_all()
        if process.is_discarded:
            self._look(selector, process)

    def _told(self, number: int, stream: Stream, line: str) -> None:
        if self._write is not None:
            try:
                self._write(number, stream, line)
            except (OSError, ValueError):  # nobody reads it any more; the processes must not wait for that
                self._write = None


class _Process:
    """One process, its descriptors, and the lines it has begun. Its owner signals; the thread that watches reads."""

    def __init__(self, number: int, command: Command) -> None:
        self.number = number
        self.ending: Ending | None = None
        self.is_discarded = False  # its owner has sent its last signal
        self._log: deque[str] = deque(maxlen=LOG_LINES)
        self._greetings = Greetings()
        with contextlib.ExitStack() as opened:
            parent, lifeline = os.pipe()
            opened.callback(os.close, lifeline)
            try:
                self._popen = subprocess.Popen(
                    command.arguments,
                    stdin=subprocess.DEVNULL if command.stdin is None else subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    pass_fds=(parent, *command.descriptors),
                    cwd=command.folder,
                    env={**command.environment, LIFELINE: str(parent)},
                    process_group=0,
                    bufsize=0,
                )
            finally:
                os.close(parent)
            opened.callback(self._reap)
            opened.callback(self.signal, signal.SIGKILL)
            self.pidfd = os.pidfd_open(self._popen.pid)
            opened.callback(os.close, self.pidfd)
            self._begun: dict[int, tuple[Stream, bytearray]] = {}
            for stream, pipe in _outputs(self._popen):
                os.set_blocking(pipe.fileno(), False)
                self._begun[pipe.fileno()] = (stream, bytearray())
            if self._popen.stdin is not None:
                self._popen.stdin.write(command.stdin or b"")  # a pipe holds MAX_STDIN_BYTES
            self._opened = opened.pop_all()

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What to watch: the end of the process, and what it writes."""
        return (self.pidfd, *self._begun)

    def read(self, descriptor: int, write: Writer) -> int | None:
        """Reads what was written, and returns how many bytes: 0 at the end, None when there are none now."""
        stream, begun = self._begun[descriptor]
        try:
            data = os.read(descriptor, _CHUNK_BYTES)
        except BlockingIOError:
            return None
        begun += data
        *lines, rest = begun.split(b"\n")
        if not data or len(rest) > _MAX_LINE_BYTES:
            lines, rest = [*lines, *([rest] if rest else [])], b""
        begun[:] = rest
        for text in self._greetings.left(stream, (line.decode(errors="replace") for line in lines)):
            self._log.append(text)
            write(self.number, stream, text)
        return len(data)

    def drain(self, write: Writer) -> None:
        """Reads what is in the pipes now."""
        for descriptor in self._begun:
            for _ in range(_MAX_DRAINED // _CHUNK_BYTES):  # something it started may write forever
                if not self.read(descriptor, write):
                    break

    def ended(self, write: Writer) -> Ending:
        """Returns how the process ended. It stays a zombie, so that the number of its group stays its own."""
        self.drain(write)
        found = os.waitid(os.P_PID, self._popen.pid, os.WEXITED | os.WNOWAIT)
        assert found is not None
        status = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        self.ending = Ending(self.number, self._popen.pid, status, time.time(), tuple(self._log))
        return self.ending

    def close_input(self) -> None:
        """Ends the input of the process."""
        if self._popen.stdin is not None:
            self._popen.stdin.close()

    def tell(self, line: bytes) -> None:
        """Writes to the input of the process, if it has one that takes as much now."""
        if self._popen.stdin is not None:
            with contextlib.suppress(OSError):  # it has closed its input
                os.set_blocking(self._popen.stdin.fileno(), False)
                self._popen.stdin.write(line)

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the whole group, as long as its number is its own."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if not self.is_discarded:
                os.killpg(self._popen.pid, number)

    def close(self) -> None:
        """Kills the group, reaps the process and closes all descriptors. A second call does nothing."""
        self._begun = {}
        self._opened.close()

    def _reap(self) -> None:
        self.close_input()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in the kernel, as on a dead network disk
            self._popen.wait(_KILL_SECONDS)
        for _, pipe in _outputs(self._popen):
            pipe.close()


def _outputs(popen: "subprocess.Popen[bytes]") -> list[tuple[Stream, IO[bytes]]]:
    assert popen.stdout is not None
    assert popen.stderr is not None
    return [("stdout", popen.stdout), ("stderr", popen.stderr)]
