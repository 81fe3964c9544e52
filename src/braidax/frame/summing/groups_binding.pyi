"""Groups rows by an integer in C. Raises `ValueError` for buffers that do not fit, `MemoryError` without memory.

`groups` get the number of each row's group; of a row without one, how many groups there are.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

def joined(
    own_keys: NDArray[np.int64],
    other_keys: NDArray[np.int64],
    own_groups: NDArray[np.uint32],
    other_groups: NDArray[np.uint32],
    keys: NDArray[np.int64],
    own_counts: NDArray[np.int64],
    other_counts: NDArray[np.int64],
    /,
) -> tuple[int, int]: ...
def grouped(
    keys: NDArray[np.int64],
    groups: NDArray[np.uint32],
    group_keys: NDArray[np.int64],
    counts: NDArray[np.int64],
    /,
) -> tuple[int, int]: ...
def combine(what: str, values: NDArray[Any], groups: NDArray[np.uint32], out: NDArray[Any], /) -> None: ...
