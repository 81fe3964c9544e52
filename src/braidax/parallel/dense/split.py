"""Weights that are split over an axis where the loss uses them, and the activations that are split with them.

XLA's partitioner divides every operation as its operands lie. Two things are written out here. Results of products lie
as their dims' groups say: what is summed over the split dim is whole. And a value that several products spread over a
split dim (a layer's input, that queries, keys and values are made of) gets a copy for each device: the parts of its
gradient are added up on the device that made them, and summed over devices once.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec

from braidax.parallel.plan.layout import Layout
from braidax.program import (
    Dims,
    Dot,
    Equation,
    Path,
    Program,
    ValueOrigin,
    aval_of,
    batch_dim_of_result,
    bind,
    evaluate,
    find_batch_dims,
    find_dims,
    find_sites,
    trace,
)

Axes = tuple[str, ...]


def split(
    program: Program,
    layouts: Mapping[int, Layout],
    mesh: AbstractMesh,
    batch_axes: Axes,
    divided: Mapping[int, Sequence[int] | int],
) -> Program:
    """Returns a program whose activations are split as its weights are.

    **Arguments:** `program`: its first argument holds the weights. `layouts`: of the leaves of it that are split, by
    number. `mesh`: with automatic axes. `batch_axes`: over which samples are divided. `divided`: as of
    `find_batch_dims`.
    """
    found = find_dims(program)
    axes_of = _split_groups(found, layouts, mesh)
    dots = [dot for dot in found.dots if any(map(dot.contracts, axes_of)) or _spread(dot, axes_of)]
    columns = [site for site in find_sites(program) if site.role == "rows" and site.value.entry.leaf in layouts]
    batch_dims = find_batch_dims(program, {one.path for one in (*dots, *columns)}, divided)
    copies: dict[tuple[ValueOrigin, int], jax.Array] = {}
    rules: dict[Path, Any] = {}
    makers: dict[ValueOrigin, dict[Any, Callable[[Any], None]]] = {}

    spec_of = partial(_spec, axes_of, batch_axes)

    def copy(key: tuple[ValueOrigin, int], spec: PartitionSpec, value: Any) -> None:
        axes = axes_of[key[1]]
        size = math.prod(mesh.shape[axis] for axis in axes)
        spread = jnp.broadcast_to(value, (size, *value.shape))
        copies[key] = jax.lax.with_sharding_constraint(spread, PartitionSpec(axes, *spec))

    for dot in dots:
        spread, copied = _spread(dot, axes_of), None
        if spread is not None and (origin := dot.origins[spread.operand]) is not None:
            key = (origin, spread.group)
            spec = spec_of(dot.operands[spread.operand], batch_dims[dot.path][spread.operand])
            makers.setdefault(origin, {})[key] = partial(copy, key, spec)
            copied = partial(copies.__getitem__, key)
        rules[dot.path] = partial(_product, dot, spread, copied, batch_dims[dot.path], spec_of)

    for site in columns:
        rules[site.path] = partial(_read, batch_dims[site.path], spec_of)

    def shown(values: Sequence[Any], path: Path) -> None:
        for origin, found in makers.items():
            if origin[0] == path:
                for maker in found.values():
                    maker(values[origin[1] if origin[1] >= 0 else -1 - origin[1]])

    entered = {path: lambda inputs, fed, path=path: shown(inputs, path) for path, at in makers if at < 0}
    made = {path: lambda outputs, path=path: shown(outputs, path) for path, at in makers if at >= 0}

    def run(*args: Any) -> Any:
        outputs, _ = evaluate(program.closed, rules, jax.tree.leaves(args), entered=entered, made=made)
        return jax.tree.unflatten(jax.tree.structure(program.out_specs), outputs)

    return trace(run, *program.in_specs, mesh=mesh) if rules else program


def _spec(
    axes_of: Mapping[int, Axes], batch_axes: Axes, groups: Sequence[int | None], batch_dim: int | None
) -> PartitionSpec:
    """How a value lies whose dims are of these groups."""
    dims: list[Any] = [axes_of.get(group) if group is not None else None for group in groups]
    if batch_dim is None:  # it may be divided, nobody knows along which dim
        return PartitionSpec(*(axes or PartitionSpec.UNCONSTRAINED for axes in dims))
    return PartitionSpec(*dims[:batch_dim], dims[batch_dim] or batch_axes, *dims[batch_dim + 1 :])


def _split_groups(found: Dims, layouts: Mapping[int, Layout], mesh: AbstractMesh) -> dict[int, Axes]:
    """The groups whose weights are split, all over the same axes, and that every operation can do in parts."""
    axes_of: dict[int, Axes] = {}
    for root, group in found.groups.items():
        told = {layouts[leaf].kept_axes(dim) for leaf, dim in group.leaves if leaf in layouts} - {()}
        if len(told) == 1 and not group.blocked:
            (axes,) = told
            if group.divisor % math.prod(mesh.shape[axis] for axis in axes) == 0:
                axes_of[root] = axes
    return {
        root: axes
        for root, axes in axes_of.items()
        if not any({*axes} & {*axes_of.get(other, ())} for other in found.groups[root].conflicts)
    }


class _Spread(NamedTuple):
    """A product that spreads one `operand` over the dim of a `group`."""

    group: int
    operand: int


def _spread(dot: Dot, axes_of: Mapping[int, Axes]) -> _Spread | None:
    for group in dot.result:
        if group is not None and group in axes_of and (operand := dot.spreads(group)) is not None:
            return _Spread(group, operand)
    return None


def _product(
    dot: Dot,
    spread: _Spread | None,
    copies: Callable[[], jax.Array] | None,
    batch_dims: Sequence[int | None],
    spec_of: Callable[..., PartitionSpec],
    equation: Equation,
    inputs: list[Any],
) -> Sequence[Any]:
    """Computes a product, from the copies of one operand where there are such."""
    if copies is None or spread is None:
        (result,) = bind(equation, inputs)
    else:
        other = 1 - spread.operand
        result = _from_copies(equation, copies(), inputs[other], other, dot.operands[other].index(spread.group))
    found = [batch_dim_of_result(equation, at, batch_dims[at]) for at in range(2)]
    batch_dim = next((one for one in found if one is not None), None)
    return [jax.lax.with_sharding_constraint(result, spec_of(dot.result, batch_dim))]


def _read(
    batch_dims: Sequence[int | None], spec_of: Callable[..., PartitionSpec], equation: Equation, inputs: list[Any]
) -> Sequence[Any]:
    """Reads rows of a table that is split by its columns, and brings these together."""
    (result,) = bind(equation, inputs)
    batch_dim = batch_dim_of_result(equation, 1, batch_dims[1])
    whole = PartitionSpec(*[None] * result.ndim) if batch_dim is None else spec_of([None] * result.ndim, batch_dim)
    return [jax.lax.with_sharding_constraint(result, whole)]


def _from_copies(equation: Equation, copies: Any, other: Any, side: int, dim: int) -> Any:
    """Multiplies `[N, ...]` copies of one operand, each with one part of the other along a dim.

    **Arguments:** `side`: which operand the other one is. **Returns:** the equation's result, its parts side by side.
    """
    size, params, shape = copies.shape[0], equation.params, other.shape
    parts = other.reshape(*shape[:dim], size, shape[dim] // size, *shape[dim + 1 :])

    def moved(at: int, operand: int) -> int:
        return at + 1 if operand != side or at >= dim else at

    contracted, batched = (
        [[moved(at, operand) for at in dims[operand]] for operand in range(2)] for dims in params["dimension_numbers"]
    )
    for operand in range(2):
        batched[operand].insert(0, dim if operand == side else 0)
    product = jax.lax.dot_general(
        *((parts, copies) if side == 0 else (copies, parts)),
        ((contracted[0], contracted[1]), (batched[0], batched[1])),
        params["precision"],
        params["preferred_element_type"],
    )
    to = batch_dim_of_result(equation, side, dim)
    assert to is not None, "a free dim is in the result"
    return jnp.moveaxis(product, 0, to).reshape(aval_of(equation.outvars[0]).shape)
