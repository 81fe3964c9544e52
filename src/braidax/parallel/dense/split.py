"""Weights that are split over an axis where the loss uses them, and the activations that are split with them.

XLA's partitioner divides every operation as its operands lie. Two things are written out here. Results of products lie
as their dims' groups say: what is summed over the split dim is whole. And a value that several products spread over a
split dim (a layer's input, that queries, keys and values are made of) gets a copy for each device: the parts of its
gradient are added up on the device that made them, and summed over devices once.

Between such blocks activations are whole, or split along another dim than that of the batch, the sequence: each sum
then becomes a scatter behind a block and a gather before the next (Megatron-LM, arXiv 2205.05198, section 4.2). Over an
axis that divides samples they are split along these, and a block has the samples of all devices along it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, PartitionSpec

from braidax.parallel.plan.layout import Layout
from braidax.program import (
    Dims,
    Dot,
    Equation,
    Path,
    Program,
    ValueOrigin,
    all_gather,
    aval_of,
    batch_dim_of_result,
    bind,
    equation_at,
    evaluate,
    find_batch_dims,
    find_dims,
    find_sites,
    psum_scatter,
    trace,
    with_names_saved,
)

Axes = tuple[str, ...]

SAVED = "braidax_scattered"
"""The name of what a remat keeps of sums that are scattered along samples: as much as it keeps of a block's input."""


def split(
    program: Program,
    layouts: Mapping[int, Layout],
    mesh: AbstractMesh,
    batch_axes: Axes,
    divided: Mapping[int, Sequence[int | None] | int],
) -> Program:
    """Returns a program whose activations are split as its weights are.

    **Arguments:** `program`: its first argument holds the weights. `layouts`: of the leaves of it that are split, by
    number. `mesh`: with automatic axes. `batch_axes`: over which samples are divided. `divided`: as of
    `find_batch_dims`.
    """
    found, jaxpr = find_dims(program), program.closed.jaxpr
    sites = [site for site in find_sites(program) if site.value.entry.leaf in layouts]
    multiplied = {site.value.entry.leaf for site in sites if site.role != "rows"}
    axes_of = _split_groups(found, {leaf: layouts[leaf] for leaf in multiplied}, mesh, batch_axes)
    dots = [dot for dot in found.dots if any(map(dot.contracts, axes_of)) or _spread(dot, axes_of)]
    columns = [site for site in sites if site.role == "rows"]
    scattered = [dot for dot in dots for root, axes in axes_of.items() if dot.contracts(root) and axes[0] in batch_axes]
    for dot in scattered:
        program = with_names_saved(program, dot.path, {SAVED})
    batch_dims = find_batch_dims(program, {one.path for one in (*dots, *columns)}, divided)
    between = _Between(axes_of, batch_axes, mesh, frozenset().union(*(one.by_sequence for one in layouts.values())))
    copies: dict[tuple[ValueOrigin, int], jax.Array] = {}
    rules: dict[Path, Any] = {}
    makers: dict[ValueOrigin, dict[Any, Callable[[Any], None]]] = {}

    def copy(key: tuple[ValueOrigin, int], lies: _Lies, value: Any) -> None:
        copies[key] = between.copied(value, axes_of[key[1]], lies)

    for dot in dots:
        spread, copied = _spread(dot, axes_of), None
        if spread is not None and (origin := dot.origins[spread.operand]) is not None:
            key, side = (origin, spread.group), spread.operand
            shape = aval_of(equation_at(jaxpr, dot.path).invars[side]).shape
            lies = between.lies(dot, dot.operands[side], shape, batch_dims[dot.path][side], spread.group)
            makers.setdefault(origin, {})[key] = partial(copy, key, lies)
            copied = partial(copies.__getitem__, key)
        rules[dot.path] = partial(_product, dot, spread, copied, batch_dims[dot.path], between)

    for site in columns:
        rules[site.path] = partial(_read, batch_dims[site.path], between)

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


