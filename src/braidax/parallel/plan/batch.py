"""How a batch is split over a mesh."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from braidax.errors import ArgumentError, SpecError
from braidax.program import named_leaves

from .strategy import Strategy


def batch_axes(mesh: Mesh, strategies: Mapping[str, Strategy]) -> tuple[str, ...]:
    """Returns the mesh axes that the batch is split over, in the order of the mesh."""
    return tuple(name for name in mesh.axis_names if name in strategies and strategies[name].splits_batch)


def along_batch(mesh: Mesh, axes: tuple[str, ...], shape: Sequence[int], dim: int | None) -> NamedSharding:
    """Splits an array along the dim of its samples as the batch is; one that has none, or no even parts, is whole.

    **Arguments:** `axes`: the mesh axes that the batch is split over. `dim`: of the samples, if there is one.
    """
    over = math.prod(mesh.shape[axis] for axis in axes)
    if dim is None or over == 1 or shape[dim] % over:
        return NamedSharding(mesh, PartitionSpec())
    return NamedSharding(mesh, PartitionSpec(*[None] * dim, axes))


def shard_batch(mesh: Mesh, axes: tuple[str, ...], batch: Any, *, microbatches: int = 1) -> Any:
    """Splits dim 0 of every leaf of a batch over mesh axes.

    **Arguments:** `axes`: the mesh axes, perhaps none. `batch`: PyTree of arrays or specs `[batch, …]`.
    `microbatches`: how many equal pieces must be divisible too.

    **Returns:** a PyTree of `NamedSharding` like `batch`. **Raises:** `SpecError` for a leaf that cannot be split.
    """
    leaves = named_leaves(batch, "batch")
    if not leaves:
        raise ArgumentError(f"batch is {batch!r}, expected a PyTree with at least one array [batch, …]")
    divisor = math.prod(mesh.shape[axis] for axis in axes)
    for path, leaf in leaves:
        if not leaf.shape:
            raise SpecError(f"{path} has no dims, expected [batch, …]: repeat it for every sample, or close over it")
        if leaf.shape[0] % divisor or leaf.shape[0] == 0:
            raise SpecError(
                f"{path} has {leaf.shape[0]} samples, which do not divide among the {divisor} devices along the mesh "
                f"axes {axes}: choose a batch size that is a multiple of {divisor}, or let the loader pad the batch"
            )
        if leaf.shape[0] % (divisor * microbatches):
            raise SpecError(
                f"{path} has {leaf.shape[0]} samples, which do not divide into microbatches={microbatches} for each of "
                f"the {divisor} devices along the mesh axes {axes}: choose a batch size that is a multiple of "
                f"{divisor * microbatches}, or other microbatches"
            )
    spec = PartitionSpec(axes) if axes else PartitionSpec()
    return jax.tree.map(lambda _: NamedSharding(mesh, spec), batch)
