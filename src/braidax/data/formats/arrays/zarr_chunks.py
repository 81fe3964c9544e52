"""Chunks of Zarr that hold whole rows, packed as most are: each is read, and unpacked by one call.

The library of the format has a task of an event loop for each step of each chunk.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from braidax.data.storage.files import Bytes
from braidax.errors import import_extra

_UNPACKED_3 = ("zstd", "gzip", "blosc")
_UNPACKED_2 = (*_UNPACKED_3, "zlib", "lz4")


class Chunks(NamedTuple):
    """How the chunks of an array are stored, each of which has whole rows.

    **Fields:** `key`: names the chunk with a number. `shape`, `dtype`: of each, the last one too. `unpack`: returns the
    bytes of one; None where they are stored as they are.
    """

    key: Callable[[int], str]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    unpack: Callable[[Bytes], Any] | None

    @property
    def num_rows(self) -> int:
        """Of each."""
        return self.shape[0]

    def values(self, stored: Bytes) -> NDArray[Any]:
        """Returns the values of a chunk. **Raises:** `ValueError` for another number of bytes; what `unpack` raises."""
        found = np.frombuffer(stored if self.unpack is None else self.unpack(stored), np.uint8)
        expected = math.prod(self.shape) * self.dtype.itemsize
        if len(found) != expected:
            raise ValueError(f"a chunk has {len(found):,} bytes, expected {expected:,}")
        return found.view(self.dtype).reshape(self.shape)


def plain_chunks(described: Mapping[str, Any], shape: Sequence[int], chunk: Sequence[int], dtype: Any) -> Chunks | None:
    """Returns how the chunks of an array are stored; None where they are left to the library.

    **Arguments:** `described`: what the store says of the array. `shape`, `chunk`: of the array, and of a chunk as the
    library knows it. `dtype`: of both.
    """
    if not shape or tuple(shape[1:]) != tuple(chunk[1:]) or dtype.kind not in "biufc":
        return None
    found = _version_3(described, dtype) if described.get("zarr_format") == 3 else _version_2(described)
    if found is None:
        return None
    first, separator, packed = found
    rest = "".join(f"{separator}0" for _ in shape[1:])
    unpack = None
    if packed is not None:
        numcodecs = import_extra("numcodecs", "zarr", purpose="reading Zarr")
        unpack = numcodecs.get_codec(packed).decode
    return Chunks(lambda number: f"{first}{number}{rest}", tuple(chunk), dtype, unpack)


_Stored = tuple[str, str, Mapping[str, Any] | None]
"""What keys begin with, what parts them, and the codec."""


def _version_3(described: Mapping[str, Any], dtype: np.dtype[Any]) -> _Stored | None:
    grid, encoding = _named(described["chunk_grid"]), _named(described["chunk_key_encoding"])
    (first, order), *packed = (_named(codec) for codec in described["codecs"])
    is_plain = first == "bytes" and (dtype.itemsize == 1 or order.get("endian") == "little")
    if (
        not is_plain
        or dtype.newbyteorder("<") != dtype
        or len(packed) > 1
        or any(name not in _UNPACKED_3 for name, _ in packed)
        or grid[0] != "regular"
        or encoding[0] not in ("default", "v2")
        or described.get("storage_transformers")
    ):
        return None
    separator = encoding[1].get("separator", "/" if encoding[0] == "default" else ".")
    start = f"c{separator}" if encoding[0] == "default" else ""
    return start, separator, {"id": packed[0][0]} if packed else None


def _version_2(described: Mapping[str, Any]) -> _Stored | None:
    packed = described.get("compressor")
    if described.get("filters") or described.get("order") != "C" or (packed and packed["id"] not in _UNPACKED_2):
        return None
    return "", described.get("dimension_separator", "."), packed


def _named(told: Any) -> tuple[str, Mapping[str, Any]]:
    """Returns the name of a part of a description, and what it is given."""
    return (told, {}) if isinstance(told, str) else (told["name"], told.get("configuration") or {})
