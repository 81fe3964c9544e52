"""Chunks that fit into memory: each is decoded once, to where its rows lie in arrays of all samples.

A shuffled window has samples of nearly as many chunks as it has samples. From one array they are gathered by one call,
whatever chunks they come from.
"""

import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from braidax.data.formats.arrays.chunked import ChunkedTable
from braidax.data.formats.tables.block_cache import WAIT_SECONDS
from braidax.data.formats.tables.blocks import BlockSource
from braidax.data.leaves import Integers
from braidax.data.source import Indices, check_indices, gather
from braidax.errors import RecordError, WaitTimeout

_ABSENT, _COMING, _THERE = 0, 1, 2
_AT_ONCE = 8  # blocks that a thread takes upon itself, so that threads which want the same ones share the work


def chunks_source(table: ChunkedTable, *, cache_bytes: int, facts: Mapping[str, str]) -> BlockSource:
    """Returns a source of chunks: one that keeps all of them where they fit and their samples are of one size.

    **Arguments:** as of `BlockSource`. **Raises:** as `BlockSource`.
    """
    fits = sum(block.num_bytes for block in table.blocks) <= cache_bytes
    kind = KeptSource if fits and not any(leaf.is_varying for leaf in table.leaves) else BlockSource
    return kind(table, cache_bytes=cache_bytes, what="rows of chunks", facts=facts)


class KeptSource(BlockSource):
    """Samples of chunks that are all kept once they are decoded.

    **Arguments:** `table`: of leaves of one size, all of which fits into the cache. `cache_bytes`, `what`, `facts`: as
    of `BlockSource`.
    """

    def __init__(self, table: ChunkedTable, *, cache_bytes: int, what: str, facts: Mapping[str, str]) -> None:
        super().__init__(table, cache_bytes=cache_bytes, what=what, facts=facts)
        self._kept = _Kept(table)

    def __reduce__(self) -> tuple[Callable[..., BlockSource], tuple[Any, ...]]:
        return _source_again, (self._table, self._cache_bytes, self._facts, self._integers)

    @property
    def is_at_hand(self) -> bool:
        """Whether all chunks are decoded, so that reads are mere copies."""
        return self._kept.is_whole

    def read(self, indices: Indices, out: Any) -> None:
        """Decodes what is not there yet of a window, and gathers it."""
        check_indices(indices, len(self), where=f"{self._table.names[0]} ({len(self._table.names)} file(s))")
        if not self._kept.is_whole:
            self._kept.bring(np.unique(self._block_of(indices)))
        try:
            for leaf in self._leaves:
                array = self._kept.leaves[leaf.name]
                gather(array, indices, out[leaf.name], where=self._table.names[0], leaf=leaf.name)
        except RecordError:
            if len(self._table.names) == 1:
                raise
            super().read(indices, out)  # raises the same, and knows the file and its record


class _Kept:
    """All samples of a table, as far as they are decoded, and which threads decode now."""

    def __init__(self, table: ChunkedTable) -> None:
        self._table = table
        num_samples = sum(block.num_rows for block in table.blocks)
        self.leaves: dict[str, NDArray[Any]] = {
            leaf.name: np.empty((num_samples, *leaf.shape), leaf.stored) for leaf in table.leaves
        }
        self._states = np.zeros(len(table.blocks), np.uint8)
        self._changed = threading.Condition()
        self._num_missing = len(table.blocks)

    @property
    def is_whole(self) -> bool:
        """Whether all blocks are there."""
        return not self._num_missing

    def bring(self, blocks: NDArray[np.int64]) -> None:
        """Waits until blocks are there; those that no other thread decodes are decoded here.

        **Raises:** `FormatError` as `Blocks.decode`; `WaitTimeout` where another thread does not end.
        """
        while True:
            with self._changed:
                left = blocks[self._states[blocks] != _THERE]
                if not left.size:
                    return
                mine = left[self._states[left] == _ABSENT][:_AT_ONCE]
                if not mine.size:
                    if not self._changed.wait(WAIT_SECONDS):
                        raise WaitTimeout(
                            f"block {left[0]} was not decoded by another thread within {WAIT_SECONDS:.0f} s; is the "
                            "disk stuck?"
                        )
                    continue
                self._states[mine] = _COMING
            found = _ABSENT
            try:
                self._table.decode_into(mine.tolist(), self.leaves)
                found = _THERE
            finally:
                with self._changed:
                    self._states[mine] = found
                    self._num_missing -= len(mine) if found == _THERE else 0
                    self._changed.notify_all()


def _source_again(table: ChunkedTable, cache_bytes: int, facts: Mapping[str, str], integers: Integers) -> BlockSource:
    """Makes a source in another process, with memory of its own."""
    found = chunks_source(table, cache_bytes=cache_bytes, facts=facts)
    return found if integers == "loaded" else found.widened()
