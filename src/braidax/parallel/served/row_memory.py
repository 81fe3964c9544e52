"""Rows in host memory, copied and summed in C where it was compiled, without Python's lock."""

import itertools
import math
from collections.abc import Sequence
from concurrent.futures import Executor
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from braidax.bindings import import_binding
from braidax.cores import usable_cores
from braidax.errors import ArgumentError

_ALIGNMENT = 64
_FEW = 16384  # rows that are not worth a second thread
_FEW_TO_MOVE = 4096
_SUMMED = (np.dtype(np.float32), np.dtype(np.float64))


def aligned(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Returns zeros that XLA reads where they are: it copies what is not at a multiple of 64 bytes."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.zeros(size + _ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % _ALIGNMENT
    return memory[first : first + size].view(dtype).reshape(shape)


def is_aligned(array: NDArray[Any]) -> bool:
    """Returns whether an array lies as those of `aligned` do."""
    return array.flags.c_contiguous and array.ctypes.data % _ALIGNMENT == 0


def take_rows(table: NDArray[Any], ids: NDArray[np.integer[Any]], out: NDArray[Any]) -> None:
    """Copies rows of a table. **Arguments:** `table`: `[V, …]`. `ids`: `[m]`, of its rows. `out`: `[m, …]`."""
    if (binding := compiled()) is None:
        np.take(table, ids, axis=0, out=out, mode="clip")  # not "raise", which would copy them once more
    else:
        binding.take(table, _int64(ids), out, _row_bytes(table), _row_bytes(table))


def put_rows(table: NDArray[Any], ids: NDArray[np.integer[Any]], rows: NDArray[Any]) -> None:
    """Undoes `take_rows`: copies rows into a table."""
    if (binding := compiled()) is None:
        table[ids] = rows
    else:
        given = np.ascontiguousarray(rows, table.dtype)
        binding.put(table, _int64(ids), given, _row_bytes(table), _row_bytes(table))


def take_at(memory: NDArray[np.uint8], places: NDArray[np.int64], out: NDArray[Any]) -> None:
    """Copies rows that lie anywhere. **Arguments:** `places`: `[m]`, of the first bytes of rows in `memory`. `out`:
    `[m, …]`."""
    if (binding := compiled()) is None:
        width = _row_bytes(out)
        out[:] = memory[places[:, None] + np.arange(width)].view(out.dtype).reshape(out.shape)
    else:
        binding.take(memory, places, out, _row_bytes(out), 1)


def put_at(memory: NDArray[np.uint8], places: NDArray[np.int64], rows: NDArray[Any]) -> None:
    """Undoes `take_at`. **Arguments:** `rows`: `[m, …]`, contiguous."""
    if (binding := compiled()) is None:
        width = _row_bytes(rows)
        memory[places[:, None] + np.arange(width)] = rows.reshape(len(rows), -1).view(np.uint8).reshape(-1, width)
    else:
        binding.put(memory, places, rows, _row_bytes(rows), 1)


def _int64(ids: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    return np.require(ids, np.int64, ["C_CONTIGUOUS", "ALIGNED"])


def _row_bytes(table: NDArray[Any]) -> int:
    return table.itemsize * math.prod(table.shape[1:])


def sums_on_host(platform: str, dtype: Any) -> bool:
    """Returns whether the gradients of equal ids are summed here, and not by devices.

    CPU devices have them in this memory already, and XLA adds rows one after the other; from others all rows would
    cross, where sums are fewer.
    """
    return platform == "cpu" and np.dtype(dtype) in _SUMMED


def sum_rows(rows: NDArray[Any], slots: NDArray[np.int32], out: NDArray[Any], threads: Executor | None = None) -> None:
    """Sums rows of the same slot, in their order, as `jax.ops.segment_sum` does.

    **Arguments:** `rows`: `[n, D]`, of 4 or 8 bytes a number. `slots`: `[n]`, of `out`. `out`: `[m, D]`; it is
    overwritten. `threads`: share this; None is the caller's.
    """
    if (binding := compiled()) is None:
        out[:] = 0
        np.add.at(out, slots, rows)
        return
    width, own = out.shape[1], _ALIGNMENT // out.itemsize
    given = np.ascontiguousarray(rows, out.dtype), slots, out, width, out.itemsize
    num_parts = 1 if threads is None or len(slots) < _FEW else min(usable_cores(), width // own)
    if threads is None or num_parts <= 1:
        binding.sum(*given, 0, width)
    else:  # each adds columns, all as many, and no two write into one line of a cache
        borders = [*(width // own * part // num_parts * own for part in range(num_parts)), width]
        for _ in threads.map(lambda part: binding.sum(*given, *part), itertools.pairwise(borders)):
            pass


def sum_by_id(parts: Sequence[tuple[NDArray[Any], NDArray[Any]]]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Sums rows of the same id, part by part. **Arguments:** `parts`: ids, in each all different, and `[m, D]`.
    **Returns:** ids in order, and `[u, D]`."""
    unique, first = np.unique(np.concatenate([ids for ids, _ in parts])), parts[0][1]
    total = np.zeros((len(unique), first.shape[1]), first.dtype)
    for ids, rows in parts:
        total[np.searchsorted(unique, ids)] += rows
    return unique, total


class AdagradRows(NamedTuple):
    """Rows that row-wise Adagrad moves. **Fields:** `values`: float32 `[V, D]`. `kept`: float32 `[V]`, the sum of the
    means of squared gradients. `touched`: int64 `[V]`, the last step that has moved a row."""

    values: NDArray[Any]
    kept: NDArray[Any]
    touched: NDArray[np.int64]


def move_by_adagrad(
    rows: AdagradRows,
    ids: NDArray[np.integer[Any]],
    gradients: NDArray[Any],
    *,
    rates: tuple[float, float],
    step: int,
    threads: Executor | None = None,
) -> None:
    """Moves rows by row-wise Adagrad in one pass, as it is where bindings are compiled.

    **Arguments:** `ids`: `[m]`, all different. `gradients`: float32 `[m, D]`. `rates`: the learning rate, and what is
    added below the root. `step`: of the update. `threads`: share this; None is the caller's.

    **Source:** row-wise Adagrad (Gupta et al. 2014); one pass over a row for all of it, as FBGEMM's kernels take.
    """
    binding = compiled()
    assert binding is not None, "the caller has asked"
    given = *rows, _int64(ids), np.ascontiguousarray(gradients, np.float32), rows.values.shape[1], *rates, step
    num_parts = 1 if threads is None else max(1, min(usable_cores(), len(ids) // _FEW_TO_MOVE))
    parts = itertools.pairwise(len(ids) * part // num_parts for part in range(num_parts + 1))
    first, *others = parts if threads is not None else [(0, len(ids))]
    moving = [threads.submit(binding.adagrad, *given, *part) for part in others if threads is not None]
    binding.adagrad(*given, *first)
    for one in moving:
        one.result()


def check_rows(ids: NDArray[Any], name: str, num_rows: int, told: str) -> None:
    """Raises `ArgumentError` for what is no numbers of rows. **Arguments:** `told`: who has how many."""
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise ArgumentError(f"{name} is {ids.dtype}{list(ids.shape)}, expected integers [m]")
    if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < num_rows):
        raise ArgumentError(
            f"{name} has rows {int(ids.min())} to {int(ids.max())}, and {told}: expected 0 <= row < {num_rows}"
        )


@cache
def compiled() -> ModuleType | None:
    """Returns what is compiled, or None where it is not: NumPy then does the same in more time."""
    return import_binding("braidax.parallel.served.rows_binding")
