"""Which stage keeps which variables: each has one owner, from which other stages that read it have a copy a step."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from braidax.program import Stage

Rows = tuple[int, int]


class Piece(NamedTuple):
    """A leaf of the parameters, by number, or consecutive rows of it."""

    leaf: int
    rows: Rows | None


class Read(NamedTuple):
    """What a stage reads of the piece of an owner: all of it, or rows."""

    owner: int
    piece: Piece
    rows: Rows | None


@dataclass(frozen=True)
class Ownership:
    """Where the variables of a loss in stages lie.

    A leaf whose rows are read by several stages, such as the stacked weights of a loop, is divided among these; one
    that several stages read alike, such as tied weights, is the first one's; one that none reads the first stage's.

    **Fields:** `pieces`: of each stage that it owns. `reads`: of each stage, in the order of the leaves of its program.
    """

    pieces: tuple[tuple[Piece, ...], ...]
    reads: tuple[tuple[Read, ...], ...]

    @classmethod
    def of(cls, stages: Sequence[Stage], specs: Sequence[Any], params: int = 0) -> "Ownership":
        """Finds out. **Arguments:** `specs`: of the leaves of the parameters. `params`: their argument's number."""
        readers: list[list[tuple[int, Rows | None]]] = [[] for _ in specs]
        for at, stage in enumerate(stages):
            for leaf in stage.leaves:
                if leaf.argument == params:
                    readers[leaf.number].append((at, leaf.rows))
        owners = [_owners(found, spec.shape) for found, spec in zip(readers, specs, strict=True)]
        pieces: list[list[Piece]] = [[] for _ in stages]
        for leaf, own in enumerate(owners):
            for stage, rows in own:
                pieces[stage].append(Piece(leaf, rows))
        reads: list[tuple[Read, ...]] = []
        for at, stage in enumerate(stages):
            own = [leaf for leaf in stage.leaves if leaf.argument == params]
            reads.append(tuple(_read(at, leaf.number, leaf.rows, owners[leaf.number]) for leaf in own))
        return cls(tuple(map(tuple, pieces)), tuple(reads))

    def divide(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], ...]:
        """Returns the pieces of each stage. **Arguments:** `leaves`: arrays, of all parameters."""
        return tuple(tuple(_rows_of(leaves[one.leaf], one.rows) for one in own) for own in self.pieces)

    def specs(self, specs: Sequence[Any]) -> tuple[tuple[jax.ShapeDtypeStruct, ...], ...]:
        """Returns those of the pieces of each stage."""
        return tuple(tuple(spec_of_rows(specs[one.leaf], one.rows) for one in own) for own in self.pieces)

    def join(self, pieces: Sequence[Sequence[Any]], count: int) -> list[Any]:
        """Undoes `divide`, for arrays that are in one place. **Arguments:** `count`: of the leaves."""
        found: list[list[tuple[int, Any]]] = [[] for _ in range(count)]
        for own, values in zip(self.pieces, pieces, strict=True):
            for one, value in zip(own, values, strict=True):
                found[one.leaf].append((0 if one.rows is None else one.rows[0], value))
        return [
            parts[0][1] if len(parts) == 1 else jnp.concatenate([value for _, value in sorted(parts, key=_first)])
            for parts in found
        ]


def spec_of_rows(spec: Any, rows: Rows | None) -> jax.ShapeDtypeStruct:
    """Returns the spec of rows of an array."""
    shape = spec.shape if rows is None else (rows[1] - rows[0], *spec.shape[1:])
    return jax.ShapeDtypeStruct(shape, spec.dtype)


def _first(pair: tuple[int, Any]) -> int:
    return pair[0]


def _rows_of(array: Any, rows: Rows | None) -> Any:
    return array if rows is None else array[slice(*rows)]


def _owners(readers: Sequence[tuple[int, Rows | None]], shape: Sequence[int]) -> list[tuple[int, Rows | None]]:
    """Returns which stages own a leaf, with the rows where they are several, in the order of these."""
    by_rows = sorted((rows, stage) for stage, rows in readers if rows is not None)
    apart = all(one[0][1] <= other[0][0] for one, other in pairwise(by_rows))
    if len(by_rows) < 2 or len(by_rows) < len(readers) or not apart:
        return [(min((stage for stage, _ in readers), default=0), None)]
    begins = [0, *(rows[0] for rows, _ in by_rows[1:]), shape[0]]
    return [(stage, ends) for (_, stage), ends in zip(by_rows, pairwise(begins), strict=True)]


def _read(stage: int, leaf: int, rows: Rows | None, owners: Sequence[tuple[int, Rows | None]]) -> Read:
    if len(owners) == 1:
        return Read(owners[0][0], Piece(leaf, None), rows)
    own = next(ends for owner, ends in owners if owner == stage)
    assert own is not None, "several owners have rows each"
    assert rows is not None, "it reads rows"
    inner = rows[0] - own[0], rows[1] - own[0]
    return Read(stage, Piece(leaf, own), None if rows == own else inner)
