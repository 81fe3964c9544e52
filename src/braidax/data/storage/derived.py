"""Numbers that were computed once, kept in a file that is written whole or not at all, and memory-mapped ever after."""

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

_MAGIC = b"braidax kept 01\n"  # the last bytes; before them the length of the footer, and the footer
_TAIL_BYTES = 8 + len(_MAGIC)

Write = Callable[[IO[bytes]], Mapping[str, Any]]
"""Writes the numbers, and returns facts about them."""


def cache_folder() -> Path:
    """Returns the folder for what can be made again: `$BRAIDAX_CACHE`, or else `~/.cache/braidax`."""
    if given := os.environ.get("BRAIDAX_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "braidax"


class Kept(NamedTuple):
    """What a file holds: `data`, uint8 `[bytes]`, and the `facts` about it."""

    data: NDArray[np.uint8]
    facts: Mapping[str, Any]


def place(folder: Path, about: Mapping[str, Any]) -> Path:
    """Returns where in a folder the numbers are kept that depend on `about`, which becomes JSON."""
    return folder / f"{xxhash.xxh3_128_hexdigest(_json(about))}.{about['kind']}"


def load(path: Path, about: Mapping[str, Any]) -> Kept | None:
    """Memory-maps a file if it is there, whole, and depends on the same."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - _TAIL_BYTES))
            tail = file.read()
            num_bytes = size - len(tail) - int.from_bytes(tail[:8], "little")
            if tail[8:] != _MAGIC or num_bytes < 0:
                return None
            file.seek(num_bytes)
            footer = json.loads(file.read(size - len(tail) - num_bytes))
            if footer["about"] != json.loads(_json(about)) or footer["bytes"] != num_bytes:
                return None
            data = np.memmap(file, np.uint8, "r", shape=(num_bytes,)) if num_bytes else np.empty(0, np.uint8)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Kept(data.view(np.ndarray), footer["facts"])


def store(path: Path, about: Mapping[str, Any], write: Write) -> None:
    """Writes a file that appears under its name only when it is complete and durable, whoever else writes it too.

    **Raises:** `OSError`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=path.name, suffix=".part", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            facts = write(file)
            footer = _json({"about": about, "bytes": file.tell(), "facts": facts})
            file.write(footer + len(footer).to_bytes(8, "little") + _MAGIC)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)


def _json(about: Mapping[str, Any]) -> bytes:
    return json.dumps(about, sort_keys=True).encode()
