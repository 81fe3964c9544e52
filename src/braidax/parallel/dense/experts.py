"""Experts that stay where they are, over an axis that divides the samples: what is for them is sent there, and back.

Each device has some of the experts. What all devices have for these comes by one `all_to_all` before the first product,
and what they make of it goes back by another behind the last one (expert parallelism, GShard, arXiv 2006.16668).

Nothing else could be computed while these cross. So where a compiler hides messages, each is one for each other device:
experts begin with what is for them at home, and take the rest as it comes, each under the products of the one before.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec

from braidax.parallel.plan.layout import Layout
from braidax.program import (
    Division,
    Equation,
    Experts,
    Path,
    Program,
    Undivided,
    aval_of,
    bind,
    bodies,
    equation_at,
    evaluate,
    find_experts,
    outline,
    trace,
    unit_path,
)

from .split import island

Axes = tuple[str, ...]

_MOST_TURNS = 16  # each is written out


def experts(
    program: Program,
    layouts: Mapping[int, Layout],
    mesh: AbstractMesh,
    batch_axes: Axes,
    divided: Mapping[int, Sequence[int | None] | int],
    *,
    in_turn: bool = False,
) -> Program:
    """Returns a program that sends samples to experts which lie apart.

    **Arguments:** `program`: its first argument holds the weights. `layouts`: of the leaves of it that are split, by
    number. `mesh`: with automatic axes. `batch_axes`: over which samples are divided. `divided`: as of
    `find_batch_dims`. `in_turn`: whether what each device sends is computed by itself.
    """
    if not any(
        {*layout.kept_axes(dim)} & {*batch_axes} for layout in layouts.values() for dim in range(len(layout.shape))
    ):
        return program
    num_batch_parts = _size(mesh, batch_axes)
    found, all_of_them = find_experts(program, divided, num_batch_parts)
    axes = {one.unit.name: axis for one in all_of_them if (axis := _axis(one, layouts, mesh, batch_axes))}
    if not axes:
        return program
    program = outline(found, [one.unit for one in all_of_them if one.unit.name in axes])
    units = {unit_path(program, one.unit.name): one for one in all_of_them if one.unit.name in axes}
    rules: dict[Path, Any] = {}
    for path, one in units.items():
        rules[path] = partial(_exchanged, one, axes[one.unit.name], batch_axes)
        turns = _Turns(one, axes[one.unit.name], mesh, bodies(equation_at(program.closed.jaxpr, path))[0].jaxpr)
        if in_turn and batch_axes == (turns.axis,) and _lie_along(one, layouts, turns.axis) and turns.can_be():
            rules[path] = turns

    def run(*args: Any) -> Any:
        outputs, _ = evaluate(program.closed, rules, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(program.out_specs), outputs)

    return trace(run, *program.in_specs, mesh=mesh)


def _axis(one: Experts, layouts: Mapping[int, Layout], mesh: AbstractMesh, batch_axes: Axes) -> str | None:
    """The one axis that all weights of some experts are split over, if it divides them."""
    told = [layouts[leaf].kept_axes(dim) if leaf in layouts else () for leaf, dim in one.dims.items()]
    same = all(axes == told[0] for axes in told)
    return next((axis for axis in batch_axes if same and told[0] == (axis,) and not one.count % mesh.shape[axis]), None)


def _lie_along(one: Experts, layouts: Mapping[int, Layout], axis: str) -> bool:
    return all({*layouts[leaf].axes} == {axis} for leaf in one.dims)


@dataclass(frozen=True)
class _Turns:
    """Experts that take what each device has for them in turn, along the one axis that divides samples."""

    experts: Experts
    axis: str
    mesh: AbstractMesh
    jaxpr: Any

    @property
    def count(self) -> int:
        """How many devices send."""
        return self.mesh.shape[self.axis]

    def can_be(self) -> bool:
        """Whether it was seen that experts can do so."""
        sizes = [dict.fromkeys(dims or (), self.count) for dims in self.experts.inputs]
        for at, dim in self.experts.weights.items():
            sizes[at] = {dim: self.count}
        specs = [
            jax.ShapeDtypeStruct([one // parts.get(dim, 1) for dim, one in enumerate(aval.shape)], aval.dtype)
            for aval, parts in zip(map(aval_of, self.jaxpr.invars), sizes, strict=True)
        ]
        try:
            jax.eval_shape(self._made, jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32), *specs)
        except Undivided:
            return False
        return self.count <= _MOST_TURNS

    def __call__(self, equation: Equation, inputs: list[Any]) -> Sequence[Any]:
        """Computes what experts do."""

        def spec(ndim: int, along: int | None) -> PartitionSpec:
            return PartitionSpec(*(self.axis if at == along else None for at in range(ndim)))

        weights, dims = self.experts.weights, self.experts.inputs
        given = [weights.get(at) if one is None else one[0] for at, one in enumerate(dims)]
        in_specs = tuple(spec(value.ndim, along) for value, along in zip(inputs, given, strict=True))
        pairs = zip(equation.outvars, self.experts.outputs, strict=True)
        out_specs = [spec(aval_of(var).ndim, dims and dims[0]) for var, dims in pairs]
        return jax.shard_map(
            self._local, in_specs=in_specs, out_specs=out_specs, axis_names={self.axis}, check_vma=False
        )(*inputs)

    def _made(self, me: Any, source: Any, *args: Any) -> list[Any]:
        divisions = Division(self.count, me), Division(self.count, source, sums=False)
        return self.experts.part(self.jaxpr, args, *divisions)

    def _local(self, *inputs: Any) -> list[Any]:
        """Computes what comes, while the next is on its way here, and what was made last on its way back."""
        me = jax.lax.axis_index(self.axis)
        args, made, back, found = self._owns(inputs, me), list[Any](), list[Any](), list[Any]()
        for step in range(self.count):
            following = self._owns(inputs, (me + step + 1) % self.count) if step + 1 < self.count else []
            coming = [self._sent(one, step + 1) for one in following]
            args, _ = jax.lax.optimization_barrier((args, (following, made)))
            made = self._made(me, (me - step) % self.count, *self._with(inputs, args))
            (coming, back), made = jax.lax.optimization_barrier(((coming, back), made))
            found = self._put(found, back, (me + step - 1) % self.count)
            args, back = coming, [self._sent(one, -step) for one in made]
        return self._put(found, back, (me - 1) % self.count)

    def _owns(self, inputs: Sequence[Any], device: Any) -> list[Any]:
        """Returns what is for the experts of a device."""
        pairs = zip(inputs, self.experts.inputs, strict=True)
        return [self._own(value, dims[1], device) for value, dims in pairs if dims is not None]

    def _with(self, inputs: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """Returns inputs, with what experts are sent in place of what is at home."""
        sent = iter(args)
        return [value if dims is None else next(sent) for value, dims in zip(inputs, self.experts.inputs, strict=True)]

    def _own(self, value: Any, dim: int, device: Any) -> Any:
        """What is for the experts of a device."""
        size = value.shape[dim] // self.count
        return jax.lax.dynamic_slice_in_dim(value, device * size, size, dim)

    def _put(self, found: list[Any], parts: Sequence[Any], device: Any) -> list[Any]:
        """Puts what the experts of a device have made to the rest."""
        dims = [one[1] for one in self.experts.outputs if one is not None]
        if not found:
            found = [self._room(*pair) for pair in zip(parts, dims, strict=False)]
        put = jax.lax.dynamic_update_slice_in_dim
        triples = zip(found, parts, dims, strict=False)
        return [put(whole, one, device * one.shape[dim], dim) for whole, one, dim in triples]

    def _room(self, part: Any, along: int) -> Any:
        shape = [size * self.count if at == along else size for at, size in enumerate(part.shape)]
        return jnp.zeros(shape, part.dtype)

    def _sent(self, value: Any, step: int) -> Any:
        """Sends something as many devices on."""
        if step == 0:
            return value
        return jax.lax.ppermute(value, self.axis, [(at, (at + step) % self.count) for at in range(self.count)])


def _size(mesh: AbstractMesh, axes: Axes) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def _exchanged(one: Experts, axis: str, batch_axes: Axes, equation: Equation, inputs: list[Any]) -> Sequence[Any]:
    """Sends inputs to the experts, and what these make of them back."""
    others = tuple(name for name in batch_axes if name != axis)

    def moved(value: Any, batch: int, dim: int, *, back: bool) -> Any:
        home = PartitionSpec(*(batch_axes if at == batch else None for at in range(value.ndim)))
        away = PartitionSpec(*({batch: others or None, dim: axis}.get(at) for at in range(value.ndim)))
        split, joined, specs = (batch, dim, (away, home)) if back else (dim, batch, (home, away))
        exchange = partial(jax.lax.all_to_all, axis_name=axis, split_axis=split, concat_axis=joined, tiled=True)
        return island(exchange, *specs)(value)

    sent = [
        value if at is None else moved(value, *at, back=False) for value, at in zip(inputs, one.inputs, strict=True)
    ]
    results = bind(equation, sent)
    return [moved(value, *at, back=True) for value, at in zip(results, one.outputs, strict=True) if at is not None]
