"""Weights that are stored whole and used in pieces: how they come from one form into the other.

What holds queries, keys and values side by side lies as the loss has it, split along another dim. Each device needs
its part of each piece: one exchange before all uses brings it there, and one brings the gradient back.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from braidax.parallel.plan.layout import InPieces, Layout
from braidax.program import Cut, Program, automatic, in_pieces, trace

from .split import island


def opened(program: Program, layouts: Sequence[Layout]) -> tuple[Program, list[Layout]]:
    """Returns a program that takes in pieces what layouts say so of, and how its leaves then lie.

    **Arguments:** `layouts`: of each leaf of its first argument.
    """
    pieces = {leaf: one.pieces for leaf, one in enumerate(layouts) if one.pieces is not None}
    cuts = {leaf: Cut(one.dim, one.sizes) for leaf, one in pieces.items()}
    return in_pieces(program, cuts) if cuts else program, [used for one in layouts for used in one.used()]


def closed(program: Program, opened: Program, layouts: Sequence[Layout], mesh: Mesh) -> Program:
    """Undoes `opened`, of what a program has become by passes.

    **Arguments:** `program`: as it was before; `opened`: what takes pieces. `layouts`: as leaves are stored.
    """
    if all(layout.pieces is None for layout in layouts):
        return opened

    def run(params: Any, *others: Any) -> Any:
        leaves, structure = jax.tree.flatten(params)
        pairs = zip(leaves, layouts, strict=True)
        taken = [leaf if one.pieces is None else _exchanged(leaf, one, one.pieces) for leaf, one in pairs]
        return opened(structure.unflatten(taken), *others)

    return trace(run, *program.in_specs, mesh=automatic(mesh))


def _exchanged(value: Any, layout: Layout, pieces: InPieces) -> tuple[jax.Array, ...]:
    specs, dim, size = tuple(used.spec for used in layout.used()), pieces.dim, pieces.axis.size
    stored = pieces.stored
    if stored is None or any(layout.padding):
        value = jax.lax.with_sharding_constraint(value, layout.spec)
        pairs = zip(jax.lax.split(value, pieces.sizes, dim), specs, strict=True)
        return tuple(jax.lax.with_sharding_constraint(part, spec) for part, spec in pairs)

    def local(value: Any) -> tuple[jax.Array, ...]:
        parts = jax.lax.split(value, pieces.sizes, dim)
        apart = [part.reshape(*part.shape[:dim], size, -1, *part.shape[dim + 1 :]) for part in parts]
        sent, to = jax.lax.concatenate(apart, dim + 1), stored + (stored > dim)
        got = jax.lax.all_to_all(sent, pieces.axis.name, split_axis=dim, concat_axis=to, tiled=True)
        return tuple(jax.lax.split(got.squeeze(dim), [one // size for one in pieces.sizes], dim))

    return island(local, layout.spec, specs)(value)
