"""Placements: what happens to one variable on one mesh axis."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from jax.sharding import PartitionSpec

from braidax.errors import ArgumentError


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


@dataclass(frozen=True)
class Rows:
    """The rows of a table are split over the axis; those that a step touches are exchanged, and their gradients.

    The table is stored as `[ceil(V / N), N, D]`, so that row `id` is on device `id mod N`.

    **Arguments:** `aggregate`: with "inner", rows of a table over several axes are aggregated along the last of them
    before they cross the others: inside a host before they leave it; "auto": where the others join processes and the
    last does not. It may be said on any axis of the table.
    """

    aggregate: Literal["auto", "inner", "none"] = "auto"

    def __post_init__(self) -> None:
        if self.aggregate not in ("auto", "inner", "none"):
            raise ArgumentError(f'aggregate={self.aggregate!r}: expected "auto", "inner" or "none"')

    def split(self, spec: PartitionSpec, axis: str) -> PartitionSpec:
        """Returns the layout of the stored table, split on its dim 1 over this axis, too."""
        over = spec[1] if len(spec) > 1 else None
        axes = () if over is None else (over,) if isinstance(over, str) else tuple(over)
        return PartitionSpec(None, (*axes, axis))

    def __str__(self) -> str:
        """`rows`, and what is special about them."""
        return "rows, aggregated" if self.aggregate == "inner" else "rows"


PLACEMENTS: Mapping[str, type[Replicated] | type[Rows]] = {"Replicated": Replicated, "Rows": Rows}
