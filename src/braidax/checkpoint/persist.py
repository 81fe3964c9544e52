"""From host memory to disk and back: a folder per checkpoint, which exists only once it is complete and durable.

```
runs/a/
├── step-00000100/
│   ├── arrays-00000.safetensors    every array of the tree
│   └── manifest.json               paths, kinds, dtypes, shapes, checksums; written last
└── .step-00000200.<token>.unfinished/
```

A checkpoint is written into an unfinished folder, every file and the folder are fsynced, and only then it is renamed.
While it is written its data file is locked, so that whoever finds an unfinished folder can tell a live writer from a
crash. A second checkpoint of one step gets the name `step-00000100-1`; the first is removed after that.
"""

import contextlib
import fcntl
import importlib.metadata
import io
import json
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Collection, Generator
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import xxhash

from braidax.checkpoint.manifest import (
    DATA_FILE,
    MANIFEST_FILE,
    DataFile,
    Entry,
    Manifest,
    Tensor,
    safetensors_header,
    stored_as,
)
from braidax.checkpoint.snapshot import Snapshot
from braidax.errors import CheckpointError

_CHUNK_BYTES = 16 * 2**20
_CLAIM_ATTEMPTS = 8
_FINISHED = re.compile(r"step-(\d{8,})(?:-(\d+))?")
_UNFINISHED = re.compile(r"\.step-\d{8,}\.[0-9a-f]{16}\.unfinished")


class Found(NamedTuple):
    """A folder that has the name of a checkpoint: `step`, `revision` (of that step), `path`."""

    step: int
    revision: int
    path: Path


def prepare(root: Path) -> None:
    """Makes the folder that holds checkpoints, and removes what crashed writers have left in it.

    **Arguments:** `root`: the folder. **Raises:** `CheckpointError` when it is no folder or cannot be written to.
    """
    try:
        missing = [folder for folder in (root, *root.parents) if not folder.exists()]
        root.mkdir(parents=True, exist_ok=True)
        for folder in missing:
            _sync(folder.parent)
        with tempfile.TemporaryFile(dir=root):
            pass
        for path in root.iterdir():
            if _UNFINISHED.fullmatch(path.name):
                _sweep(path)
    except OSError as error:
        raise CheckpointError(
            f"path={str(root)!r}: expected a folder that this process may create and write to, got: {error}; "
            "give another path, or change its permissions"
        ) from error


def checkpoints(root: Path) -> list[Found]:
    """Returns the checkpoints in a folder, newest first, without looking inside."""
    matches = [(_FINISHED.fullmatch(path.name), path) for path in root.iterdir() if path.is_dir()]
    return sorted((Found(int(m[1]), int(m[2] or 0), path) for m, path in matches if m), reverse=True)


def commit(root: Path, snapshot: Snapshot, step: int) -> Path:
    """Writes a checkpoint; when this returns it is durable.

    **Arguments:** `root`: the folder of all checkpoints. `snapshot`: the tree. `step`: how many updates it has seen.

    **Returns:** the folder of the checkpoint. **Raises:** `CheckpointError`; then nothing of it is left.
    """
    name = f"step-{step:08d}"
    try:
        with contextlib.ExitStack() as stack:
            unfinished, data = _claim(root, name)
            stack.enter_context(data)
            undo = stack.enter_context(contextlib.ExitStack())
            undo.callback(_remove, unfinished)
            content = _write_arrays(data, snapshot)
            _write_manifest(unfinished, Manifest(step, importlib.metadata.version("braidax"), *content))
            _sync(unfinished)
            revisions = [found.revision for found in checkpoints(root) if found.step == step]
            final = root / (f"{name}-{max(revisions) + 1}" if revisions else name)
            unfinished.rename(final)
            undo.pop_all()
            _sync(root)
    except OSError as error:
        raise CheckpointError(
            f"{root / name}: the checkpoint could not be written: {error}; make room or mend the disk. "
            "Earlier checkpoints are untouched"
        ) from error
    return final


def retain(root: Path, keep: int, obsolete: Collection[Path]) -> None:
    """Removes all but the newest checkpoints; only to be called once the newest is durable.

    **Arguments:** `root`: the folder of all checkpoints. `keep`: how many steps are kept, the newest revision of each.
    `obsolete`: checkpoints that are removed in any case.

    **Raises:** `CheckpointError` naming what cannot be removed.
    """
    kept: set[int] = set()
    for found in checkpoints(root):
        if found.path not in obsolete and found.step not in kept and len(kept) < keep:
            kept.add(found.step)
            continue
        trash = root / f".step-{found.step:08d}.{secrets.token_hex(8)}.unfinished"
        try:
            found.path.rename(trash)
            _remove(trash)
        except OSError as error:
            raise CheckpointError(
                f"{found.path}: this old checkpoint could not be removed: {error}; remove it by hand"
            ) from error


def read_manifest(folder: Path) -> Manifest:
    """Reads and verifies the manifest of a checkpoint.

    **Raises:** `CheckpointError` saying what is wrong with it.
    """
    try:
        text = (folder / MANIFEST_FILE).read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{folder / MANIFEST_FILE}: cannot be read, so this is no finished checkpoint: {error}"
        ) from error
    return Manifest.from_json(text, name=str(folder / MANIFEST_FILE))


