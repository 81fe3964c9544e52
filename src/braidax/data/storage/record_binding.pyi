"""Brings, reads, takes, stacks, unwraps, decodes and pads windows of records in C.

Raises `ValueError` for wrong buffers.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

def read(
    file: int, offsets: NDArray[np.int64], lengths: NDArray[np.int64], starts: NDArray[np.int64], data: Any, /
) -> int: ...
def take(data: Any, ids: NDArray[np.int64], rows: Any, width: int, unit: int, /) -> None: ...
def bring(data: Any, seconds: float, /) -> bool: ...
def stack(objects: list[Any], rows: Any, width: int, /) -> int: ...
def highway(key: bytes, data: Any, by_lanes: bool, /) -> int: ...
def unwrap(
    data: NDArray[np.uint8],
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    places: NDArray[np.int64],
    rows: NDArray[np.int64],
    /,
) -> None: ...
def crc32c(data: Any, by_table: bool, /) -> int: ...
def decode(
    data: Any,
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    checked: bool,
    names: tuple[bytes, ...],
    kinds: bytes,
    forms: bytes,
    counts: NDArray[np.int64],
    outs: tuple[NDArray[Any], ...],
    plain: NDArray[np.uint8],
    /,
) -> None: ...
def pad(
    data: Any,
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    places: NDArray[np.int64],
    rows: NDArray[np.uint8],
    held: NDArray[np.int64],
    blank: NDArray[np.uint8],
    checked: bool,
    /,
) -> int: ...
