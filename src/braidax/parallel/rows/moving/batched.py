"""Rows of several tables, brought up at once: what missed steps do to them is one computation, compiled once."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .optimizers import RowOptimizer


class LateRows(NamedTuple):
    """Rows of a table that may lag behind. **Fields:** `values`, `rows`, `shared`: as of `RowOptimizer.settle`."""

    values: jax.Array
    rows: Any
    shared: Any


def settled(optimizers: Sequence[RowOptimizer], tables: Sequence[LateRows]) -> list[tuple[jax.Array, Any]]:
    """Brings up rows of several tables, those of optimizers that are `alike` together.

    **Returns:** values and what is kept of rows, of each table.
    """
    groups: dict[Any, list[int]] = {}
    for at, (optimizer, one) in enumerate(zip(optimizers, tables, strict=True)):
        groups.setdefault(at if optimizer.alike is None else (optimizer.alike, _form(one)), []).append(at)
    found: dict[int, tuple[jax.Array, Any]] = {}
    for members in groups.values():
        settle, some = optimizers[members[0]].settle, [tables[at] for at in members]
        sizes = [len(one.values) for one in some]
        if settle is None or not sum(sizes):
            found |= {at: (tables[at].values, tables[at].rows) for at in members}
        else:
            moved = settle(*some[0]) if len(some) == 1 else settle(*_joined(some))
            found |= dict(zip(members, _parted(moved, sizes), strict=True))
    return [found[at] for at in range(len(tables))]


def _form(one: LateRows) -> Any:
    """What must be the same of arrays that are laid one behind the other."""
    leaves, structure = jax.tree.flatten((one.values, one.rows))
    return structure, tuple((leaf.shape[1:], str(leaf.dtype)) for leaf in leaves)


def _joined(tables: Sequence[LateRows]) -> LateRows:
    """Lays rows one behind the other; each has the clock, and what steps made of values, of its own table."""

    def of_rows(*numbers: jax.Array) -> jax.Array:
        pairs = zip(numbers, tables, strict=True)
        return jnp.concatenate([jnp.full(len(one.values), number) for number, one in pairs])

    shared = [one.shared for one in tables]
    clock, grown = jax.tree.map(of_rows, *[(now.clock, now.grown) for now in shared])
    values, rows = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *[(one.values, one.rows) for one in tables])
    return LateRows(values, rows, shared[0]._replace(clock=clock, grown=grown))


def _parted(moved: tuple[jax.Array, Any], sizes: Sequence[int]) -> list[tuple[jax.Array, Any]]:
    """Undoes `_joined`."""
    found, start = list[tuple[jax.Array, Any]](), 0
    for size in sizes:
        found.append(jax.tree.map(lambda leaf, at=start, size=size: leaf[at : at + size], moved))
        start += size
    return found