@contextlib.contextmanager
def reader(folder: Path, manifest: Manifest) -> Generator["Reader"]:
    """Opens the arrays of a checkpoint.

    **Raises:** `CheckpointError` when the file is missing, truncated or has another header than it was written with.
    """
    path = folder / DATA_FILE
    try:
        with path.open("rb", buffering=0) as file:
            num_bytes = os.fstat(file.fileno()).st_size
            expected = manifest.data
            if num_bytes != expected.num_bytes:
                raise CheckpointError(
                    f"{path}: is of {num_bytes} bytes, expected {expected.num_bytes}: it was truncated or changed"
                )
            if xxhash.xxh3_64_hexdigest(file.read(expected.header_bytes)) != expected.header_checksum:
                raise CheckpointError(f"{path}: its header is not what was written: the file was changed")
            yield Reader(path, file.fileno())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


class Reader:
    """Reads arrays of a checkpoint into memory of their own. Made by `reader`."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor

    def read(self, entry: Entry, tensor: Tensor) -> np.ndarray:
        """Returns an array, verified. **Raises:** `CheckpointError` when it is not what was written."""
        array = np.empty(tensor.shape, np.dtype(tensor.dtype))
        content = _bytes_of(array)
        digest = xxhash.xxh3_64()
        done = 0
        while done < len(content):
            chunk = content[done : done + _CHUNK_BYTES]
            num_read = os.preadv(self._descriptor, [chunk], tensor.offset + done)
            if num_read == 0:
                raise CheckpointError(f"{self._path}: ends within leaf {entry.leaf.path!r}: it was truncated")
            digest.update(chunk[:num_read])
            done += num_read
        if digest.hexdigest() != tensor.checksum:
            raise CheckpointError(
                f"{self._path}: leaf {entry.leaf.path!r} has the checksum {digest.hexdigest()}, expected "
                f"{tensor.checksum}: the file was changed"
            )
        return array


def _claim(root: Path, name: str) -> tuple[Path, io.FileIO]:
    # Another process that starts up may sweep the folder away before it is locked; then a new name is tried.
    for _ in range(_CLAIM_ATTEMPTS):
        folder = root / f".{name}.{secrets.token_hex(8)}.unfinished"
        folder.mkdir()
        with contextlib.suppress(FileNotFoundError, BlockingIOError):
            data = (folder / DATA_FILE).open("xb", buffering=0)
            with contextlib.ExitStack() as undo:
                undo.callback(_remove, folder)
                undo.callback(data.close)
                fcntl.flock(data, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(data.fileno()).st_nlink:
                    undo.pop_all()
                    return folder, data
    raise CheckpointError(
        f"{root / name}: {_CLAIM_ATTEMPTS} unfinished folders were removed by other processes as soon as they "
        "were made; let fewer processes start on this folder at once"
    )


def _sweep(folder: Path) -> None:
    try:
        with (folder / DATA_FILE).open("r+b") as data:
            fcntl.flock(data, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(folder)
    except BlockingIOError:
        return
    except FileNotFoundError:
        # Either empty, or its writer is just about to make the data file: only an empty folder can be removed.
        with contextlib.suppress(OSError):
            folder.rmdir()


def _remove(folder: Path) -> None:
    # The data file goes last: what is left of an interrupted removal can be found and locked by the next one.
    with contextlib.suppress(FileNotFoundError):
        for path in sorted(folder.iterdir(), key=lambda path: path.name == DATA_FILE):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        folder.rmdir()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _bytes_of(array: np.ndarray) -> memoryview:
    return memoryview(cast(Any, array.reshape(-1).view(np.uint8)))


def _write_arrays(data: io.FileIO, snapshot: Snapshot) -> tuple[DataFile, tuple[Entry, ...]]:
    # Wide elements first, as safetensors does, so that every array is aligned to its own element.
    arrays = snapshot.arrays
    paths = sorted(arrays, key=lambda path: (-stored_as(arrays[path].dtype).alignment, path))
    header = safetensors_header({path: arrays[path] for path in paths})
    _write(data, memoryview(header))
    tensors: dict[str, Tensor] = {}
    offset = len(header)
    for path in paths:
        array = arrays[path]
        content = _bytes_of(array)
        digest = xxhash.xxh3_64()
        for start in range(0, len(content), _CHUNK_BYTES):
            chunk = content[start : start + _CHUNK_BYTES]
            digest.update(chunk)
            _write(data, chunk)
        tensors[path] = Tensor(offset, array.nbytes, array.dtype.name, array.shape, digest.hexdigest())
        offset += array.nbytes
    os.fsync(data.fileno())
    entries = tuple(
        Entry(owned.leaf, tensor=tensors[owned.leaf.path], key_impl=owned.key_impl)
        if owned.leaf.path in tensors
        else Entry(owned.leaf, number=owned.value)
        for owned in snapshot.leaves
    )
    return DataFile(offset, len(header), xxhash.xxh3_64_hexdigest(header)), entries


def _write(file: io.FileIO, content: memoryview) -> None:
    while content:
        content = content[file.write(content) :]


def _write_manifest(folder: Path, manifest: Manifest) -> None:
    with (folder / MANIFEST_FILE).open("xb") as file:
        file.write(json.dumps(manifest.to_json(), indent=1).encode())
        file.flush()
        os.fsync(file.fileno())
