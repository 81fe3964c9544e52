"""Which variables a loss uses where their parts can come by."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from braidax.program import Cut, Program, RotatedUnit, aval_of, find_experts, in_pieces, rotatable

from .layout import Axis
from .model import ExpertUses, RingUses, RotatedUses


def rotated_uses(
    program: Program,
    paths: Sequence[str],
    cuts: Mapping[str, Cut],
    axis: Axis,
    divided: Mapping[int, Any],
    num_batch_parts: int,
) -> RotatedUses:
    """Returns how a program uses variables whose parts go around an axis.

    **Arguments:** `program`: its first argument holds the variables at `paths`, in their order. `cuts`: by path, which
    dim is in parts, and the sizes of pieces that are, none where the dim is whole. `divided`: as of `find_batch_dims`.
    `num_batch_parts`: among how many devices samples are divided.
    """
    in_parts = {at: cuts[path] for at, path in enumerate(paths) if path in cuts and cuts[path].sizes}
    owners = [path for at, path in enumerate(paths) for _ in (in_parts[at].sizes if at in in_parts else (0,))]
    by_leaf = {leaf: cuts[path].dim for leaf, path in enumerate(owners) if path in cuts}
    opened = in_pieces(program, in_parts) if in_parts else program
    found = rotatable(opened, by_leaf, axis.size, divided, num_batch_parts)
    left = {owners[leaf]: why for leaf, why in found.left.items()}
    units = [
        RingUses(
            frozenset(owners[weight.leaf] for weight in unit.weights.values()),
            any(result.stacked is not None for result in unit.results),
        )
        for unit in found.units.values()
    ]
    used = dict[str, int]()
    for unit in found.units.values():
        part_bytes = sum(_part_bytes(unit, at, axis) for at in unit.weights)
        for weight in unit.weights.values():
            used[owners[weight.leaf]] = max(used.get(owners[weight.leaf], 0), part_bytes)
    return RotatedUses(left, used, units)


def expert_uses(
    program: Program, paths: Sequence[str], divided: Mapping[int, Any], num_batch_parts: int
) -> list[ExpertUses]:
    """Returns what experts do in a program, each for itself. **Arguments:** as of `rotated_uses`."""
    _, found = find_experts(program, divided, num_batch_parts)
    return [
        ExpertUses({paths[leaf]: dim for leaf, dim in one.dims.items()}, (2 + one.remat) * one.num_bytes, one.count)
        for one in found
    ]


def _part_bytes(unit: RotatedUnit, at: int, axis: Axis) -> int:
    """Of what goes around at once of a weight: a part, or a slice of one."""
    aval, dim = aval_of(unit.jaxpr.invars[at]), unit.weights[at].divided
    part = -(-aval.shape[dim] // axis.size)
    others = math.prod(size for one, size in enumerate(aval.shape) if one != dim)
    return others * -(-part // unit.num_slices) * np.dtype(aval.dtype).itemsize
