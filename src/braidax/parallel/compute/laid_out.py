"""A traced program whose weights lie as a plan says, in the middle of a step or beside it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from braidax.parallel.dense.passes import dense_passes
from braidax.parallel.plan.layout import Layout
from braidax.parallel.plan.plan import Plan, layouts_of
from braidax.parallel.rows.block_tables import BlockTables
from braidax.parallel.rows.options import OutOfRange
from braidax.program import Program


@dataclass(frozen=True)
class LaidOut:
    """What a program becomes.

    **Fields:** `program`: of its two lists, the first with None for each table whose rows are exchanged; then, where
    there are such, of the rows. `tables`: these, and `names` which variables of the plan they are. `given`: which of
    the weights the program is given, and how they lie, `layouts`. `divided`: as of `find_batch_dims`.
    """

    program: Program
    tables: BlockTables | None
    names: tuple[int, ...]
    given: tuple[int, ...]
    layouts: tuple[Layout, ...]
    divided: Mapping[int, Any]

    @property
    def is_split(self) -> bool:
        """Whether any weight is."""
        return bool(self.names) or any(one.moving or one.is_split for one in self.layouts)


def laid_out(
    program: Program,
    leaves: Mapping[int, int],
    dims: Sequence[int | None],
    mesh: Mesh,
    plan: Plan,
    out_of_range: OutOfRange = "as jax",
) -> LaidOut:
    """Applies to a program what the plan asks for.

    **Arguments:** `program`: of two lists, of which the first holds the weights. `leaves`: by the number of a weight,
    which variable of the plan it is. `dims`: which dim of the leaves of the second list is the batch. `out_of_range`:
    as of `BlockTables`.
    """
    layouts, specs, divided = layouts_of(plan), program.in_specs[0], dict[int, Any]({1: [*dims]})
    told = [layouts[leaves[at]] if at in leaves else Layout.whole(spec.shape) for at, spec in enumerate(specs)]
    by_rows = {at: plan.variables[leaves[at]] for at, layout in enumerate(told) if layout.by_rows}
    tables = BlockTables(program, by_rows, dims, mesh, plan, out_of_range) if by_rows else None
    if tables is not None and tables.leaves:
        program, divided[2] = tables.program, tables.batch_dims
    else:
        tables = None
    gone = () if tables is None else tables.leaves
    given = tuple(at for at in range(len(told)) if at not in gone)
    names = tuple(leaves[at] for at in gone)
    lies = tuple(told[at] for at in given)
    return LaidOut(dense_passes(program, lies, mesh, plan.batch_axes, divided), tables, names, given, lies, divided)
