"""Room for derived files: the store in the cache folder holds so much, and gives up what was unused for longest.

Only files whose footer proves that they were made here are counted or removed, and none that an open data set uses.
Each data set holds a file by `flock` that lists what it uses; the kernel lets go of it when its process ends.
"""

import contextlib
import fcntl
import json
import logging
import os
import tempfile
import threading
import time
import weakref
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

from braidax.data.storage.derived import Entry, cache_folder, entry_of
from braidax.errors import ArgumentError

_log = logging.getLogger("braidax")
_LIMIT = "BRAIDAX_CACHE_BYTES"
_DEFAULT_BYTES = 1 << 38
_WAIT_SECONDS, _POLL_SECONDS = 10.0, 0.01  # for a lock that is held while files are removed
_LOOK_FRACTION = 1 / 64  # of the limit, made by one data set between two looks
_FITTING = 7 / 8  # of the limit: what is left when room was made
_BEGIN = '{"braidax": "in use 1"}'
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)


def limit_bytes() -> int:
    """Returns what the store may hold: `$BRAIDAX_CACHE_BYTES`, or else 256 GiB.

    **Raises:** `ArgumentError` for a number of bytes that is none.
    """
    given = os.environ.get(_LIMIT)
    if given is None:
        return _DEFAULT_BYTES
    if not given.strip().isdigit():
        raise ArgumentError(f"{_LIMIT}={given!r} is not a number of bytes; expected one such as {_DEFAULT_BYTES}")
    return int(given)


class Room:
    """The place of one data set in the store.

    What is claimed is not removed while this object lives, and its process.

    **Arguments:** `kind`: names the folder in the store. `cache`: a folder of the user's, instead: what lies there is
    neither counted nor removed.
    """

    def __init__(self, kind: str, cache: Path | None = None) -> None:
        self._store = cache_folder() / "derived"
        self.folder = self._store / kind if cache is None else cache
        self._is_limited = cache is None
        self._limit = limit_bytes()
        self._made = self._limit  # so that the first file brings a look at what others left
        self._lock = threading.Lock()
        self._held: int | None = None
        self._end: weakref.finalize[..., Room] | None = None

    def claim(self, paths: Sequence[Path]) -> None:
        """Keeps files from being removed, whether they are there yet or not; not where nothing can be written."""
        inside = [path for path in paths if self._is_limited and path.is_relative_to(self._store)]
        if not inside:
            return
        with self._lock, contextlib.suppress(OSError), _kept_still(self._store):
            if self._held is None:
                folder = self._store / "in-use"
                folder.mkdir(exist_ok=True)
                self._held, name = tempfile.mkstemp(prefix="data-", suffix=".json", dir=folder)
                self._end = weakref.finalize(self, _let_go, self._held, Path(name), os.getpid())
                fcntl.flock(self._held, fcntl.LOCK_EX)
                os.write(self._held, f"{_BEGIN}\n".encode())
            lines = "".join(json.dumps(str(path.relative_to(self._store))) + "\n" for path in inside)
            os.write(self._held, lines.encode())

    def release(self) -> None:
        """Lets others remove what was claimed."""
        if self._end is not None:
            self._end()

    def made(self, num_bytes: int) -> None:
        """Takes note of a new file, and makes room where there are too many."""
        with self._lock:
            self._made += num_bytes
            if not self._is_limited or self._made <= _LOOK_FRACTION * self._limit:
                return
            self._made = 0
        with contextlib.suppress(OSError):
            make_room(self._store, self._limit)

    def forget(self, folder: Path, kept: Path) -> None:
        """Removes the derived files in a folder but for one, as far as no data set uses them."""
        with contextlib.suppress(OSError):
            entries = [entry_of(path) for path in folder.iterdir()]
            others = [entry for entry in entries if entry is not None and entry.path != kept]
            if others and self._is_limited:
                with _kept_still(self._store, is_alone=True):
                    used = _used(self._store)
                    _remove([entry for entry in others if entry.path not in used])
            elif others:
                _remove(others)


def make_room(store: Path, limit: int) -> None:
    """Removes the derived files that were unused for longest, if there are more than `limit` bytes of them."""
    found = list(_entries(store))
    total = sum(entry.num_bytes for entry in found)
    if total <= limit:
        return
    with _kept_still(store, is_alone=True):
        used = _used(store)
        for entry in sorted(found):
            if total <= _FITTING * limit:
                return
            if entry.path in used or entry_of(entry.all_paths[-1]) != entry:
                continue
            _remove([entry])
            total -= entry.num_bytes
            _log.info("%s: removed to make room, %d bytes", entry.path, entry.num_bytes)
    if total > limit:
        _log.warning(
            "%s: the derived files that are in use take %d bytes, more than %s=%d; raise it, so that they need not be "
            "made again",
            store,
            total,
            _LIMIT,
            limit,
        )


def _remove(entries: Sequence[Entry]) -> None:
    for entry in entries:
        for path in entry.all_paths:
            path.unlink(missing_ok=True)


def _entries(store: Path) -> Iterator[Entry]:
    for parent, _, names in os.walk(store):
        for name in names:
            entry = entry_of(Path(parent, name))
            if entry is not None:
                yield entry


def _used(store: Path) -> set[Path]:
    """Returns what open data sets use; forgets those of processes that ended."""
    used = set[Path]()
    for path in sorted((store / "in-use").glob("data-*.json")):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, _FLAGS & ~os.O_CREAT)
            with os.fdopen(descriptor, "r+") as file:
                first, *lines = [*file.read().splitlines(), ""]
                if first != _BEGIN:
                    continue
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    used |= {store / json.loads(line) for line in lines if line}
                else:
                    path.unlink(missing_ok=True)
    return used


@contextlib.contextmanager
def _kept_still(store: Path, *, is_alone: bool = False) -> Generator[None]:
    """Holds what is in use as it is: files are removed by one process alone, while none claims any."""
    store.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(store / "lock", _FLAGS, 0o600)
    try:
        deadline = time.monotonic() + _WAIT_SECONDS
        while True:
            try:
                fcntl.flock(descriptor, (fcntl.LOCK_EX if is_alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_POLL_SECONDS)
        yield
    finally:
        os.close(descriptor)


def _let_go(descriptor: int, path: Path, process: int) -> None:
    if os.getpid() == process:  # not in a fork, whose parent goes on
        path.unlink(missing_ok=True)
    os.close(descriptor)
