"""Placements: what happens to one variable on one mesh axis."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jax.sharding import PartitionSpec


@runtime_checkable
class Placement(Protocol):
    """What happens to one variable on one mesh axis; a frozen dataclass whose fields are JSON values."""

    def split(self, spec: PartitionSpec, axis: str) -> PartitionSpec:
        """Returns `spec`, the layout of the variable on the axes seen so far, with this axis added."""
        ...

    def __str__(self) -> str:
        """How a plan prints it."""
        ...


@dataclass(frozen=True)
class Replicated:
    """Every device along the axis holds the variable whole; its gradient is all-reduced."""

    def split(self, spec: PartitionSpec, axis: str) -> PartitionSpec:
        """Returns `spec`: nothing is split."""
        return spec

    def __str__(self) -> str:
        """`replicated`."""
        return "replicated"


PLACEMENTS: Mapping[str, type[Replicated]] = {"Replicated": Replicated}
