"""Writes the token files of Megatron."""

import struct
from pathlib import Path
from typing import Any

import numpy as np

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}


def write(
    path: Path, sequences: list[list[int]], dtype: str = "uint16", *, modes: bool = False, **changes: Any
) -> Path:
    """Writes `path.bin` and `path.idx` as the format says; `changes` replace what the index says."""
    arrays = [np.array(sequence, dtype) for sequence in sequences]
    path.with_suffix(".bin").write_bytes(b"".join(array.tobytes() for array in arrays))
    lengths = changes.get("lengths", [len(array) for array in arrays])
    ends = np.cumsum([array.nbytes for array in arrays])
    offsets = changes.get("offsets", [0, *ends[:-1]])
    borders = np.arange(len(arrays) + 1)
    head = struct.pack(
        "<QBQQ",
        changes.get("version", 1),
        changes.get("code", CODES[dtype]),
        changes.get("count", len(arrays)),
        len(borders),
    )
    tables = [np.array(lengths, "<i4"), np.array(offsets, "<i8"), borders.astype("<i8")]
    index = b"MMIDIDX\0\0" + head + b"".join(table.tobytes() for table in tables) + bytes(len(arrays) * modes)
    path.with_suffix(".idx").write_bytes(index)
    return path.with_suffix(".idx")
