"""Weights that go around a ring of devices: units that use them are computed part by part, and gathered nowhere."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh

from braidax.parallel.plan.compiling import RingForm
from braidax.parallel.plan.layout import Layout
from braidax.program import (
    Equation,
    Path,
    Program,
    RotatedWeight,
    evaluate,
    joined,
    keeping,
    rotatable,
    trace,
    unit_path,
    with_names_saved,
)

from .ring import SAVED, Ring
from .turns import Turns


class Rotated(NamedTuple):
    """A program with rings. **Fields:** `program`; `rings`: the paths of their calls, which take shards as they lie."""

    program: Program
    rings: tuple[Path, ...]


def rotated(
    program: Program,
    layouts: Mapping[int, Layout],
    mesh: AbstractMesh,
    batch_axes: tuple[str, ...],
    divided: Mapping[int, Sequence[int | None] | int],
    *,
    form: RingForm,
) -> Rotated:
    """Returns a program in which units of weights are computed on rings.

    **Arguments:** `program`: its first argument holds the weights. `layouts`: of the leaves of it that go around, by
    number, all along one axis. `mesh`: with automatic axes. `batch_axes`: over which samples are divided. `divided`: as
    of `find_batch_dims`. `form`: how rings are written for the compiler.
    """
    axis = next(layout.rotated for layout in layouts.values())
    if axis is None or axis not in batch_axes:  # what has the same samples is gathered
        return Rotated(program, ())
    own = {leaf: layout for leaf, layout in layouts.items() if layout.gathered <= {*batch_axes}}  # others are gathered
    dims = {leaf: dim for leaf, layout in own.items() if (dim := layout.rotated_dim) is not None}
    num_batch_parts = math.prod(mesh.shape[name] for name in batch_axes)
    found = rotatable(program, dims, mesh.shape[axis], divided, num_batch_parts)
    if not found.units:
        return Rotated(program, ())
    program = found.program
    for path in found.units:
        program = with_names_saved(program, path, {SAVED})
    outside = [path for path in found.units if len(path) == 1]  # of loops
    last = max(outside, default=None)
    names = {path: f"ring_{unit.name}" for path, unit in found.units.items()}

    def replace(path: Path, equation: Equation, inputs: list[Any]) -> Sequence[Any]:
        unit = found.units[path]
        weights = {at: _axes(weight, layouts[weight.leaf], axis, unit.ndim(at)) for at, weight in unit.weights.items()}
        adapted = _adapted(form, [layouts[weight.leaf] for weight in unit.weights.values()], in_loop=len(path) > 1)
        in_place = adapted.in_place
        if path == last and form.lets_last_move and not in_place:  # in slices its last gradient cannot move
            unit = dataclasses.replace(unit, length=unit.length._replace(num_slices=1))
        unit = dataclasses.replace(unit, length=unit.length._replace(in_order=form.in_order))
        if in_place and len(path) > 1:  # else compilers keep what is joined from the forward to the backward pass
            unit = joined(unit, mesh.shape[axis], num_batch_parts, form.least_bytes)
        if path == last and form.in_order and form.keeps and unit.num_slices == 1:
            unit = keeping(unit, mesh.shape[axis], num_batch_parts)
        one = Ring(Turns(unit, axis, batch_axes, mesh, weights, adapted, path == last))

        def call(*inputs: Any) -> list[Any]:
            return one(inputs)

        call.__name__ = call.__qualname__ = names[path]
        return jax.jit(call)(*inputs)

    rules = {path: partial(replace, path) for path in found.units}

    def run(*args: Any) -> Any:
        outputs, _ = evaluate(program.closed, rules, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(program.out_specs), outputs)

    program = trace(run, *program.in_specs, mesh=mesh)
    return Rotated(program, tuple(unit_path(program, name) for name in names.values()))


def _adapted(form: RingForm, layouts: Sequence[Layout], *, in_loop: bool) -> RingForm:
    """Returns how the ring of some weights is written. **Arguments:** `in_loop`: whether a loop over layers uses it."""
    if not in_loop:
        form = form._replace(unroll=1)  # a hop of all words would lie under no product
    if not form.in_place and any(one.ring is not None and one.ring.in_place for one in layouts):
        return form._replace(in_place=True, unroll=1)
    return form


def _axes(weight: RotatedWeight, layout: Layout, axis: str, ndim: int) -> tuple[tuple[str, ...], ...]:
    """The axes that split the dims of a weight as a unit takes it; others than `axis` only where its dims are known."""
    if weight.dims is None:
        return tuple((axis,) if at == weight.divided else () for at in range(ndim))
    return tuple(layout.axes_of(dim) for dim in weight.dims)
