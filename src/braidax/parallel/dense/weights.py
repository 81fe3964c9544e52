"""A weight where it enters a part of a program: how it is gathered, and how the parts of its gradient come together."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.sharding import AbstractMesh, PartitionSpec

from braidax.parallel.plan.costs.forms import column_dim
from braidax.parallel.plan.layout import Layout
from braidax.program import (
    Entry,
    Equation,
    Site,
    aval_of,
    batch_dim_of_result,
    bind,
    operand_gradient,
    psum,
    psum_scatter,
    read_part,
    row_reader,
    viewed,
)

Key = tuple[Entry, tuple[str, ...]]
"""What tells a weight: by which value it enters, and the types that this is brought to."""


class Entered(NamedTuple):
    """A weight as it entered: `shard`, cast; `full`, gathered; `parts`, nothing, whose gradient is that of `full`."""

    shard: jax.Array
    full: jax.Array
    parts: jax.Array


def key_of(site: Site) -> Key:
    """Returns what tells the weight that a site uses."""
    return site.value.entry, tuple(f"{cast.primitive.name} {sorted(cast.params.items())}" for cast in site.value.casts)


def weight_of(site: Site, layout: Layout, mesh: AbstractMesh, batch_axes: tuple[str, ...]) -> "Weight":
    """Returns the weight that a site uses. **Arguments:** `layout`: of its leaf."""
    dims = [layout.axes_of(dim) for dim in site.value.entry.dims]
    gathers = tuple((at, axis) for at, axes in enumerate(dims) for axis in axes if axis in layout.gathered)
    sizes = tuple(layout.shape[dim] for dim in site.value.entry.dims)
    padding = tuple(layout.padding[dim] for dim in site.value.entry.dims)
    return Weight(site.value.casts, tuple(dims), gathers, sizes, padding, mesh, batch_axes)


@dataclass(frozen=True)
class Weight:
    """How a value is cast and gathered, and how the parts of its gradient are brought together.

    **Fields:** `dims`: the axes that split each dim. `gathers`: pairs of a dim and an axis that splits it, outermost
    first. `sizes`: of the dims, and their `padding` where they are split. `is_turned`: whether shards are gathered one
    behind the other; products turn for nothing what is gathered so.
    """

    casts: tuple[Equation, ...]
    dims: tuple[tuple[str, ...], ...]
    gathers: tuple[tuple[int, str], ...]
    sizes: tuple[int, ...]
    padding: tuple[int, ...]
    mesh: AbstractMesh
    batch_axes: tuple[str, ...]
    is_turned: bool = True

    def enter(self, value: Any, parts: Any = None) -> Entered:
        """Casts what enters, splits and gathers it.

        **Arguments:** `parts`: zeros of somebody's own, `[N, ...]`, who sums their gradient; the value's own then has
        nothing of the uses that are covered.
        """
        if parts is not None:
            value = self._cast(value)
            return Entered(value, value, parts)
        value = self.shard(value)
        full, parts = self._entered(value)
        return Entered(value, full, parts)

    def shard(self, value: Any) -> Any:
        """Casts what enters, and splits it."""
        return self._split(self._padded(self._cast(value)))

    def gather(self, value: Any) -> Any:
        """Brings a shard's value onto every device along the axes."""

        def local(value: Any) -> Any:
            for dim, axis in reversed(self.gathers):
                at = 0 if self.is_turned else dim
                value = jax.lax.all_gather(jnp.moveaxis(value, dim, at), axis, axis=at, tiled=True)
                value = jnp.moveaxis(value, at, dim)
            return value

        full = self._island(local, self._axes(), _spec(self.dims), _spec(self.kept))(value)
        return full[tuple(slice(size) for size in self.sizes)] if any(self.padding) else full

    def scatter(self, parts: Any) -> Any:
        """Sums `[N, ...]`, one part a device, and leaves each device its shard of the sum."""

        def local(parts: Any) -> Any:
            total = parts[0]
            for dim, axis in self.gathers:
                total = psum_scatter(jnp.moveaxis(total, dim, 0), axis, dim=0)
                total = jnp.moveaxis(total, 0, dim)
            others = tuple(name for name in self.batch_axes if name not in self._gathered_axes)
            return psum(total, others) if others else total

        spec = _spec(self.kept, self.batch_axes)
        return self._island(local, self._axes(*self.batch_axes), spec, _spec(self.dims))(self._padded(parts))

    def total(self, parts: Any, *, at: int) -> Any:
        """Sums parts over devices. **Arguments:** `at`: which dim is that of the devices."""
        axes, loops = self.batch_axes, (None,) * at
        kept = _spec(self.kept, *loops), _spec(self.kept, *loops, axes)
        manual = self._axes(*axes)
        if any(size % self._num_parts(names) for size, names in zip(self.sizes, self.kept, strict=True)):
            kept, manual = (PartitionSpec(), PartitionSpec(*loops, axes)), {*axes}  # XLA divides it unevenly
        return self._island(lambda x: psum(x.squeeze(at), axes), manual, kept[1], kept[0])(parts)

    def no_parts(self, dtype: Any) -> Any:
        """Returns parts that are nothing."""
        zeros = jnp.zeros((self.num_parts, *self.sizes), dtype)
        if not self.leaves_parts:  # nobody uses them
            return zeros
        return jax.lax.with_sharding_constraint(zeros, _spec(self.kept, self.batch_axes))

    def part(self, local: Callable[..., Any], dim: int, back_dim: int) -> Callable[..., Any]:
        """Makes of `local(operand, back, full)`, which gives a gradient, the function that gives all parts of it."""
        axes = self.batch_axes
        specs = (PartitionSpec(*[None] * dim, axes), PartitionSpec(*[None] * back_dim, axes), PartitionSpec())
        return self._island(lambda *args: local(*args)[None], {*axes}, specs, PartitionSpec(axes))

    def rows(self, read: Callable[..., Any], dim: int, back_dim: int, row_dim: int) -> Callable[..., Any]:
        """Makes of `read(shard, ids)` the function of both that gives whole rows, each to the device that has its id.

        **Arguments:** `dim`, `back_dim`: along which dims ids and rows are divided. `row_dim`: that of rows that is
        split as the shard is.
        """
        ((_, axis),), axes = self.gathers, self.batch_axes

        def local(shard: Any, ids: Any) -> Any:
            parts = read(shard, jax.lax.all_gather(ids, axis, axis=dim, tiled=True))
            return jax.lax.all_to_all(parts, axis, split_axis=back_dim, concat_axis=row_dim, tiled=True)

        specs = (_spec(self.dims), PartitionSpec(*[None] * dim, axes))
        return self._island(local, self._axes(*axes), specs, PartitionSpec(*[None] * back_dim, axes))

    def owned_rows(self, equation: Equation, dim: int, back_dim: int) -> Callable[..., Any]:
        """Makes the function of a shard of consecutive rows, and of ids, that gives each device the rows of its ids.

        Every device says what it has of the rows of all ids, and these are summed; where that sends more, the table is
        exchanged for its columns before, and these are brought together.

        **Arguments:** as of `rows`.
        """
        ((_, axis),), axes = self.gathers, self.batch_axes
        num_ids = math.prod(aval_of(equation.invars[1]).shape[:-1]) // self.num_parts
        dim_to = column_dim(self.sizes, self.mesh.shape[axis], num_ids)

        def local(shard: Any, ids: Any) -> Any:
            ids = jax.lax.all_gather(ids, axis, axis=dim, tiled=True)
            if dim_to is not None:
                read, row_dim = row_reader(equation, dim_to)
                columns = jax.lax.all_to_all(shard, axis, split_axis=dim_to, concat_axis=0, tiled=True)
                parts = read(columns[: self.sizes[0]], ids)
                return jax.lax.all_to_all(parts, axis, split_axis=back_dim, concat_axis=row_dim, tiled=True)
            first = jax.lax.axis_index(axis) * shard.shape[0]
            found = read_part(equation, shard, ids, (first, first, first + shard.shape[0]), self.sizes[0])
            return psum_scatter(found, axis, dim=back_dim)

        specs = (_spec(self.dims), PartitionSpec(*[None] * dim, axes))
        return self._island(local, self._axes(*axes), specs, PartitionSpec(*[None] * back_dim, axes))

    @property
    def kept(self) -> tuple[tuple[str, ...], ...]:
        """The axes that split each dim when it is gathered."""
        gone = self._gathered_axes
        return tuple(tuple(axis for axis in axes if axis not in gone) for axes in self.dims)

    @property
    def leaves_parts(self) -> bool:
        """Whether the gradient can be left in parts: all devices that share the weight have samples of their own."""
        kept = {axis for axes in self.kept for axis in axes}
        return self._gathered_axes <= {*self.batch_axes} and not kept & {*self.batch_axes}

    @property
    def num_parts(self) -> int:
        """Among how many devices samples are divided."""
        return self._num_parts(self.batch_axes)

    def _entered(self, value: Any) -> Any:
        @jax.custom_vjp
        def entered(value: Any) -> Any:
            return self.gather(value), self.no_parts(value.dtype)

        def forward(value: Any) -> Any:
            return entered(value.value), None

        def backward(_: Any, back: Any) -> Any:
            of_full, of_parts = back
            total = None if isinstance(of_parts, SymbolicZero) else self.scatter(of_parts)
            if not isinstance(of_full, SymbolicZero):
                of_shard = self._split(self._padded(of_full))
                total = of_shard if total is None else total + of_shard
            return (total,)

        entered.defvjp(forward, backward, symbolic_zeros=True)
        return entered(value)

    def _cast(self, value: Any) -> Any:
        for cast in self.casts:
            (value,) = bind(cast, [value])
        return value

    def _padded(self, value: Any) -> Any:
        before = [(0, 0)] * (value.ndim - len(self.padding))
        return jnp.pad(value, [*before, *((0, more) for more in self.padding)]) if any(self.padding) else value

    def _split(self, value: Any) -> Any:
        return jax.lax.with_sharding_constraint(value, _spec(self.dims))

    @property
    def _gathered_axes(self) -> set[str]:
        return {axis for _, axis in self.gathers}

    def _axes(self, *others: str) -> set[str]:
        """All axes that split a shard: XLA would bring parts together along one that an island leaves to it."""
        return {*others, *(axis for axes in self.dims for axis in axes)}

    def _num_parts(self, axes: Sequence[str]) -> int:
        return math.prod(self.mesh.shape[axis] for axis in axes)

    def _island(self, local: Any, axes: set[str], in_specs: Any, out_specs: Any) -> Any:
        mapped: Any = jax.shard_map(local, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=False)
        return mapped


