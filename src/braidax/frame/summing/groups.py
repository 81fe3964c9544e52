"""Groups of rows with the same key, of one table or of two that are joined by it, and what their values add up to.

The rows of a join are not made: that many of one side meet that many of the other (Moerkotte and Neumann, "Accelerating
Queries with Group-By and Join by Groupjoin", PVLDB 2011).
"""

from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from braidax.bindings import import_binding

MAX_ROWS = 1 << 28
"""Of a table, which the binding has numbers for."""
SUM, LEAST, MOST = "Sum", "Min", "Max"
_INTEGERS = {SUM: ("i", 0), LEAST: ("<", np.iinfo(np.int64).max), MOST: (">", np.iinfo(np.int64).min)}
_FLOATS = {SUM: ("f", 0.0)}


class Groups(NamedTuple):
    """Groups of the rows of one or two tables.

    **Fields:** `keys`: `[groups]` int64. `is_ascending`: whether they ascend. `of`: of each table the group of each
    row, `[rows]` uint32; of those without one the number of groups. `counts`: of each table, how many rows each group
    has, `[groups]` int64.
    """

    keys: NDArray[np.int64]
    is_ascending: bool
    of: tuple[NDArray[np.uint32], ...]
    counts: tuple[NDArray[np.int64], ...]

    @property
    def sizes(self) -> NDArray[np.int64]:
        """How many rows each group has, of the join if there are two tables: `[groups]`."""
        return np.prod(np.stack(self.counts), axis=0)

    def combined(self, what: str, values: NDArray[Any], table: int) -> NDArray[Any]:
        """Returns what the values of each group give, in all rows of the join if there are two tables.

        Sums of integers wrap, as those of Polars do.

        **Arguments:** `what`: `"Sum"`; of integers also `"Min"`, `"Max"`. `values`: `[rows]` of a table, int64 or
        float64. `table`: which one.

        **Returns:** `[groups]` of the same dtype.
        """
        word, first = (_FLOATS if values.dtype.kind == "f" else _INTEGERS)[what]
        out = np.full(len(self.keys) + 1, first, values.dtype)
        _needed().combine(word, values, self.of[table], out)
        found = out[:-1]
        return found * self.counts[1 - table] if what == SUM and len(self.counts) == 2 else found


def groups_of(keys: Sequence[NDArray[np.int64]]) -> Groups:
    """Returns the groups of rows with the same key; with two tables those that both have rows of.

    **Arguments:** `keys`: `[rows]` of each of one or two tables, of `MAX_ROWS` at most.
    """
    of = tuple(np.empty(len(one), np.uint32) for one in keys)
    out = [np.empty(min(map(len, keys)), np.int64) for _ in range(len(keys) + 1)]
    if len(keys) == 1:
        num, is_ascending = _needed().grouped(keys[0], of[0], *out)
        return Groups(out[0][:num], bool(is_ascending), of, (out[1][:num],))
    own = int(len(keys[1]) < len(keys[0]))  # the smaller one, that fewer slots are made for
    num, is_ascending = _needed().joined(keys[own], keys[1 - own], of[own], of[1 - own], *out)
    counts = [one[:num] for one in out[1:]]
    return Groups(out[0][:num], bool(is_ascending), of, (counts[own], counts[1 - own]))


def _needed() -> ModuleType:
    found = compiled()
    assert found is not None
    return found


@cache
def compiled() -> ModuleType | None:
    """Returns what is compiled, or None where it is not: Polars then does the same in more time."""
    return import_binding("braidax.frame.summing.groups_binding")
