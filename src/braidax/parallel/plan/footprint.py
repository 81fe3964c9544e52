"""What a plan costs one device: bytes that it holds, and bytes that it sends in a step."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import jax
import numpy as np
from jax.sharding import NamedSharding

from braidax.program import Site, aval_of

from .costs.tables import costs_of
from .layout import Layout
from .model import Model
from .placements import Rows
from .plan import Plan, PlannedVariable, layouts_of
from .strategy import num_bytes


def with_sent(plan: Plan, model: Model) -> Plan:
    """Returns a plan that says what a device sends in a step for each variable, and what of it it keeps, by formula.

    A whole gradient is all-reduced: `2 B (N - 1) / N`. A weight that is gathered, or goes around, sends
    `B (N - 1) / N` for it forward, again backward unless it is kept, and for its gradient, in each microbatch; sums
    over other axes are of the part that is left. What is used in pieces is exchanged, and so is its gradient. Rows are
    what the strategy has counted, or an upper bound. A frozen variable has no gradient. What activations send is not in
    it.
    """
    sizes = {axis.name: axis.size for axis in plan.axes if axis.name in plan.batch_axes}

    def sent(variable: PlannedVariable, layout: Layout) -> int | None:
        if any(isinstance(placement, Rows) for placement in variable.placements):
            uses = model.uses.get(variable.path)
            known = variable.costs.sent_bytes if variable.costs.alpha is not None else None
            return costs_of(model, variable.path, None).sent if known is None and uses is not None else known
        return round(_dense_bytes(variable, layout, sizes, plan.microbatches, model.sites if layout.moving else {}))

    def kept(variable: PlannedVariable, layout: Layout) -> int:
        return round(_used_bytes(variable, layout, model.sites)) if layout.keeps else 0

    pairs = zip(plan.variables, layouts_of(plan), strict=True)
    counted = [
        (one, replace(one.costs, sent_bytes=sent(one, layout), kept_bytes=kept(one, layout))) for one, layout in pairs
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


def _dense_bytes(
    variable: PlannedVariable,
    layout: Layout,
    sizes: Mapping[str, int],
    microbatches: int,
    sites: Mapping[str, Sequence[Site]],
) -> float:
    split = [axis for dim in range(len(layout.shape)) for axis in layout.dim_axes[dim]]
    within = math.prod(axis.size for axis in split if axis.name in layout.moving)
    part = _part_bytes(variable, layout)
    others = math.prod(size for name, size in sizes.items() if name not in layout.moving | layout.axes)
    exchanged = _exchanged(part / within, layout, frozen=variable.frozen) * microbatches
    if within == 1:
        return exchanged + (0.0 if variable.frozen else _all_reduced(part, others))
    used = _used_bytes(variable, layout, sites) * (within - 1) / within
    ways = (1 if layout.keeps else 2) + (not variable.frozen)
    once = ways * used + (0.0 if variable.frozen else _all_reduced(part / within, others))
    return exchanged + once * microbatches


def _part_bytes(variable: PlannedVariable, layout: Layout) -> float:
    """Of what a device uses of a variable at once, as it is stored."""
    axes = [axis for dim in range(len(layout.shape)) for axis in layout.dim_axes[dim] if axis.name not in layout.moving]
    return variable.num_bytes / math.prod(axis.size for axis in axes)


def _used_bytes(variable: PlannedVariable, layout: Layout, sites: Mapping[str, Sequence[Site]]) -> float:
    """Of the same, in all forms in which it is gathered."""
    return _part_bytes(variable, layout) * _width(sites.get(variable.path, ()), variable)


def _exchanged(stored_bytes: float, layout: Layout, *, frozen: bool) -> float:
    """Of what a device stores of a variable, brings it into pieces, and its gradient back; what is whole is there."""
    if layout.pieces is None:
        return 0.0
    ways = (layout.pieces.stored is not None) + (not frozen)
    return ways * stored_bytes * (layout.pieces.axis.size - 1) / layout.pieces.axis.size


def _all_reduced(num_bytes: float, devices: int) -> float:
    return 2 * num_bytes * (devices - 1) / devices


def _width(sites: Sequence[Site], variable: PlannedVariable) -> float:
    """How wide a variable is where it is used, of its own width, summed over the forms in which it is gathered."""
    own = np.dtype(variable.dtype)
    forms = {
        (site.value.entry, np.dtype(aval_of(site.value.casts[-1].outvars[0]).dtype) if site.value.casts else own)
        for site in sites
    }
    return sum(dtype.itemsize / own.itemsize for _, dtype in forms)


def shard_bytes(spec: jax.ShapeDtypeStruct, sharding: NamedSharding) -> int:
    """Returns the bytes of an array that one device holds."""
    return num_bytes(jax.ShapeDtypeStruct(sharding.shard_shape(spec.shape), spec.dtype))


def owners_of(paths: Sequence[str], names: Collection[str]) -> list[str]:
    """Returns for each leaf of an optimizer's state the variable that it is kept of, or "".

    **Arguments:** `paths`: of the leaves. `names`: of variables; the longest that a path ends with counts, and in a
    state with tables what stands below `rows/name`.
    """
    known = sorted(names, key=len, reverse=True)

    def owner(path: str) -> str:
        return next((one for one in known if f"/{path}".endswith(f"/{one}") or path.startswith(f"rows/{one}/")), "")

    return [owner(path) for path in paths]
