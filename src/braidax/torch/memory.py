"""Memory of batches, which is used again once nobody holds a tensor in it."""

import math
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

from braidax.torch.library import torch_library

_SMALL_BYTES = 1 << 16  # below this, new memory costs less than to keep track of it
_MAX_FREE = 4  # of one size


class Memory:
    """Makes tensors of whole batches.

    New memory of some megabytes comes from the operating system page by page, each filled with zeros first: that takes
    longer than the copy into it. So the memory of a tensor comes back here when the last tensor or array in it is gone.
    """

    def __init__(self) -> None:
        self._free: dict[int, deque[Any]] = {}  # by bytes; a deque takes and gives in one step, as a finalizer needs

    def tensor(self, shape: Sequence[int], dtype: Any) -> Any:
        """Returns a tensor on the CPU, its values whatever they are.

        **Arguments:** `shape`: `[n, *sample_shape]`. `dtype`: of torch.
        """
        torch = torch_library()
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < _SMALL_BYTES:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        free = self._free.setdefault(num_bytes, deque(maxlen=_MAX_FREE))
        try:
            stored = free.pop()
        except IndexError:
            stored = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        held = stored.numpy()  # an array of its own each time: torch keeps it as long as it keeps the memory
        weakref.finalize(held, free.append, stored).atexit = False
        return torch.from_numpy(held).view(dtype).view(tuple(shape))
