"""What a plan costs one device: bytes that it holds, and bytes that it sends in a step."""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import optax
from jax.sharding import NamedSharding

from braidax.program import join, named_leaves

from .costs.forms import forms_of, lookup_bytes
from .costs.tables import costs_of
from .layout import Layout
from .model import Model
from .placements import Rows, Served
from .plan import Plan, PlannedVariable, layouts_of
from .strategy import num_bytes


def with_sent(plan: Plan, model: Model) -> Plan:
    """Returns a plan that says what a device sends in a step for each variable, and what of it it keeps, by formula.

    A whole gradient is all-reduced: `2 B (N - 1) / N`. A weight that is gathered, or goes around, sends
    `B (N - 1) / N` for it forward, again backward unless it is kept, and for its gradient, in each microbatch and each
    form in which samples meet it; sums over other axes are of the part that is left. Lookups exchange rows. What is
    used in pieces is exchanged, and so is its gradient. Tables by rows, or served, are what the strategy has counted,
    or an upper bound. A frozen variable has no gradient. What activations send is not in it.
    """
    sizes = {axis.name: axis.size for axis in plan.axes if axis.name in plan.batch_axes}

    def sent(variable: PlannedVariable, layout: Layout) -> int | None:
        if any(isinstance(placement, Rows | Served) for placement in variable.placements):
            uses = model.uses.get(variable.path)
            known = variable.costs.sent_bytes if variable.costs.alpha is not None else None
            return costs_of(model, variable.path, None).sent if known is None and uses is not None else known
        return round(_dense_bytes(variable, layout, sizes, model))

    def num_rows(variable: PlannedVariable) -> float | None:
        if variable.costs.alpha is not None or variable.path not in model.uses:
            return variable.costs.num_rows
        is_table = any(isinstance(placement, Rows | Served) for placement in variable.placements)
        return costs_of(model, variable.path, None).num_rows if is_table else None

    def kept(variable: PlannedVariable, layout: Layout) -> int:
        return round(_used_bytes(variable, layout, model)) if layout.keeps else 0

    pairs = zip(plan.variables, layouts_of(plan), strict=True)
    counted = [
        (
            one,
            replace(one.costs, sent_bytes=sent(one, layout), kept_bytes=kept(one, layout), num_rows=num_rows(one)),
        )
        for one, layout in pairs
    ]
    return replace(plan, variables=tuple(replace(one, costs=costs) for one, costs in counted))


def with_held(plan: Plan, held: Sequence[tuple[int, int, int]]) -> Plan:
    """Returns a plan that says what a device holds.

    **Arguments:** `held`: bytes for each variable: of it, its gradient, and what the optimizer keeps.
    """
    variables = tuple(
        replace(one, costs=replace(one.costs, held_bytes=own, gradient_bytes=gradient, state_bytes=state))
        for one, (own, gradient, state) in zip(plan.variables, held, strict=True)
    )
    return replace(plan, variables=variables)


def _dense_bytes(variable: PlannedVariable, layout: Layout, sizes: Mapping[str, int], model: Model) -> float:
    split = [axis for dim in range(len(layout.shape)) for axis in layout.dim_axes[dim]]
    within = math.prod(axis.size for axis in split if axis.name in layout.moving)
    part = _part_bytes(variable, layout)
    others = math.prod(size for name, size in sizes.items() if name not in layout.moving | layout.axes)
    exchanged = _exchanged(part / within, layout, frozen=variable.frozen) * model.microbatches
    if within == 1:
        return exchanged + (0.0 if variable.frozen else _all_reduced(part, others))
    used = _used_bytes(variable, layout, model) * (within - 1) / within
    rows = lookup_bytes(model, variable.path, layout, sizes, ways=1 if variable.frozen else 2)
    ways = (1 if layout.keeps else 2) + (not variable.frozen)
    once = rows + ways * used + (0.0 if variable.frozen else _all_reduced(part / within, others))
    return exchanged + once * model.microbatches


def _part_bytes(variable: PlannedVariable, layout: Layout) -> float:
    """Of what a device uses of a variable at once, as it is stored."""
    return variable.num_bytes / _num_kept(layout)


def _used_bytes(variable: PlannedVariable, layout: Layout, model: Model) -> float:
    """Of the same, in all forms in which samples meet it, padded."""
    longer = math.prod((size + more) / size for size, more in zip(layout.shape, layout.padding, strict=True) if size)
    return sum(form.num_bytes for form in forms_of(model, variable.path)) * longer / _num_kept(layout)


def _num_kept(layout: Layout) -> int:
    """Among how many devices a variable is divided where the loss uses it."""
    axes = [axis for dim in range(len(layout.shape)) for axis in layout.dim_axes[dim]]
    return math.prod(axis.size for axis in axes if axis.name not in layout.moving)


def _exchanged(stored_bytes: float, layout: Layout, *, frozen: bool) -> float:
    """Of what a device stores of a variable, brings it into pieces, and its gradient back; what is whole is there."""
    if layout.pieces is None:
        return 0.0
    ways = (layout.pieces.stored is not None) + (not frozen)
    return ways * stored_bytes * (layout.pieces.axis.size - 1) / layout.pieces.axis.size


def _all_reduced(num_bytes: float, devices: int) -> float:
    return 2 * num_bytes * (devices - 1) / devices


def shard_bytes(spec: jax.ShapeDtypeStruct, sharding: NamedSharding) -> int:
    """Returns the bytes of an array that one device holds."""
    return num_bytes(jax.ShapeDtypeStruct(sharding.shard_shape(spec.shape), spec.dtype))


def state_bytes(optimizer: optax.GradientTransformation, params: Any, root: str) -> Counter[str]:
    """Returns by path the bytes that an optimizer keeps of variables in their shapes; at "" of all else.

    **Arguments:** `params`: PyTree of specs. `root`: what every path starts with.
    """
    shapes = {name: spec.shape for name, spec in named_leaves(params)}
    kept = named_leaves(jax.eval_shape(optimizer.init, params))
    found: Counter[str] = Counter()
    for owner, (_, spec) in zip(owners_of([path for path, _ in kept], shapes), kept, strict=True):
        found[join(root, owner) if shapes.get(owner) == spec.shape else ""] += num_bytes(spec)
    return found


def owners_of(paths: Sequence[str], names: Collection[str]) -> list[str]:
    """Returns for each leaf of an optimizer's state the variable that it is kept of, or "".

    **Arguments:** `paths`: of the leaves. `names`: of variables; the longest that a path ends with counts, and in a
    state with tables what stands below `rows/name`.
    """
    known = sorted(names, key=len, reverse=True)

    def owner(path: str) -> str:
        return next((one for one in known if f"/{path}".endswith(f"/{one}") or path.startswith(f"rows/{one}/")), "")

    return [owner(path) for path in paths]
