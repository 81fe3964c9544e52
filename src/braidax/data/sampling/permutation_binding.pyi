"""Permutes positions of an epoch in C, in place. Raises `ValueError` for buffers and numbers that do not fit."""

import numpy as np
from numpy.typing import NDArray

def permute(
    positions: NDArray[np.int64], keys: NDArray[np.uint64], a: int, b: int, num_samples: int, plainly: bool, /
) -> None: ...