def _split_groups(found: Dims, layouts: Mapping[int, Layout], mesh: AbstractMesh, batch_axes: Axes) -> dict[int, Axes]:
    """The groups whose weights are split, all over the same axes, and that every operation can do in parts.

    Axes that divide samples are the innermost: then what is gathered along them lies in its order.
    """
    axes_of: dict[int, Axes] = {}
    for root, group in found.groups.items():
        told = {layouts[leaf].kept_axes(dim) for leaf, dim in group.leaves if leaf in layouts} - {()}
        if len(told) == 1 and not group.blocked:
            (axes,) = told
            even = group.divisor % math.prod(mesh.shape[axis] for axis in axes) == 0
            if even and (not {*axes} & {*batch_axes} or axes == batch_axes[-len(axes) :]):
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


class _Lies(NamedTuple):
    """How a value lies between blocks: `whole` but for the batch and what else is split, as blocks need it.

    **Fields:** `dim`: along which it is split between them besides, if any, and lies as `split` says.
    """

    whole: PartitionSpec
    dim: int | None = None
    split: PartitionSpec = PartitionSpec()


@dataclass(frozen=True)
class _Between:
    """How values lie between blocks. **Fields:** `by_sequence`: axes along which they are split by sequence."""

    axes_of: Mapping[int, Axes]
    batch_axes: Axes
    mesh: AbstractMesh
    by_sequence: frozenset[str]

    def lies(
        self, dot: Dot, groups: Sequence[int | None], shape: Sequence[int], batch_dim: int | None, group: int | None
    ) -> _Lies:
        """Of an operand or the result of a product. **Arguments:** `group`: that it spreads or sums over."""
        dims: list[Any] = [self.axes_of.get(one) if one is not None else None for one in groups]
        if batch_dim is None:  # it may be divided, nobody knows along which dim
            return _Lies(PartitionSpec(*(axes or PartitionSpec.UNCONSTRAINED for axes in dims)))
        of_group = () if group is None else self.axes_of[group]
        taken = {*of_group, *(axis for axes in dims for axis in axes or ())}
        by_samples, size = {*of_group} <= {*self.batch_axes}, self.size(of_group)
        dims[batch_dim] = dims[batch_dim] or tuple(axis for axis in self.batch_axes if axis not in taken) or None
        whole = PartitionSpec(*dims)
        if group is None or not (by_samples or {*of_group} <= self.by_sequence):
            return _Lies(whole)
        free = [at for at, one in enumerate(groups) if one in dot.result and not dims[at] and not shape[at] % size]
        if not by_samples:
            return _Lies(whole, free[0], _with(whole, free[0], of_group)) if free else _Lies(whole)
        return _Lies(whole, batch_dim, _with(whole, batch_dim, self.batch_axes))

    def size(self, axes: Axes) -> int:
        return math.prod(self.mesh.shape[axis] for axis in axes)

    def copied(self, value: Any, axes: Axes, lies: _Lies) -> Any:
        """Returns `[N, ...]` copies of a value, one a device, gathered where it is split by sequence."""
        copies = PartitionSpec(axes, *lies.whole)
        if lies.dim is None:
            value = jnp.broadcast_to(value, (self.size(axes), *value.shape))
            return jax.lax.with_sharding_constraint(value, copies)
        value, dim = jax.lax.with_sharding_constraint(value, lies.split), lies.dim
        return island(lambda x: all_gather(x, axes, dim=dim)[None], lies.split, copies)(value)

    def summed(self, parts: Any, axes: Axes, lies: _Lies) -> Any:
        """Sums `[N, ...]` parts, one a device, and leaves each device its part of the sequence."""
        assert lies.dim is not None, "else the sum is whole"
        scatter = partial(psum_scatter, axis=axes, dim=lies.dim)
        found = island(lambda parts: scatter(parts[0]), PartitionSpec(axes, *lies.whole), lies.split)(parts)
        return checkpoint_name(found, SAVED) if {*axes} <= {*self.batch_axes} else found


def _with(spec: PartitionSpec, dim: int | None, axes: Axes) -> PartitionSpec:
    return PartitionSpec(*(axes if at == dim else entry for at, entry in enumerate(spec)))


