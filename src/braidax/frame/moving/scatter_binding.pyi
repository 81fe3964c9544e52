"""Puts rows into parts in C. Raises `ValueError` for buffers that do not fit."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

def places(hashes: NDArray[np.uint64], size: int, num_buckets: int, places: NDArray[np.uint16], /) -> None: ...
def positions(places: NDArray[np.uint16], ends: NDArray[np.int64], positions: NDArray[np.uint32], /) -> None: ...
def scatter(values: NDArray[Any], positions: NDArray[np.uint32], out: NDArray[Any], /) -> None: ...
