"""Tables as a plan places them by rows."""

import math
from collections.abc import Mapping
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh

from braidax.errors import ArgumentError
from braidax.parallel.plan.placements import Rows
from braidax.parallel.plan.plan import Plan, PlannedVariable

from . import RowOptimizer
from .packing import Table
from .touched import Touched, expected_unique


def rows_over(plan: Plan, variable: PlannedVariable) -> dict[str, Rows]:
    """Returns the axes that the rows of a variable are split over, and how."""
    pairs = zip(plan.axes, variable.placements, strict=True)
    return {axis.name: placement for axis, placement in pairs if isinstance(placement, Rows)}


def planned_table(
    plan: Plan,
    variable: PlannedVariable,
    name: str,
    spec: jax.ShapeDtypeStruct,
    mesh: Mesh,
    optimizer: RowOptimizer,
    touched: Touched | None = None,
) -> Table:
    """Returns a variable that is split by rows, as exchanges have it.

    **Arguments:** `name`: of its leaf. `spec`: as the loss has it. `optimizer`: moves its rows. `touched`: counted for
    as many parts as its rows are split into, if that was counted.

    **Raises:** `ArgumentError` where it was counted for others, or where `aggregate` of its placements cannot be.
    """
    over = rows_over(plan, variable)
    axes = tuple(over)
    num_shards = math.prod(mesh.shape[axis] for axis in axes)
    of_ids = plan.batch_axes if {*axes} <= {*plan.batch_axes} else axes
    num_unique = _num_unique(touched, variable.path, num_shards)
    return Table(name, spec, axes, num_shards, optimizer, of_ids, _aggregate(over, mesh), num_unique)


def _num_unique(touched: Touched | None, path: str, num_shards: int) -> int | None:
    if touched is None:
        return None
    if touched.num_parts != num_shards:
        raise ArgumentError(
            f"touched of {path} was counted for num_parts={touched.num_parts}, and its rows are split over "
            f"{num_shards} devices: measure it with num_parts={num_shards}"
        )
    return expected_unique(touched)


def _aggregate(over: Mapping[str, Rows], mesh: Mesh) -> Literal["inner", "none"]:
    """Whether rows are aggregated along the last axis: as asked, or where the others join processes and it does not."""
    *outer, inner = over
    asked = {placement.aggregate for placement in over.values()} - {"auto"}
    if len(asked) > 1:
        raise ArgumentError(f"aggregate of Rows is {sorted(asked)} on the axes {[*over]}: expected the same on all")
    if asked == {"inner"} and not outer:
        raise ArgumentError(
            f'aggregate="inner" of Rows needs a table over two axes at least, and it is over {[*over]}: give Hybrid to '
            f'both axes, or aggregate="none"'
        )
    if asked:
        return asked.pop()  # pyright: ignore[reportReturnType]
    return "inner" if any(_crosses(mesh, axis) for axis in outer) and not _crosses(mesh, inner) else "none"


def _crosses(mesh: Mesh, axis: str) -> bool:
    """Whether devices along an axis belong to several processes."""
    devices: Any = mesh.devices
    processes = np.vectorize(lambda device: device.process_index, otypes=[np.int64])(devices)
    return bool(np.ptp(processes, axis=mesh.axis_names.index(axis)).any())
