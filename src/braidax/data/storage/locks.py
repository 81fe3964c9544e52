"""One lock for each derived file, among all processes that can make it: one makes it, the others wait and find it.

The lock is a file beside the derived one, held by `flock`: the kernel lets go of it when its holder ends, however that
happens. The holder writes into it which unfinished file is his, and how far he is. So the next one can remove what a
killed process left, and those who wait know whether anything moves.
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import socket
import stat
import tempfile
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from braidax.data.storage.progress import Progress
from braidax.errors import WaitTimeout

_log = logging.getLogger("braidax")
_BEGIN = b'{"braidax": "lock 1"'
_SAID_BYTES = 1 << 10  # always as many, written at once
_POLL_SECONDS = 0.05
_WAIT_SECONDS = 600.0  # without any progress of the holder
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)


class NotKept(OSError):
    """A derived file cannot be written."""


class NoPlace(NotKept):
    """A derived file cannot be put where it should: the folder cannot be written, or something strange lies there."""


class Held:
    """A lock that is held; `part` gives the file to write into.

    **Arguments:** `target`: the derived file. `descriptor`: of the lock. `is_locked`: false where there are no locks.
    """

    def __init__(self, target: Path, descriptor: int, *, is_locked: bool) -> None:
        self.descriptor = descriptor
        self._target = target
        self._is_locked = is_locked
        self._parts: list[tuple[str, int]] = []
        self._said = {"braidax": "lock 1", "pid": os.getpid(), "host": socket.gethostname(), "parts": self._parts}

    def tell(self, done: int) -> None:
        """Lets those who wait know how far the work is."""
        self._said["done"] = done
        if self._is_locked:
            with contextlib.suppress(OSError):  # a full disk is told of by the work itself
                os.pwrite(self.descriptor, json.dumps(self._said).encode().ljust(_SAID_BYTES), 0)

    @contextlib.contextmanager
    def part(self) -> Generator[Path]:
        """Makes an unfinished file beside the target, which is removed unless it was renamed.

        **Raises:** `NoPlace`.
        """
        try:
            descriptor, name = tempfile.mkstemp(prefix=f"{self._target.name}.", suffix=".part", dir=self._target.parent)
        except OSError as error:
            raise NoPlace(*error.args) from error
        part = Path(name)
        try:
            self._parts.append((part.name, os.fstat(descriptor).st_ino))
            os.close(descriptor)
            self.tell(0)
            yield part
        finally:
            part.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(target: Path, work: Progress, number: int = 0) -> Generator[Held | None]:
    """Holds the lock of a derived file while the block runs; makes its folder where there is none.

    Where the file system knows no locks, each process does the work for itself, and the log says so.

    **Arguments:** `target`: the derived file. `work`, `number`: show how far its holder is while this one waits; the
    `stop` of the former ends the wait, and the block gets None.

    **Raises:** `NoPlace` where the lock cannot be made; `WaitTimeout` when its holder makes no progress for 600 s.
    """
    path = target.with_name(f"{target.name}.lock")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        held = _held(target, path, work, number)
    except WaitTimeout:
        raise
    except OSError as error:
        raise NoPlace(*error.args) from error
    if held is None:
        yield None
        return
    try:
        with work.heard(held.tell):
            yield held
    finally:
        if _is_at(path, held.descriptor):
            path.unlink(missing_ok=True)  # before it is let go: who waits sees that it is gone, and makes a new one
        os.close(held.descriptor)


def _held(target: Path, path: Path, work: Progress, number: int) -> Held | None:
    """Tries until the lock is free."""
    last, moved = dict[str, Any](), time.monotonic()
    while not work.stop.is_set():
        descriptor = os.open(path, _FLAGS, 0o644)
        try:
            held = _tried(target, path, descriptor)
            said = _said(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        if held is not None:
            return held
        os.close(descriptor)
        if said != last:
            last, moved = said, time.monotonic()
            work.show(number, int(said.get("done", 0)))
        elif time.monotonic() > moved + _WAIT_SECONDS:
            raise WaitTimeout(
                f"{target}: process {said.get('pid')} on {said.get('host')} has been making it without progress for "
                f"{_WAIT_SECONDS:.0f} s, and holds {path.name}; end it if it hangs, and this is made by the next"
            )
        work.stop.wait(_POLL_SECONDS)
    return None


def _tried(target: Path, path: Path, descriptor: int) -> Held | None:
    """Locks an open lock file if it is free, and still the one of that name."""
    begin = os.pread(descriptor, len(_BEGIN), 0)
    if begin not in (b"", _BEGIN) or not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise OSError(errno.EEXIST, f"{path} was not written by Braidax; move it away")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        _log.warning("%s: its file system has no locks, so each process makes it for itself", target)
        return Held(target, descriptor, is_locked=False)
    if not _is_at(path, descriptor):
        return None
    _remove_parts(target, _said(descriptor))
    return Held(target, descriptor, is_locked=True)


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except OSError:
        return False


def _said(descriptor: int) -> dict[str, Any]:
    """Returns what a holder wrote into its lock."""
    try:
        return dict(json.loads(os.pread(descriptor, _SAID_BYTES, 0)))
    except (OSError, ValueError, TypeError):
        return {}


def _remove_parts(target: Path, said: Mapping[str, Any]) -> None:
    """Removes the unfinished files that a process which was killed had told of."""
    expected = re.compile(re.escape(target.name) + r"\.[a-z0-9_]{8}\.part")
    for entry in said.get("parts") or ():
        with contextlib.suppress(OSError, ValueError, TypeError):
            name, inode = entry
            state = target.with_name(name).lstat()
            if expected.fullmatch(name) and stat.S_ISREG(state.st_mode) and state.st_ino == inode:
                target.with_name(name).unlink()