def island(local: Callable[[Any], Any], in_spec: PartitionSpec, out_specs: Any) -> Any:
    """Returns what computes a function of one array on each device for itself.

    It is manual along every axis that splits a value: XLA would bring values together along others.
    """
    told = (out_specs,) if isinstance(out_specs, PartitionSpec) else out_specs
    entries = [entry for spec in (in_spec, *told) for entry in spec if entry]
    axes = {axis for entry in entries for axis in ((entry,) if isinstance(entry, str) else entry)}
    return jax.shard_map(local, in_specs=in_spec, out_specs=out_specs, axis_names=axes, check_vma=False)


def _product(
    dot: Dot,
    spread: _Spread | None,
    copies: Callable[[], jax.Array] | None,
    batch_dims: Sequence[int | None],
    between: _Between,
    equation: Equation,
    inputs: list[Any],
) -> Sequence[Any]:
    """Computes a product: from the copies of one operand, in parts that are summed by sequence, or as it is."""
    found = [batch_dim_of_result(equation, at, batch_dims[at]) for at in range(2)]
    batch_dim = next((one for one in found if one is not None), None)
    shape = aval_of(equation.outvars[0]).shape
    summed = next((group for group in between.axes_of if dot.contracts(group)), None)
    lies = between.lies(dot, dot.result, shape, batch_dim, summed)
    if copies is not None and spread is not None:
        side = 1 - spread.operand
        dim = dot.operands[side].index(spread.group)
        dims = [dim if operand == side else None for operand in range(2)]
        inputs[spread.operand] = copied = copies()
        inputs[side] = _apart(inputs[side], dim, copied.shape[0])
        to = batch_dim_of_result(equation, side, dim)
        assert to is not None, "a free dim is in the result"
        result = jnp.moveaxis(_of_parts(equation, inputs, dims), 0, to).reshape(shape)
    elif summed is not None and lies.dim is not None:
        axes = between.axes_of[summed]
        dims, size = [operand.index(summed) for operand in dot.operands], between.size(axes)
        parts = [_apart(value, dim, size) for value, dim in zip(inputs, dims, strict=True)]
        return [between.summed(_of_parts(equation, parts, dims), axes, lies)]
    else:
        (result,) = bind(equation, inputs)
    return [jax.lax.with_sharding_constraint(result, lies.whole)]


def _read(batch_dims: Sequence[int | None], between: _Between, equation: Equation, inputs: list[Any]) -> Sequence[Any]:
    """Reads rows of a table that is split, and brings them together."""
    (result,) = bind(equation, inputs)
    dims: list[Any] = [None] * result.ndim
    if (batch_dim := batch_dim_of_result(equation, 1, batch_dims[1])) is not None:
        dims[batch_dim] = between.batch_axes
    return [jax.lax.with_sharding_constraint(result, PartitionSpec(*dims))]


def _apart(value: Any, dim: int, size: int) -> Any:
    """Takes a dim apart in `size` equal parts."""
    return value.reshape(*value.shape[:dim], size, value.shape[dim] // size, *value.shape[dim + 1 :])


def _of_parts(equation: Equation, operands: Sequence[Any], dims: Sequence[int | None]) -> Any:
    """Computes a product part by part, `[N, ...]`.

    **Arguments:** `operands`: those of the equation, with a dim of `N` parts before the one that `dims` names, or in
    front where it names none.
    """
    params = equation.params
    numbers = params["dimension_numbers"]

    def moved(at: int, operand: int) -> int:
        return at + 1 if at >= (dims[operand] or 0) else at

    contracted, batched = ([[moved(at, operand) for at in of[operand]] for operand in range(2)] for of in numbers)
    for operand in range(2):
        batched[operand].insert(0, dims[operand] or 0)
    first, second = operands
    numbers = ((contracted[0], contracted[1]), (batched[0], batched[1]))
    return jax.lax.dot_general(first, second, numbers, params["precision"], params["preferred_element_type"])
