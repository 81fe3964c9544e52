"""A function that reads a state: predictions, say, computed where the weights lie."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from braidax.parallel.plan.batch import along_batch
from braidax.parallel.plan.plan import Plan, layouts_of
from braidax.parallel.rows.options import OutOfRange
from braidax.program import Program, batch_dims_of_results, kept_in_blocks

from .laid_out import laid_out


class ReadingState(NamedTuple):
    """What reads a state, in the global view.

    **Fields:** `run`: of the flat state and the flat batch, gives the flat result, and how many ids no row has of each
    table. `shardings`: of these two. `tables`: which variables of the plan these tables are.
    """

    run: Callable[..., tuple[list[Any], Any]]
    shardings: tuple[list[NamedSharding], Any]
    tables: tuple[int, ...]


def reading_state(
    program: Program, leaves: Mapping[int, int], mesh: Mesh, plan: Plan, *, out_of_range: OutOfRange = "as jax"
) -> ReadingState:
    """Makes of a traced `(state, batch) -> result` what runs on states as they lie.

    **Arguments:** `leaves`: by the number of a leaf of the state, which variable of the plan it is.
    """
    state, batch = (jax.tree.leaves(specs) for specs in program.in_specs)
    specs = jax.tree.leaves(program.out_specs)
    flat = Program(program.closed, (state, batch), specs)
    dims = [0] * len(batch)
    laid = laid_out(flat, leaves, dims, mesh, plan, out_of_range)
    layouts, tables = layouts_of(plan), laid.tables
    blocks = {at: leaves[number] for at, number in enumerate(laid.given) if number in leaves}
    run = kept_in_blocks(
        laid.program, {at: layouts[leaf].axes_of(0) for at, leaf in blocks.items() if layouts[leaf].by_rows}
    )

    def read(state: Sequence[Any], batch: Sequence[Any]) -> tuple[list[Any], Any]:
        if tables is None:
            return run([*state], [*batch]), None
        pulled = tables.pull(state, batch)
        given = [state[at] if at in laid.given else None for at in range(len(state))]
        return run(given, [*batch], pulled.rows), pulled.out_of_range

    found = batch_dims_of_results(flat, {1: dims})
    along = [along_batch(mesh, plan.batch_axes, spec.shape, dim) for spec, dim in zip(specs, found, strict=True)]
    whole = None if tables is None else NamedSharding(mesh, PartitionSpec())
    return ReadingState(read, (along, whole), laid.names)
