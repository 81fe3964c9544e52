"""The folder of a run: a folder per checkpoint, which exists only once it is complete and durable.

```
runs/a/
├── .lock                           held by the run that writes here
├── step-00000100/
│   ├── arrays-00000.safetensors    what process 0 wrote
│   ├── arrays-00001.safetensors    what process 1 wrote
│   ├── manifest.json               the tree, and what is where in the first file
│   └── manifest-00001.json         what is where in the second
└── .step-00000200.<token>.unfinished/
```

A checkpoint is written into an unfinished folder, every file and the folder are fsynced, and only then it is renamed. A
second checkpoint of one step gets the name `step-00000100-1`; the first is removed after that.
"""

import contextlib
import fcntl
import json
import logging
import os
import re
import secrets
import socket
import weakref
from pathlib import Path
from typing import Any, NamedTuple

from braidax.checkpoint.format.manifest import is_name_of_file
from braidax.errors import CheckpointError

LOCK_FILE = ".lock"
_FINISHED = re.compile(r"step-(\d{8,})(?:-(\d+))?")
_UNFINISHED = re.compile(r"\.step-\d{8,}\.[0-9a-f]{16}\.unfinished")
_LOCK_START = b'{"token": "'
_logger = logging.getLogger(__name__)


class Found(NamedTuple):
    """A folder that has the name of a checkpoint: `step`, `revision` (of that step), `path`."""

    step: int
    revision: int
    path: Path


class Lock:
    """The right to write into the folder of a run. Made by `occupy`.

    **Arguments:** `descriptor`: of the locked file, which this owns. `token`: what is written in it.
    """

    def __init__(self, descriptor: int, token: str) -> None:
        self.token = token
        self._release = weakref.finalize(self, os.close, descriptor)
        # A child made by fork has the file open too, and would keep the folder locked after the end of this process.
        os.register_at_fork(after_in_child=self._release)

    def close(self) -> None:
        """Gives the folder free; a second call does nothing."""
        self._release()


def occupy(root: Path) -> Lock:
    """Makes the folder of a run, takes it for this one, and removes what crashed writers have left in it.

    **Arguments:** `root`: the folder.

    **Raises:** `CheckpointError` when it is no folder, cannot be written to, or is another run's.
    """
    try:
        missing = [folder for folder in (root, *root.parents) if not folder.exists()]
        root.mkdir(parents=True, exist_ok=True)
        for folder in missing:
            sync(folder.parent)
        lock = _lock(root)
        try:
            for path in root.iterdir():
                if _UNFINISHED.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
                    clear(path)
        except BaseException:
            lock.close()
            raise
    except OSError as error:
        raise CheckpointError(
            f"path={str(root)!r}: expected a folder that this process may create and write to, got: {error}; "
            "give another path, or change its permissions"
        ) from error
    return lock


def check_occupied(root: Path, token: str) -> None:
    """Checks that this process sees the folder that another one occupies. **Raises:** `CheckpointError`."""
    try:
        found = _occupant(os.open(root / LOCK_FILE, os.O_RDONLY)).get("token")
    except OSError as error:
        found = str(error)
    if found != token:
        raise CheckpointError(
            f"path={str(root)!r}: expected the folder that process 0 has locked, but its {LOCK_FILE} does not have "
            f"what that process wrote ({found}); give all processes a path on a file system that all of them see"
        )


def checkpoints(root: Path) -> list[Found]:
    """Returns the checkpoints in a folder, newest first, without looking inside."""
    listed = [found_at(path) for path in root.iterdir() if path.is_dir()]
    return sorted((found for found in listed if found is not None), reverse=True)


def found_at(path: Path) -> Found | None:
    """Returns what the name of a folder says, None if it is not that of a checkpoint."""
    match = _FINISHED.fullmatch(path.name)
    return None if match is None else Found(int(match[1]), int(match[2] or 0), path)


def misnamed(path: Path, step: int) -> str:
    """Returns why a checkpoint of a step is not where it belongs, empty if it is."""
    found = found_at(path)
    if found is not None and found.step == step:
        return ""
    return (
        f"{path}: holds the checkpoint of step {step}, as its manifest says: it is a copy, or was renamed; to restore "
        f"it, give it the name step-{step:08d}, or move it out of {path.parent}"
    )


