"""How one variable lies on a mesh: which mesh axes split which of its dims, and in which form it is stored."""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from braidax.errors import ArgumentError


@dataclass(frozen=True)
class Axis:
    """A mesh axis: its `name`, and how many devices lie along it."""

    name: str
    size: int


@dataclass(frozen=True)
class InPieces:
    """A variable that is in pieces where the loss uses it, each of them split.

    **Fields:** `dim`, and the `sizes` of the pieces along it. `axis`: that splits each piece along it. `stored`: the
    dim that the axis splits in the stored form; None where it is whole there.
    """

    dim: int
    sizes: tuple[int, ...]
    axis: Axis
    stored: int | None


Fed = Literal["no", "of devices", "of servers"]


class RingAxis(NamedTuple):
    """How parts go around. **Fields:** along which `axis`; `in_place`: each is handed on when it has been used."""

    axis: str
    in_place: bool = False


@dataclass(frozen=True)
class Layout:
    """Where the parts of a variable are. Placements on one axis after another refine it.

    A dim that its devices do not divide is padded with zeros in the stored form. By rows, dim 0 is stored as two dims,
    `[ceil(V / N), N]`, of which the second is split: row `id` is on device `id mod N`; that form is made by the feed.

    **Fields:** `shape`: as the loss has it. `dim_axes`: for each dim the axes that split it, the outermost first.
    `fed`: whether the loss gets rows of it: of devices, among which dim 0 is split by rows, or of servers, which have
    it in place of devices. `gathered`: the axes along which the loss gathers it where it uses it; `keeps`: what was
    gathered stays for the backward pass. `ring`: how its parts go around.
    `by_sequence`: the axes along which activations between blocks are split by sequence. `pieces`: in which it is used.
    """

    shape: tuple[int, ...]
    dim_axes: tuple[tuple[Axis, ...], ...]
    fed: Fed = "no"
    gathered: frozenset[str] = frozenset()
    keeps: bool = False
    ring: RingAxis | None = None
    by_sequence: frozenset[str] = frozenset()
    pieces: InPieces | None = None

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> "Layout":
        """Returns the layout in which every device has all of a variable."""
        return cls(tuple(shape), ((),) * len(shape))

    def split(
        self, dim: int, axis: Axis, *, how: Literal["evenly", "by rows", "gathered", "rotated"] = "evenly"
    ) -> "Layout":
        """Returns this layout, split on one more axis. **Raises:** `ArgumentError` where that cannot be."""
        by_rows = how == "by rows"
        if not 0 <= dim < len(self.shape):
            raise ArgumentError(
                f"dim={dim} of a variable of shape {list(self.shape)}, expected 0 <= dim < {len(self.shape)}"
            )
        if dim == 0 and self.dim_axes[dim] and self.by_rows != by_rows:
            taken = ", ".join(axis.name for axis in self.dim_axes[dim])
            raise ArgumentError(
                f"dim={dim} would be split by rows on one of the axes {taken} and {axis.name}, and not on the other"
            )
        if self.pieces is not None and (self.pieces.dim == dim or by_rows):
            raise ArgumentError(f"dim={dim} is split in pieces on the axis {self.pieces.axis.name}")
        if self.fed == "of servers":
            raise ArgumentError(
                f"dim={dim} would be split along {axis.name}, and servers have the variable: expected it replicated"
            )
        if how == "rotated" and (self.rotated is not None or self.by_rows or self.is_split):
            raise ArgumentError(
                f"dim={dim} would go around along {axis.name}, and the variable is by rows, split, or goes around "
                f"along another axis: give it Gathered(dim) on one of them"
            )
        dims = list(self.dim_axes)
        inner = [*dims[dim]] if how == "rotated" else []
        inner += [other for other in dims[dim] if other.name in self.moving] if how == "evenly" else []
        inner += [other for other in dims[dim] if self.pieces is not None and other == self.pieces.axis]
        outer = [other for other in dims[dim] if other not in inner]
        dims[dim] = (*outer, axis, *inner)  # what is gathered lies within what is not, what is exchanged in both
        gathered = self.gathered | {axis.name} if how == "gathered" else self.gathered
        fed = "of devices" if by_rows else self.fed
        made = replace(self, dim_axes=tuple(dims), fed=fed, gathered=gathered)
        made = replace(made, ring=RingAxis(axis.name)) if how == "rotated" else made
        if made.by_rows and any(made.padding[1:]):
            odd = next(dim for dim, more in enumerate(made.padding) if dim and more)
            raise ArgumentError(
                f"dim={odd} of a variable by rows, of shape {list(self.shape)}, would be divided among "
                f"{made.num_parts(odd)} devices, and a row is not padded: expected a dim that they divide, or the "
                f"variable whole along the axes {', '.join(made.axes_of(odd))}"
            )
        return made

    def split_in_pieces(
        self, dim: int, sizes: tuple[int, ...], axis: Axis, *, how: Literal["evenly", "rotated"] = "evenly"
    ) -> "Layout":
        """Returns this layout, with one more axis that splits each of the pieces of a dim where they are used.

        It is stored split along another dim that the axis divides, whole where there is none, and exchanged.

        **Raises:** `ArgumentError` where that cannot be.
        """
        taken = how == "rotated" and (self.rotated is not None or self.is_split)
        if taken or self.pieces is not None or self.by_rows or not 0 <= dim < len(self.shape) or self.dim_axes[dim]:
            raise ArgumentError(f"dim={dim} of {list(self.shape)} would be split in pieces, and is split otherwise")
        if sum(sizes) != self.shape[dim] or any(size % axis.size for size in sizes):
            raise ArgumentError(
                f"pieces={list(sizes)} of a dim of {self.shape[dim]}: expected sizes that {axis.size} divides, and "
                f"that are {self.shape[dim]} together"
            )
        dims = list(self.dim_axes)
        others = [at for at, size in enumerate(self.shape) if at != dim and not size % (self.num_parts(at) * axis.size)]
        stored = min(others, key=self.num_parts) if others else None
        if stored is not None:
            dims[stored] = (*dims[stored], axis)
        ring = RingAxis(axis.name) if how == "rotated" else self.ring
        return replace(self, dim_axes=tuple(dims), ring=ring, pieces=InPieces(dim, sizes, axis, stored))

    def used(self) -> "tuple[Layout, ...]":
        """Returns the layouts of the pieces in which a variable is used: of itself where it is in none."""
        if self.pieces is None:
            return (self,)
        at, axis = self.pieces.dim, self.pieces.axis
        dims = [tuple(other for other in axes if other != axis) for axes in self.dim_axes]
        dims[at] = (axis,)
        shapes = [(*self.shape[:at], size, *self.shape[at + 1 :]) for size in self.pieces.sizes]
        return tuple(replace(self, shape=shape, dim_axes=tuple(dims), pieces=None) for shape in shapes)

    def num_parts(self, dim: int) -> int:
        """Returns among how many devices a dim is divided."""
        return math.prod(axis.size for axis in self.dim_axes[dim])

    def axes_of(self, dim: int) -> tuple[str, ...]:
        """Returns the names of the axes that split a dim."""
        return tuple(axis.name for axis in self.dim_axes[dim])

    @property
    def axes(self) -> frozenset[str]:
        """The names of all axes that split a dim."""
        return frozenset(axis.name for axes in self.dim_axes for axis in axes)

    @property
    def rotated(self) -> str | None:
        """The name of the axis along which parts go around."""
        return None if self.ring is None else self.ring.axis

    @property
    def moving(self) -> frozenset[str]:
        """The names of the axes along which parts are brought to where the loss uses them."""
        return self.gathered if self.rotated is None else self.gathered | {self.rotated}

    @property
    def rotated_dim(self) -> int | None:
        """The dim whose parts go around."""
        return next((dim for dim in range(len(self.shape)) if self.rotated in self.axes_of(dim)), None)

    def kept_axes(self, dim: int) -> tuple[str, ...]:
        """Returns the names of the axes that split a dim also where the loss uses it."""
        return tuple(name for name in self.axes_of(dim) if name not in self.moving)

    @property
    def is_split(self) -> bool:
        """Whether a dim is split also where the loss uses it, and not by rows."""
        return self.pieces is not None or any(self.kept_axes(dim) for dim in range(self.by_rows, len(self.shape)))

    @property
    def by_rows(self) -> bool:
        """Whether dim 0 is split by rows."""
        return self.fed == "of devices"

    @property
    def is_fed(self) -> bool:
        """Whether the loss gets rows of it, whoever has these."""
        return self.fed != "no"

    @property
    def spec(self) -> PartitionSpec:
        """Of the stored form."""
        dims = [self.axes_of(dim) or None for dim in range(len(self.shape))]
        if self.by_rows:
            dims.insert(0, None)
        while dims and dims[-1] is None:
            dims.pop()
        return PartitionSpec(*(axes[0] if axes and len(axes) == 1 and not self.by_rows else axes for axes in dims))

    def sharding(self, mesh: Mesh) -> NamedSharding:
        """Of the stored form on a mesh."""
        return NamedSharding(mesh, self.spec)

    @property
    def padding(self) -> tuple[int, ...]:
        """How much each dim is longer in the stored form."""
        return tuple(-size % self.num_parts(dim) for dim, size in enumerate(self.shape))

    def store(self, array: Any) -> Any:
        """Returns a variable that is not by rows in its stored form."""
        return jnp.pad(array, [(0, more) for more in self.padding]) if any(self.padding) else array

    def load(self, stored: Any) -> Any:
        """Undoes `store`."""
        return stored[tuple(slice(size) for size in self.shape)] if any(self.padding) else stored
