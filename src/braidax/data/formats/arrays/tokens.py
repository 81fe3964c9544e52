"""Raw token files: one stream of ids, memory-mapped and cut into sequences that do not overlap."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from braidax.data.formats.arrays.arrays import ArraySource
from braidax.data.storage.mapped import Mapped
from braidax.errors import ArgumentError, FormatError

# The header of llm.c: 256 little-endian int32, of which the first three are magic, version and number of tokens.
HEADER_BYTES = 256 * 4
_HEADERS = {20240520: (1, np.dtype("<u2")), 20240801: (7, np.dtype("<u4"))}


def has_header(head: bytes) -> bool:
    """Says whether a file's first bytes are a header of llm.c."""
    return len(head) >= 4 and int.from_bytes(head[:4], "little") in _HEADERS


def open_tokens(path: Path, *, sequence_length: int = 1024, dtype: DTypeLike | None = None) -> ArraySource:
    """Opens a file of token ids as samples `{"tokens": [sequence_length]}`.

    **Arguments:** `sequence_length`: tokens in one sample; what is left at the end of the file is not used, and
    `describe` says how much. `dtype`: of the stored ids; by default what the header says, `uint16` without one.

    **Raises:** `ArgumentError` for options that cannot work; `FormatError` for a file whose size does not fit.
    """
    if sequence_length < 1:
        raise ArgumentError(f"sequence_length={sequence_length}: expected at least 1 token in a sample")
    with path.open("rb") as file:
        head = file.read(12)
    stored, offset, num_tokens = token_layout(str(path), path.stat().st_size, head, dtype)
    num_samples, unused = divmod(num_tokens, sequence_length)
    if num_samples == 0:
        raise FormatError(
            f"{path}: holds {num_tokens:,} tokens of {stored}, fewer than one sample of sequence_length="
            f"{sequence_length}; expected at least that many: choose a smaller sequence_length"
        )
    mapped = Mapped([path])
    tokens: NDArray[Any] = np.ndarray((num_samples, sequence_length), stored, mapped.array(0), offset)
    facts = {
        "format": f"tokens, {stored}" + (", llm.c header" if offset else ""),
        "files": path.name,
        "tokens": f"{num_tokens:,}, of which the last {unused:,} are not used (sequence_length={sequence_length})",
    }
    return ArraySource({"tokens": tokens}, where=str(path), facts=facts, mapped=mapped)


def token_layout(name: str, size: int, head: bytes, dtype: DTypeLike | None) -> tuple[np.dtype[Any], int, int]:
    """Returns how a file holds its tokens: their dtype, the offset of the first one in bytes, and their number.

    **Arguments:** `name`: the file, for errors. `size`: its bytes. `head`: its first 12 bytes. `dtype`: as
    `open_tokens`.

    **Raises:** as `open_tokens`.
    """
    offset = HEADER_BYTES if has_header(head) else 0
    stored = _stored_dtype(name, head, dtype)
    if (size - offset) % stored.itemsize or size < offset:
        raise FormatError(
            f"{name}: {size:,} bytes, of which {offset:,} are a header, are no whole number of {stored} tokens of "
            f"{stored.itemsize} bytes; it is truncated, or dtype= is another"
        )
    num_tokens = (size - offset) // stored.itemsize
    if offset and num_tokens != int.from_bytes(head[8:12], "little"):
        promised = int.from_bytes(head[8:12], "little")
        raise FormatError(
            f"{name}: the header promises {promised:,} tokens, the file holds {num_tokens:,}; copy it again"
        )
    return stored, offset, num_tokens


def _stored_dtype(name: str, head: bytes, dtype: DTypeLike | None) -> np.dtype[Any]:
    try:
        asked = None if dtype is None else np.dtype(dtype)
    except TypeError as error:
        raise ArgumentError(f"dtype={dtype!r}: {error}; expected an integer dtype such as 'uint16'") from error
    if asked is not None and asked.kind not in "iu":
        raise ArgumentError(f"dtype={dtype!r}: expected an integer dtype such as 'uint16', tokens are ids")
    if not has_header(head):
        return np.dtype("<u2") if asked is None else asked
    if len(head) < 12:
        raise FormatError(f"{name}: truncated inside the header of {HEADER_BYTES} bytes; copy it again")
    magic, version = int.from_bytes(head[:4], "little"), int.from_bytes(head[4:8], "little")
    known, stored = _HEADERS[magic]
    if version != known:
        raise FormatError(f"{name}: header {magic} has version {version}, expected {known}: this layout is not known")
    if asked is not None and asked != stored:
        raise ArgumentError(f"dtype={dtype!r}: the header of {name} says {stored}; leave dtype out")
    return stored
