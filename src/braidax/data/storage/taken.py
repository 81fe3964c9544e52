"""Rows of one length, copied without the GIL: out of memory that holds them in any order, or of objects."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from braidax.data.storage.files import Bytes, compiled

_GATHERED_BYTES = 1 << 19  # what one call of NumPy gathers: it fits into a core's cache on its way to `out`
_ON_GRID_BYTES = 1 << 6  # records of at least this, on one grid, are items of a contiguous array: copied only once


def take_rows(table: NDArray[Any], indices: NDArray[np.int64], out: NDArray[Any]) -> None:
    """Copies `table[indices]`.

    **Arguments:** `table`: `[n, *shape]`, C-contiguous. `indices`: int64 `[m]`, of its rows. `out`: `[m, *shape]`,
    C-contiguous and of the table's dtype.
    """
    if not out.size:
        return
    reads = compiled()
    if reads is not None and not table.dtype.hasobject:  # objects are counted
        width = out.nbytes // len(out)
        reads.take(_bytes(table), np.ascontiguousarray(indices), _bytes(out), width, width)
    elif table.flags.aligned:
        table.take(indices, axis=0, out=out, mode="clip")
    else:  # np.take would first make an aligned copy of the whole table; bytes are always aligned
        _bytes(table).take(indices, axis=0, out=_bytes(out), mode="clip")


def take_bytes(data: NDArray[np.uint8], places: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
    """Copies as many bytes from each place as a row of `out` has.

    **Arguments:** `data`: uint8 `[bytes]`, contiguous. `places`: int64 `[m]`, each with a row of bytes behind it.
    `out`: uint8 `[m, width]`, C-contiguous.
    """
    if not out.size:
        return
    reads, width = compiled(), out.shape[1]
    if reads is not None:
        reads.take(data, np.ascontiguousarray(places), out, width, 1)
        return
    records: NDArray[Any] = np.ndarray((len(data) - width + 1,), f"V{width}", data, 0, (1,))
    rows = out.view(f"V{width}")[:, 0]
    if width >= _ON_GRID_BYTES:
        phases = places % width
        if (phases == phases[0]).all():
            np.take(records[phases[0] :: width], places // width, out=rows, mode="clip")
            return
    step = max(1, _GATHERED_BYTES // width)
    for start in range(0, len(places), step):
        rows[start : start + step] = records[places[start : start + step]]


def stack_rows(objects: Sequence[Bytes], out: NDArray[Any]) -> int | None:
    """Copies the bytes of each object into a row.

    **Arguments:** `out`: `[n, *shape]`, C-contiguous, of any dtype. **Returns:** which object is the first that has
    another length than a row; None: none, and `out` is full.
    """
    if not len(objects):
        return None
    reads, width = compiled(), out[:1].nbytes
    if reads is not None and width and isinstance(objects, list):
        wrong = reads.stack(objects, _bytes(out), width)
        return None if wrong < 0 else wrong
    lengths = np.fromiter(map(len, objects), np.int64, len(objects))
    if np.any(lengths != width):
        return int(np.argmax(lengths != width))
    _bytes(out)[...] = np.frombuffer(b"".join(objects), np.uint8).reshape(len(objects), width)
    return None


def _bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    return array.reshape(len(array), -1).view(np.uint8)
