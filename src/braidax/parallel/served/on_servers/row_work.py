"""How threads share the work on rows, and the memory in which they compute some."""

import contextlib
import itertools
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Executor
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from braidax.cores import usable_cores
from braidax.parallel.served.row_memory import aligned, is_aligned

from .first_rows import FEWEST, padded

_FEW = 8192  # rows that are not worth a second thread
_MOST = 8192  # rows that are computed at a time
_CACHED_BYTES = 1 << 21  # of the values of these: what is taken together should stay in a cache


class Room(NamedTuple):
    """Memory in which one thread computes rows, again and again: what is new is not there yet, and takes longer.

    **Fields:** `rows`: of values and of each thing kept, `[chunk, …]`. `gradients`: `[chunk, D]`.
    """

    rows: Sequence[NDArray[Any]]
    gradients: NDArray[Any]


@final
class RowWork:
    """Lets threads work on rows.

    **Arguments:** `forms`: shapes and dtypes of what a row has, values first. `threads`: that work; None is the
    caller's.

    **Fields:** `chunk`: rows that are computed at a time.
    """

    def __init__(self, forms: Sequence[tuple[tuple[int, ...], np.dtype[Any]]], threads: Executor | None) -> None:
        self._forms, self._threads, self._num_threads = [*forms], threads, usable_cores()
        (width,), dtype = forms[0]
        fits = _CACHED_BYTES // max(1, width * dtype.itemsize)
        self.chunk = min(_MOST, max(FEWEST, 1 << (max(1, fits).bit_length() - 1)))
        self._rooms: list[Room] = []  # that no thread is in

    def share_out(self, count: int, work: Callable[[slice], Any]) -> list[Any]:
        """Lets threads work on slices of rows, all about as long. **Returns:** what `work` gives for each, in order."""
        num_threads = 1 if self._threads is None else max(1, min(self._num_threads, -(-count // _FEW)))
        num_parts = max(1, -(-count // (self.chunk * num_threads)) * num_threads)
        borders = [count * part // num_parts for part in range(num_parts + 1)]
        parts = [slice(*ends) for ends in itertools.pairwise(borders)] if count else []
        return list(map(work, parts) if self._threads is None or len(parts) == 1 else self._threads.map(work, parts))

    @contextlib.contextmanager
    def room(self) -> Generator[Room]:
        """Lends a room that no thread is in."""
        try:
            found = self._rooms.pop()
        except IndexError:
            rows = [aligned((self.chunk, *shape), dtype) for shape, dtype in self._forms]
            found = Room(rows, aligned(rows[0].shape, rows[0].dtype))
        yield found
        self._rooms.append(found)


def filled(place: NDArray[Any], rows: NDArray[Any]) -> NDArray[Any]:
    """Returns rows, and zeros behind them up to as many as a program is compiled for, where XLA reads them in place."""
    if len(rows) == padded(len(rows)) and is_aligned(rows):
        return rows
    place[: len(rows)] = rows
    place[len(rows) : padded(len(rows))] = 0
    return place[: padded(len(rows))]
