"""Experts that stay where they are, over an axis that divides the samples: what is for them is sent there, and back.

Each device has some of the experts. What all devices have for these comes by one `all_to_all` before the first product,
and what they make of it goes back by another behind the last one (expert parallelism, GShard, arXiv 2006.16668).
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
from jax.sharding import AbstractMesh, PartitionSpec

from braidax.parallel.plan.layout import Layout
from braidax.program import (
    Equation,
    Experts,
    Path,
    Program,
    bind,
    evaluate,
    find_experts,
    outline,
    trace,
    unit_path,
)

from .split import island

Axes = tuple[str, ...]


def experts(
    program: Program,
    layouts: Mapping[int, Layout],
    mesh: AbstractMesh,
    batch_axes: Axes,
    divided: Mapping[int, Sequence[int | None] | int],
) -> Program:
    """Returns a program that sends samples to experts which lie apart.

    **Arguments:** `program`: its first argument holds the weights. `layouts`: of the leaves of it that are split, by
    number. `mesh`: with automatic axes. `batch_axes`: over which samples are divided. `divided`: as of
    `find_batch_dims`.
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
    rules: dict[Path, Any] = {
        path: partial(_exchanged, one, axes[one.unit.name], batch_axes) for path, one in units.items()
    }

    def run(*args: Any) -> Any:
        outputs, _ = evaluate(program.closed, rules, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(program.out_specs), outputs)

    return trace(run, *program.in_specs, mesh=mesh)


def _axis(one: Experts, layouts: Mapping[int, Layout], mesh: AbstractMesh, batch_axes: Axes) -> str | None:
    """The one axis that all weights of some experts are split over, if it divides them."""
    told = [layouts[leaf].kept_axes(dim) if leaf in layouts else () for leaf, dim in one.dims.items()]
    same = all(axes == told[0] for axes in told)
    return next((axis for axis in batch_axes if same and told[0] == (axis,) and not one.count % mesh.shape[axis]), None)


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
