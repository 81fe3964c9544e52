"""Gradients of rows, summed over the ids and devices of a process, on the host."""

from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from typing import Any, final

import jax
from numpy.typing import NDArray

from .batch_rows import BatchRows
from .parts import local_parts
from .row_memory import aligned


@final
class Summing:
    """Sums gradients of rows, in memory that it keeps. **Arguments:** `threads`: share the work."""

    def __init__(self, threads: Executor) -> None:
        self._threads = threads
        self._room: dict[str, dict[int, NDArray[Any]]] = {}  # for the sums of each table, by device

    def summed(
        self, rows: Mapping[str, BatchRows], payload: Mapping[str, jax.Array], on_host: Callable[[str], bool]
    ) -> dict[str, NDArray[Any]]:
        """Waits for the gradients of all devices' rows, and sums them, `[u, D]`, by table.

        **Arguments:** `payload`: as of `ServedReading.push`. `on_host`: whether equal ids of a table are summed here.
        """
        found: dict[str, NDArray[Any]] = {}
        for name, one in rows.items():
            parts = local_parts(payload[name])
            if on_host(name):
                if name not in self._room:
                    self._room[name] = {at: aligned(part.shape, part.dtype) for at, part in parts.items()}
                parts = one.summed_ids(parts, self._room[name], self._threads)
            found[name] = one.summed(parts)
        return found
