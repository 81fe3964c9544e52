"""Strategies: what one mesh axis is for."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from braidax.errors import ArgumentError, SpecError
from braidax.program import named_leaves

from .placements import Placement, Replicated


@runtime_checkable
class Strategy(Protocol):
    """Fills in the placement of every variable on one mesh axis, and says whether the batch is split over it."""

    @property
    def splits_batch(self) -> bool:
        """Whether samples are divided among the devices along the axis."""
        ...

    def place(self, path: str, spec: jax.ShapeDtypeStruct) -> tuple[Placement, str]:
        """Returns the placement of the variable `path` on the axis, and why."""
        ...


@dataclass(frozen=True)
class DataParallel:
    """Divides the samples of a batch among the devices along the axis; every variable is replicated.

    The loss keeps its meaning over the global batch; gradients are all-reduced.
    """

    @property
    def splits_batch(self) -> bool:
        """True."""
        return True

    def place(self, path: str, spec: jax.ShapeDtypeStruct) -> tuple[Placement, str]:
        """Returns `Replicated` for every variable."""
        return Replicated(), "data parallel: gradient all-reduced"


def check_strategies(mesh: Mesh, strategies: Mapping[str, Any]) -> None:
    """Raises when a strategy stands for an axis that the mesh lacks, or is none."""
    for axis, strategy in strategies.items():
        if axis not in mesh.axis_names:
            raise SpecError(
                f"strategies names the mesh axis {axis!r}, and the mesh has {mesh.axis_names}: use one of these, or "
                f"make the mesh with jax.make_mesh(shape, names) so that it has an axis {axis!r}"
            )
        if not isinstance(strategy, Strategy) or isinstance(strategy, type):
            raise ArgumentError(
                f"strategies[{axis!r}] is {strategy!r}, expected a strategy object such as bx.DataParallel()"
            )


def batch_axes(mesh: Mesh, strategies: Mapping[str, Strategy]) -> tuple[str, ...]:
    """Returns the mesh axes that the batch is split over, in the order of the mesh."""
    return tuple(name for name in mesh.axis_names if name in strategies and strategies[name].splits_batch)


def shard_batch(mesh: Mesh, axes: tuple[str, ...], batch: Any, *, microbatches: int = 1) -> Any:
    """Splits dim 0 of every leaf of a batch over mesh axes.

    **Arguments:** `axes`: the mesh axes, perhaps none. `batch`: PyTree of arrays or specs `[batch, …]`.
    `microbatches`: how many equal pieces must be divisible too.

    **Returns:** a PyTree of `NamedSharding` like `batch`. **Raises:** `SpecError` for a leaf that cannot be split.
    """
    leaves = named_leaves(batch, "batch")
    if not leaves:
        raise ArgumentError(f"batch is {batch!r}, expected a PyTree with at least one array [batch, …]")
    divisor = 1
    for axis in axes:
        divisor *= mesh.shape[axis]
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
