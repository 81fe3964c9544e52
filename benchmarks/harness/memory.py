"""A limit of memory that the kernel holds a process to, its files in the page cache included."""

import contextlib
import os
import time
from collections.abc import Generator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_REMOVED_SECONDS = 10.0


class NoLimitError(Exception):
    """This machine does not let a process be limited; the message says why."""


class MemoryGroup:
    """A control group of processes with one limit. **Arguments:** `folder`: of the group, which is there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add(self, pid: int) -> None:
        """Holds a process to the limit: what it takes from here on counts."""
        (self._folder / "cgroup.procs").write_text(str(pid))

    @property
    def peak_bytes(self) -> int:
        """The most memory that was taken at a time."""
        names = ("memory.max_usage_in_bytes", "memory.peak")
        return next(int(path.read_text()) for name in names if (path := self._folder / name).exists())


@contextlib.contextmanager
def memory_limit(num_bytes: int) -> Generator[MemoryGroup, None, None]:
    """Makes a group below that of this process (where the kernel has one tree of groups: beside it), and removes it.

    Its processes must have ended before. **Raises:** `NoLimitError`.
    """
    parent, limit = _place()
    folder = parent / f"braidax-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        raise NoLimitError(f"no group of processes can be made here: {error}") from error
    try:
        try:
            (folder / limit).write_text(str(num_bytes))
        except OSError as error:
            raise NoLimitError(f"a group of processes takes no limit: {error}") from error
        yield MemoryGroup(folder)
    finally:
        _remove(folder)


def _place() -> tuple[Path, str]:
    """Returns where a group may be made, and the file that has its limit."""
    try:
        lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError as error:
        raise NoLimitError(f"the kernel has no groups of processes: {error}") from error
    for _, controllers, path in lines:
        if "memory" in controllers.split(","):
            return _ROOT / "memory" / path.lstrip("/"), "memory.limit_in_bytes"
    for _, controllers, path in lines:
        parent = (_ROOT / path.lstrip("/")).parent
        told = parent / "cgroup.subtree_control"
        if not controllers and told.exists() and "memory" in told.read_text().split():
            return parent, "memory.max"
    raise NoLimitError("no group of this process hands on limits of memory")


def _remove(folder: Path) -> None:
    deadline = time.monotonic() + _REMOVED_SECONDS
    while True:  # the kernel lets go of a process a moment after it has ended
        try:
            folder.rmdir()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
