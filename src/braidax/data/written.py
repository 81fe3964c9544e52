"""Tables that are computed elsewhere and write themselves: once, into a folder that lasts as long as somebody reads it.

Each folder lies in the cache folder, with a file in it that all who read hold by `flock`, shared. Whoever lets go of it
last removes the folder; of processes that were killed the kernel lets go, and the next one on that host removes what
nobody holds.
"""

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import socket
import threading
import time
import weakref
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from braidax.data.formats.tables.arrow import open_arrow
from braidax.data.multihost.meeting import ProcessGroup
from braidax.data.source import Source
from braidax.data.storage.derived import cache_folder
from braidax.errors import ArgumentError, BraidaxError, CallFailed
from braidax.program.coordination import say_busy

_NAME = re.compile(r"table-[0-9a-f]{32}")
_LOCK, _TABLE = "in-use.json", "rows"
_BEGIN = '{"braidax": "table 1"'
_SAY_SECONDS = 1.0


@runtime_checkable
class WritesArrow(Protocol):
    """A table that can write itself as files, such as a `braidax.frame.Frame`."""

    def sink_arrow(self, folder: str | os.PathLike[str]) -> Sequence[int]:
        """Writes the table into a new folder of Arrow files, all of it or nothing. **Returns:** the rows of each."""
        ...


class Written:
    """A table in a folder of its own, opened. The folder goes with `source`, or with `close` if that is called before.

    **Arguments:** `folder`: that `_new_folder` made, with the table in it. `descriptor`: of its file, held or not yet.

    **Raises:** `ArgumentError` where the folder is not to be seen, `FormatError` for a table that cannot be loaded.
    """

    def __init__(self, folder: Path, descriptor: int | None = None) -> None:
        is_maker = descriptor is not None
        if descriptor is None:
            try:
                descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
            except OSError as error:
                raise ArgumentError(
                    f"source: the table that another process has written into {folder} is not to be seen from here "
                    f"({error.strerror}); expected a disk that all processes share: set the environment variable "
                    "BRAIDAX_CACHE to a folder there, or write it with sink_arrow(folder) and load that"
                ) from error
        try:
            with contextlib.suppress(OSError):  # where there are no locks the maker removes it
                fcntl.flock(descriptor, fcntl.LOCK_SH)
            self.source: Source = open_arrow(folder / _TABLE)
        except BaseException:
            _let_go(folder, descriptor, os.getpid(), is_maker)
            raise
        self._end = weakref.finalize(self.source, _let_go, folder, descriptor, os.getpid(), is_maker)

    def close(self) -> None:
        """Lets go of the folder, which the last one removes. A second call does nothing."""
        self._end()


def write(table: WritesArrow) -> Written:
    """Lets a table write itself into a folder of the cache folder. **Raises:** what the table does, and `Written`."""
    folder, descriptor = _written(table)
    return Written(folder, descriptor)


def write_once(table: WritesArrow, group: ProcessGroup, *, timeout_seconds: float) -> Written:
    """Lets the table of the first of several processes write itself; the others open what it wrote.

    **Arguments:** `group`: all of which call this. `timeout_seconds`: how long the others wait without hearing that the
    first one is at work.

    **Raises:** as `write`; on the others `CallFailed` where the first one cannot, and `WaitTimeout`.
    """
    first = group.processes[0]
    if group.process != first:
        told = json.loads(group.gather("table", b"", deadline=time.monotonic() + timeout_seconds)[first])
        if "error" in told:
            raise CallFailed(f"process {first} cannot write the table: {told['error']}", first)
        return Written(Path(told["folder"]))
    try:
        with _saying_so():
            folder, descriptor = _written(table)
    except Exception as error:
        words = json.dumps({"error": f"{type(error).__name__}: {error}"}).encode()
        group.gather("table", words, deadline=time.monotonic() + timeout_seconds)
        raise
    try:
        words = json.dumps({"folder": str(folder)}).encode()
        group.gather("table", words, deadline=time.monotonic() + timeout_seconds)
    except BaseException:
        _let_go(folder, descriptor, os.getpid(), is_maker=True)
        raise
    return Written(folder, descriptor)


def _written(table: WritesArrow) -> tuple[Path, int]:
    """Returns a new folder with the table in it, and the descriptor by which it is held."""
    folder, descriptor = _new_folder(cache_folder() / "tables")
    try:
        if not sum(table.sink_arrow(folder / _TABLE)):
            raise ArgumentError("source: the table has no rows; expected at least one: see what it is filtered by")
    except BaseException:
        _let_go(folder, descriptor, os.getpid(), is_maker=True)
        raise
    return folder, descriptor


def _new_folder(store: Path) -> tuple[Path, int]:
    try:
        store.mkdir(parents=True, exist_ok=True)
        _remove_unused(store)
        folder = store / f"table-{secrets.token_hex(16)}"
        folder.mkdir(mode=0o700)
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        # Not before it is held: without this nobody removes it.
        os.write(descriptor, json.dumps({"braidax": "table 1", "host": socket.gethostname()}).encode())
    except OSError as error:
        raise ArgumentError(
            f"source: no folder for the table can be made in {store} ({error.strerror}); make room there, or set the "
            "environment variable BRAIDAX_CACHE to another folder"
        ) from error
    return folder, descriptor


def _remove_unused(store: Path) -> None:
    """Removes the folders that processes of this host have made and nobody holds any more."""
    for folder in store.iterdir():
        with contextlib.suppress(OSError, ValueError):
            if not _NAME.fullmatch(folder.name) or folder.is_symlink():
                continue
            descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                text = os.read(descriptor, 1 << 10).decode()
                if text.startswith(_BEGIN) and json.loads(text).get("host") == socket.gethostname():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


def _let_go(folder: Path, descriptor: int, process: int, is_maker: bool) -> None:
    try:
        if os.getpid() != process:  # a fork, whose parent goes on
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return  # others read
        except OSError:
            if not is_maker:
                return
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _saying_so() -> Generator[None]:
    """Lets the other processes know, inside the block, that this one is at work."""
    done = threading.Event()

    def say() -> None:
        seconds = 0
        while not done.wait(_SAY_SECONDS):
            seconds += 1
            with contextlib.suppress(BraidaxError):
                say_busy(f"writing a table {seconds}")

    thread = threading.Thread(target=say, name="braidax-writing", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
