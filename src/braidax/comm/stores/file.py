"""The store of ranks that see one folder: a disk of their host, or a file system that all hosts mount."""

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
import struct
import time
from pathlib import Path
from typing import final
from urllib.parse import quote

from braidax.comm.stores.limits import check_amount, check_value, key_bytes
from braidax.comm.stores.private import exposure
from braidax.comm.stores.store import Store, backoff, missing
from braidax.errors import CommError

_FIRST_PAUSE_SECONDS = 0.001
_LONGEST_PAUSE_SECONDS = 0.05
_LOCK_SECONDS = 60.0  # a lock is held for microseconds, or by a process that is stopped
_READABLE_CHARS = 80  # of a key in a file name; the rest is a checksum
_COUNTER = struct.Struct("!q")


@final
class FileStore(Store):
    """Values as files of a folder that all ranks see under the same path; they stay until somebody deletes it.

    Counters need a file system with locks: local disks, NFS 3 with lockd and NFS 4, Lustre with `flock`.

    What lies there proves who belongs to a job, so only this user may enter the folder and read its files.

    **Arguments:** `path`: of the folder; it is made, for this user only, if it is not there.

    **Raises:** `CommError` when the folder cannot be made or written, belongs to somebody else, or is open to others.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        named = Path(path).absolute()
        self._address = named.as_uri()
        try:
            named.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folder = named.resolve()  # nobody can put another one in the place of a link
            exposed = exposure(self._folder)
        except OSError as error:
            raise self._unusable(error) from error
        if exposed:
            raise CommError(
                f"{self._address}: the folder {exposed}; expected one that only this user may enter, because whoever "
                "reads a store can join its ranks: name a folder that is not there yet, or take this one from the "
                "others (chmod 700)"
            )
        if not os.access(self._folder, os.R_OK | os.W_OK | os.X_OK):
            raise self._unusable(PermissionError(errno.EACCES, os.strerror(errno.EACCES)))

    @property
    def address(self) -> str:
        return self._address

    def set(self, key: str, value: bytes) -> None:
        check_value(key, value)
        path = self._path(key, "value")
        draft = self._folder / f".{secrets.token_hex(16)}"
        try:
            try:
                with open(draft, "xb", opener=_opened) as file:
                    file.write(value)
                draft.replace(path)
            except BaseException:
                with contextlib.suppress(OSError):
                    draft.unlink(missing_ok=True)
                raise
        except OSError as error:
            raise self._unusable(error) from error

    def get(self, key: str, *, timeout_seconds: float) -> bytes:
        path = self._path(key, "value")
        deadline = time.monotonic() + timeout_seconds
        pause = _FIRST_PAUSE_SECONDS
        while True:
            try:
                os.close(os.open(self._folder, os.O_RDONLY))  # NFS may remember that a file is missing until then
                return path.read_bytes()
            except OSError as error:
                if not self._folder.is_dir() or error.errno not in (errno.ENOENT, errno.ESTALE):
                    raise self._unusable(error) from error
            wait = backoff(deadline, pause)
            if wait is None:
                raise missing(key, self.address, timeout_seconds)
            time.sleep(wait)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def add(self, key: str, amount: int) -> int:
        check_amount(amount)
        path = self._path(key, "counter")
        try:
            descriptor = _opened(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
            try:
                self._lock(descriptor, path)
                stored = os.pread(descriptor, _COUNTER.size, 0)
                total = amount + (_COUNTER.unpack(stored)[0] if len(stored) == _COUNTER.size else 0)
                os.pwrite(descriptor, _COUNTER.pack(total), 0)
                return total
            finally:
                os.close(descriptor)  # gives up the lock
        except OSError as error:
            raise self._unusable(error) from error

    def close(self) -> None:
        """Does nothing: no file is held."""

    def _path(self, key: str, kind: str) -> Path:
        name = key_bytes(key)
        return self._folder / f"{quote(name, safe='')[:_READABLE_CHARS]}-{hashlib.sha256(name).hexdigest()}.{kind}"

    def _lock(self, descriptor: int, path: Path) -> None:
        # flock, not lockf: its locks belong to the open file, so that threads of one process exclude one another too.
        deadline = time.monotonic() + _LOCK_SECONDS
        pause = _FIRST_PAUSE_SECONDS
        while True:
            try:
                return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES, errno.EINTR):
                    raise
            wait = backoff(deadline, pause)
            if wait is None:
                raise CommError(
                    f"{path}: another process has held the lock of this counter for {_LOCK_SECONDS:g} s; "
                    "is a rank stopped? End it, and start the job again"
                )
            time.sleep(wait)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _unusable(self, error: OSError) -> CommError:
        return CommError(
            f"{self._address}: the folder of the store cannot be used ({error.strerror}); expected one that all ranks "
            "can read and write, with file locks: is the file system mounted, writable and not full?"
        )


def _opened(path: str | Path, flags: int) -> int:
    """Opens a file which, if it is made, is for this user only."""
    return os.open(path, flags, 0o600)