def begin(root: Path, step: int) -> Path:
    """Makes and returns the unfinished folder of a checkpoint."""
    folder = _unfinished(root, step)
    folder.mkdir()
    return folder


def finish(unfinished: Path, step: int) -> Path:
    """Gives a checkpoint its name, durably. **Returns:** its folder, which readers now find."""
    root = unfinished.parent
    name = f"step-{step:08d}"
    revisions = [found.revision for found in checkpoints(root) if found.step == step]
    final = root / (f"{name}-{max(revisions) + 1}" if revisions else name)
    sync(unfinished)
    unfinished.rename(final)
    sync(root)
    return final


def discard(unfinished: Path) -> None:
    """Removes an unfinished checkpoint; what another process still writes there, the next `occupy` removes."""
    with contextlib.suppress(OSError):
        clear(unfinished)


def clear(folder: Path) -> None:
    """Removes the files of a checkpoint from a folder, and the folder where nothing else is in it.

    What has another name, or is no file, was put there by somebody else: it stays, and the log says so.

    **Raises:** `OSError`.
    """
    for name in files_in(folder):
        (folder / name).unlink(missing_ok=True)
    strangers = strangers_in(folder)
    if strangers:
        _logger.warning("%s stays, because of %s, which no checkpointer has written", folder, ", ".join(strangers))
    else:
        folder.rmdir()


def files_in(folder: Path) -> list[str]:
    """Returns the names of the files of a checkpoint in a folder. **Raises:** `OSError`."""
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if _is_own(entry))


def strangers_in(folder: Path) -> list[str]:
    """Returns the names of what is in a folder and is no file of a checkpoint. **Raises:** `OSError`."""
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if not _is_own(entry))


def remove(found: Found) -> None:
    """Removes a checkpoint that is known to be our own, all at once for those who look.

    **Raises:** `CheckpointError` when it cannot be.
    """
    trash = _unfinished(found.path.parent, found.step)
    try:
        found.path.rename(trash)
        clear(trash)
    except OSError as error:
        raise CheckpointError(
            f"{found.path}: this old checkpoint could not be removed: {error}; remove it by hand"
        ) from error


def sync(path: Path) -> None:
    """Makes a folder durable: the names in it, not the files."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def token_of(unfinished: Path) -> str:
    """Returns what is in the name of this unfinished folder alone."""
    return unfinished.name.split(".")[2]


def _is_own(entry: "os.DirEntry[str]") -> bool:
    return is_name_of_file(entry.name) and entry.is_file(follow_symlinks=False)


def _unfinished(root: Path, step: int) -> Path:
    return root / f".step-{step:08d}.{secrets.token_hex(8)}.unfinished"


def _lock(root: Path) -> Lock:
    descriptor = os.open(root / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    lock = Lock(descriptor, secrets.token_hex(8))
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        written = os.pread(descriptor, len(_LOCK_START), 0)
        if written.strip(b"\0") and written != _LOCK_START:  # a crash may have left nothing, or zeros
            raise CheckpointError(
                f"path={str(root)!r}: has a file {LOCK_FILE} that no Checkpointer wrote, and that one would overwrite: "
                "expected a folder for the checkpoints of one run; give another path, or move that file away"
            )
        about = {"token": lock.token, "process": os.getpid(), "host": socket.gethostname()}
        os.ftruncate(descriptor, 0)
        os.write(descriptor, json.dumps(about).encode())
        os.fsync(descriptor)
    except BlockingIOError as error:
        occupant = _occupant(os.dup(descriptor))
        lock.close()
        raise CheckpointError(
            f"path={str(root)!r}: process {occupant.get('process')} on {occupant.get('host')} saves its checkpoints "
            "here: expected one open Checkpointer for a folder; close that one or end its process, give another path, "
            "or read with braidax.checkpoint.restore, which locks nothing"
        ) from error
    except BaseException:
        lock.close()
        raise
    return lock


def _occupant(descriptor: int) -> dict[str, Any]:
    with contextlib.suppress(ValueError), os.fdopen(descriptor, "rb") as file:
        return json.loads(file.read())
    return {}
