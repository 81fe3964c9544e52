"""Weights that are split over an axis, gathered where they are used, and whose gradients are scattered back.

A weight enters a part of the program (the whole of it, the body of a loop over layers, what a remat computes again)
as a shard. There it is gathered once. An equation that multiplies by it is computed in the global view; the gradient
of the weight is left as one part a device, and all parts that have come together for one weight are summed and
scattered at once. What no rule covers uses the gathered weight in the global view, and XLA sums its gradient.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.sharding import AbstractMesh, PartitionSpec

from braidax.parallel.plan.layout import Layout
from braidax.program import (
    Entry,
    Equation,
    Path,
    Program,
    Site,
    aval_of,
    batch_dim_of_result,
    bind,
    evaluate,
    find_batch_dims,
    find_sites,
    trace,
    viewed,
)


def gathered(
    program: Program,
    layouts: Mapping[int, Layout],
    mesh: AbstractMesh,
    batch_axes: tuple[str, ...],
    divided: Mapping[int, Sequence[int] | int],
) -> Program:
    """Returns a program that gathers weights where it uses them.

    **Arguments:** `program`: its first argument holds the weights. `layouts`: of the leaves of it that are gathered, by
    number. `mesh`: with automatic axes. `batch_axes`: over which samples are divided. `divided`: as of
    `find_batch_dims`.
    """
    sites = [site for site in find_sites(program) if site.value.entry.leaf in layouts and not site.within]
    dims = find_batch_dims(program, {site.path for site in sites}, divided)
    weights = {
        _key(site): weight
        for site in sites
        if (weight := _weight(site, layouts[site.value.entry.leaf], mesh, batch_axes)).gathers
        and any(dim is not None for dim in dims[site.path])  # what no sample meets is computed on shards
    }
    used = [site for site in sites if _key(site) in weights]
    if not used:
        return program
    held: dict[Any, _Held] = {}

    def enter(level: Path, inputs: list[Any]) -> None:
        for key, weight in weights.items():
            if key[0].level == level:
                held[key] = weight.enter(inputs[key[0].input])

    def replace(at: Sequence[Site], equation: Equation, inputs: list[Any]) -> Sequence[Any]:
        (one, *others) = at
        if not others and (site := _covered(one, weights[_key(one)], equation, dims[one.path])):
            return [site(inputs, held[_key(one)])]
        for site in at:
            inputs[site.operand] = viewed(site)(held[_key(site)].full)
        return bind(equation, inputs)

    by_path: dict[Path, list[Site]] = {}
    for site in used:
        by_path.setdefault(site.path, []).append(site)
    rules = {path: partial(replace, at) for path, at in by_path.items()}
    levels = {key[0].level: partial(enter, key[0].level) for key in weights}

    def run(*args: Any) -> Any:
        outputs, _ = evaluate(program.closed, rules, jax.tree.leaves(args), entered=levels)
        return jax.tree.unflatten(jax.tree.structure(program.out_specs), outputs)

    return trace(run, *program.in_specs, mesh=mesh)


class _Held(NamedTuple):
    """A weight as it entered: `shard`, cast; `full`, gathered; `parts`, nothing, whose gradient is that of `full`."""

    shard: jax.Array
    full: jax.Array
    parts: jax.Array


def _key(site: Site) -> tuple[Entry, tuple[str, ...]]:
    return site.value.entry, tuple(f"{cast.primitive.name} {sorted(cast.params.items())}" for cast in site.value.casts)


def _weight(site: Site, layout: Layout, mesh: AbstractMesh, batch_axes: tuple[str, ...]) -> "_Weight":
    dims = [layout.axes_of(dim) for dim in site.value.entry.dims]
    gathers = tuple((at, axis) for at, axes in enumerate(dims) for axis in axes if axis in layout.gathered)
    kept = tuple(tuple(axis for axis in axes if axis not in layout.gathered) for axes in dims)
    sizes = tuple(layout.shape[dim] for dim in site.value.entry.dims)
    padding = tuple(layout.padding[dim] for dim in site.value.entry.dims)
    return _Weight(site.value.casts, tuple(dims), kept, gathers, sizes, padding, mesh, batch_axes)


@dataclass(frozen=True)
class _Weight:
    """How a value is cast and gathered, and how the parts of its gradient are brought together.

    **Fields:** `dims`: the axes that split each dim, and `kept`, when it is gathered. `gathers`: pairs of a dim and an
    axis that splits it, the outermost first. `sizes`: of the dims, and their `padding` where they are split.
    """

    casts: tuple[Equation, ...]
    dims: tuple[tuple[str, ...], ...]
    kept: tuple[tuple[str, ...], ...]
    gathers: tuple[tuple[int, str], ...]
    sizes: tuple[int, ...]
    padding: tuple[int, ...]
    mesh: AbstractMesh
    batch_axes: tuple[str, ...]

    def enter(self, value: Any) -> _Held:
        for cast in self.casts:
            (value,) = bind(cast, [value])
        value = self._split(self._padded(value))
        full, parts = self._entered(value)
        return _Held(value, full, parts)

    def gather(self, value: Any) -> Any:
        """Brings a shard's value onto every device along the axes."""

        def local(value: Any) -> Any:
            for dim, axis in reversed(self.gathers):
                value = jax.lax.all_gather(value, axis, axis=dim, tiled=True)
            return value

        full = self._island(local, self._gathered_axes, self._manual, PartitionSpec())(value)
        return full[tuple(slice(size) for size in self.sizes)] if any(self.padding) else full

    def scatter(self, parts: Any) -> Any:
        """Sums `[N, ...]`, one part a device, and leaves each device its shard of the sum."""

        def local(parts: Any) -> Any:
            total = self._padded(parts[0])
            for dim, axis in self.gathers:
                total = jax.lax.psum_scatter(total, axis, scatter_dimension=dim, tiled=True)
            others = tuple(name for name in self.batch_axes if name not in self._gathered_axes)
            return jax.lax.psum(total, others) if others else total

        return self._island(local, {*self.batch_axes}, PartitionSpec(self.batch_axes), self._manual)(parts)

    def part(self, local: Callable[..., Any], dim: int, back_dim: int) -> Callable[..., Any]:
        """Makes of `local(operand, back, full)`, which gives a gradient, the function that gives all parts of it."""
        axes = self.batch_axes
        specs = (PartitionSpec(*[None] * dim, axes), PartitionSpec(*[None] * back_dim, axes), PartitionSpec())
        return self._island(lambda *args: local(*args)[None], {*axes}, specs, PartitionSpec(axes))

    @property
    def leaves_parts(self) -> bool:
        """Whether the gradient can be left in parts: all devices that share the weight have samples of their own."""
        return self._gathered_axes <= {*self.batch_axes}

    @property
    def num_parts(self) -> int:
        """Among how many devices samples are divided."""
        return math.prod(self.mesh.shape[name] for name in self.batch_axes)

    def _entered(self, value: Any) -> Any:
        @jax.custom_vjp
        def entered(value: Any) -> Any:
            return self.gather(value), self._no_parts(value)

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

    def _no_parts(self, value: Any) -> Any:
        zeros = jnp.zeros((self.num_parts, *self.sizes), value.dtype)
        return jax.lax.with_sharding_constraint(zeros, PartitionSpec(self.batch_axes, *self.kept))

    def _padded(self, value: Any) -> Any:
        return jnp.pad(value, [(0, more) for more in self.padding]) if any(self.padding) else value

    def _split(self, value: Any) -> Any:
        return jax.lax.with_sharding_constraint(value, PartitionSpec(*self.dims))

    @property
    def _gathered_axes(self) -> set[str]:
        return {axis for _, axis in self.gathers}

    @property
    def _manual(self) -> PartitionSpec:
        """The layout of a shard along the axes that are gathered."""
        return PartitionSpec(*(tuple(name for name in axes if name in self._gathered_axes) for axes in self.dims))

    def _island(self, local: Any, axes: set[str], in_specs: Any, out_specs: Any) -> Any:
        mapped: Any = jax.shard_map(local, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=False)
        return mapped