def _spec(dims: Sequence[tuple[str, ...]], *before: Any) -> PartitionSpec:
    return PartitionSpec(*before, *(axes or None for axes in dims))


def looked_up(site: Site, weight: Weight, equation: Equation, dims: Sequence[int | None]) -> Any:
    """Returns the function that stands in place of a lookup of rows that are split, whose gradient is one of rows too.

    A device looks up its part of the rows of all ids, and parts are exchanged, so that no lookup waits until the table
    is gathered. None where that cannot be, or where it moves more than the table has.
    """
    split_otherwise = any(weight.padding[1:]) or any(weight.kept) or len(weight.gathers) != 1
    if site.role != "rows" or site.value.view or split_otherwise:
        return None
    ids, dim, back_dim = aval_of(equation.invars[1]), dims[1], batch_dim_of_result(equation, 1, dims[1])
    if dim is None or back_dim is None or not weight.leaves_parts or ids.shape[dim] % weight.num_parts:
        return None
    ((split, _),) = weight.gathers
    num_ids = math.prod(ids.shape[:-1])
    if split == 0:
        if num_ids > weight.sizes[0] * weight.num_parts or not jnp.issubdtype(
            aval_of(equation.outvars[0]).dtype, jnp.inexact
        ):
            return None
        owned = weight.owned_rows(equation, dim, back_dim)
        return lambda inputs, held: owned(held.shard, inputs[1])
    if any(weight.padding) or num_ids > weight.sizes[0] * weight.num_parts:
        return None
    read, row_dim = row_reader(equation, split)
    rows = weight.rows(read, dim, back_dim, row_dim)
    return lambda inputs, held: rows(held.shard, inputs[1])


