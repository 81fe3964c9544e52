"""Columns of single numbers in mapped Arrow batches, gathered as items of one array."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from braidax.data.formats.tables.direct import Direct, DirectLeaf
from braidax.data.source import Indices, gather
from braidax.data.storage.mapped import Mapped, Memory, Places

_PLACES = 1 << 15  # of items that are found by one call of NumPy: they fit into a core's cache


class Items:
    """Some leaves of mapped files that are single numbers without nulls, each aligned to its size.

    **Arguments:** `memory`: holds the files. `leaves`: which. `bases`: of each leaf int64 `[batches]`, the items that
    the first records are.
    """

    def __init__(self, memory: Mapped, leaves: Sequence[DirectLeaf], bases: Sequence[Places]) -> None:
        self._memory = memory
        self._leaves = [direct.leaf for direct in leaves]
        self._bases = np.stack(bases)

    def read(self, batches: Indices, rows: Indices, out: Any) -> None:
        """Copies records into place. **Arguments:** as `DirectLeaf.read`, `out` as `Source.read`.

        **Raises:** `RecordError` for a number that does not fit in its leaf, of whichever record; `FormatError` for a
        file that changed.
        """
        memory, where, each = self._memory, self._memory.names[0], max(1, _PLACES // max(1, len(rows)))

        def places() -> Iterator[tuple[Places, np.int64]]:
            for leaf, base in zip(self._leaves, self._bases, strict=True):
                yield (base[batches] + rows) * leaf.stored.itemsize, np.int64(leaf.stored.itemsize)

        with memory.reading_found(len(rows) * len(self._leaves), places):
            for start in range(0, len(self._leaves), each):
                items = self._bases[start : start + each].take(batches, axis=1)
                items += rows
                for leaf, wanted in zip(self._leaves[start : start + each], items, strict=True):
                    gather(memory.items(leaf.stored), wanted, out[leaf.name], where=where, leaf=leaf.name)


def as_items(memory: Memory, leaves: Sequence[Direct]) -> tuple[Items | None, list[Direct]]:
    """Returns the leaves that can be gathered as items, if any, and the others."""
    rest: list[Direct] = list(leaves)
    if not isinstance(memory, Mapped):
        return None, rest
    found = [(direct, direct.items()) for direct in leaves if isinstance(direct, DirectLeaf)]
    single = [(direct, base) for direct, base in found if base is not None]
    if not single:
        return None, rest
    names = {direct.leaf.name for direct, _ in single}
    items = Items(memory, [direct for direct, _ in single], [base for _, base in single])
    return items, [direct for direct in rest if direct.leaf.name not in names]