def _covered(site: Site, weight: _Weight, equation: Equation, dims: Sequence[int | None]) -> Any:
    """Returns the function that stands in place of an equation whose weight's gradient can be left in parts."""
    if site.role == "other" or not weight.leaves_parts:
        return None
    other = 1 - site.operand
    dim, back_dim = dims[other], batch_dim_of_result(equation, other, dims[other])
    if dim is None or back_dim is None or aval_of(equation.invars[other]).shape[dim] % weight.num_parts:
        return None
    view = viewed(site)
    again = not (site.value.in_loop or site.value.remat)  # gathered again in the backward pass, and not kept until then

    def apply(operand: Any, full: Any) -> Any:
        return bind(equation, (operand, view(full)) if site.operand == 1 else (view(full), operand))[0]

    def local(operand: Any, back: Any, full: Any) -> Any:
        return jax.vjp(lambda full: apply(operand, full), full)[1](back)[0]

    @jax.custom_vjp
    def used(operand: Any, shard: Any, full: Any, parts: Any) -> Any:
        return apply(operand, full)

    def forward(operand: Any, shard: Any, full: Any, parts: Any) -> Any:
        return apply(operand, full), (operand, shard if again else full)

    def backward(kept: Any, back: Any) -> Any:
        operand, full = kept
        if again:
            full, back = jax.lax.optimization_barrier((full, back))
            full = weight.gather(full)
        (of_operand,) = jax.vjp(lambda operand: apply(operand, full), operand)[1](back)
        return of_operand, None, None, weight.part(local, dim, back_dim)(operand, back, full)

    used.defvjp(forward, backward)
    return lambda inputs, held: used(inputs[other], *held)