def covered(
    site: Site, weight: Weight, equation: Equation, dims: Sequence[int | None], *, stays: bool = False
) -> "Covered | None":
    """Returns what stands in place of an equation whose weight's gradient can be left in parts; None where it cannot.

    **Arguments:** `stays`: whether what is gathered is there until the backward pass needs it.
    """
    if site.role == "other" or not weight.leaves_parts:
        return None
    other = 1 - site.operand
    dim, back_dim = dims[other], batch_dim_of_result(equation, other, dims[other])
    if dim is None or back_dim is None or aval_of(equation.invars[other]).shape[dim] % weight.num_parts:
        return None
    stays = stays or site.value.in_loop or site.value.remat
    return Covered(site, weight, equation, dim, back_dim, bool(weight.gathers) and not stays)


@dataclass(frozen=True)
class Covered:
    """A product or convolution that leaves the gradient of its weight in parts.

    **Fields:** `dim`, `back_dim`: along which dims the operand and what comes back are divided. `again`: whether the
    weight is gathered again in the backward pass.
    """

    site: Site
    weight: Weight
    equation: Equation
    dim: int
    back_dim: int
    again: bool

    def __call__(self, operand: Any, held: Entered, *, is_put_off: bool = False) -> Any:
        """Returns the result. **Arguments:** `is_put_off`: `held.parts` takes what `parts` needs, not these."""

        @jax.custom_vjp
        def used(operand: Any, shard: Any, full: Any, parts: Any) -> Any:
            return self._apply(operand, full)

        def forward(operand: Any, shard: Any, full: Any, parts: Any) -> Any:
            return self._apply(operand, full), (operand, shard if self.again else full)

        def backward(kept: Any, back: Any) -> Any:
            operand, full = kept
            if self.again:
                full, back = jax.lax.optimization_barrier((full, back))
                full = self.weight.gather(full)
            (of_operand,) = jax.vjp(lambda operand: self._apply(operand, full), operand)[1](back)
            return of_operand, None, None, (operand, back) if is_put_off else self.parts(operand, back, full)

        used.defvjp(forward, backward)
        return used(operand, *held)

    def parts(self, operand: Any, back: Any, full: Any) -> Any:
        """Returns the gradient of the weight, one part a device."""

        def local(operand: Any, back: Any, full: Any) -> Any:
            if self.site.role != "product":
                return jax.vjp(lambda full: self._apply(operand, full), full)[1](back)[0]
            of_view = operand_gradient(self.equation, self.site.operand, operand, back)
            return jax.vjp(viewed(self.site), full)[1](of_view)[0]

        return self.weight.part(local, self.dim, self.back_dim)(operand, back, full)

    def _apply(self, operand: Any, full: Any) -> Any:
        full = viewed(self.site)(full)
        return bind(self.equation, (operand, full) if self.site.operand == 1 else (full, operand))[0]
