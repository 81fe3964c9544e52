"""Which variables a loss uses where their parts can come by."""

from collections.abc import Mapping, Sequence
from typing import Any

from braidax.program import Program, rotatable

from .layout import Axis
from .model import RotatedUses


def rotated_uses(
    program: Program,
    paths: Sequence[str],
    dims: Mapping[str, int],
    axis: Axis,
    divided: Mapping[int, Any],
    num_batch_parts: int,
) -> RotatedUses:
    """Returns how a program uses variables whose parts go around an axis.

    **Arguments:** `program`: its first argument holds the variables at `paths`, in their order. `dims`: by path, which
    dim is in parts. `divided`: as of `find_batch_dims`. `num_batch_parts`: among how many devices samples are divided.
    """
    number = {path: at for at, path in enumerate(paths)}
    by_leaf = {number[path]: dim for path, dim in dims.items()}
    found = rotatable(program, by_leaf, axis.size, divided, num_batch_parts)
    left = {paths[leaf]: why for leaf, why in found.left.items()}
    return RotatedUses(left, {paths[leaf] for leaf in found.rotated})
