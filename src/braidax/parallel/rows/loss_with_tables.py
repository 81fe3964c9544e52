"""A traced loss that exchanges the rows of its tables itself, on the way there and back, so that it can be cut."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from braidax.parallel.plan.plan import Plan, PlannedVariable
from braidax.program import Program, automatic, trace

from .block_tables import BlockTables


def loss_with_tables(
    program: Program,
    variables: Mapping[int, PlannedVariable],
    divided: Mapping[int, Sequence[int | None] | int],
    mesh: Mesh,
    plan: Plan,
) -> Program:
    """Returns a program of the same arguments, with tables whose consecutive rows lie on their devices.

    Its derivative sends the gradients of rows to the devices that have these.

    **Arguments:** `program`: the parameters are its first argument. `variables`: as they are planned, by the number of
    their leaf in that: those by rows, whose number of rows their devices divide, and that are read by ids which are
    known before. `divided`: as of `find_batch_dims`, of the other arguments.
    """
    params, *others = program.in_specs
    specs, dims = jax.tree.leaves(params), list[int | None]()
    for number, one in enumerate(others, 1):
        count, along = len(jax.tree.leaves(one)), divided.get(number)
        dims += [along] * count if along is None or isinstance(along, int) else along
    in_lists = Program(program.closed, (specs, jax.tree.leaves(others)), program.out_specs)
    tables = BlockTables(in_lists, variables, dims, mesh, plan, "as jax")

    def pull(stored: Sequence[Any], given: Sequence[Any]) -> tuple[Any, Any]:
        weights = [jnp.zeros(spec.shape, spec.dtype) for spec in specs]  # no ids depend on those that are no tables
        for at, one in zip(tables.leaves, stored, strict=True):
            weights[at] = one
        pulled = tables.pull(weights, given)
        return pulled.rows, pulled.routes

    @jax.custom_vjp
    def looked_up(stored: Sequence[Any], given: Sequence[Any]) -> Any:
        return pull(stored, given)[0]

    def back(routes: Any, of_rows: Any) -> tuple[Any, None]:
        found = tables.gradients(routes, of_rows)
        return [found[at] for at in tables.leaves], None

    looked_up.defvjp(pull, back)

    def run(params: Any, *others: Any) -> Any:
        weights, given = jax.tree.leaves(params), jax.tree.leaves(others)
        stored = [weights[at] for at in tables.leaves]
        rows = looked_up(stored, jax.lax.stop_gradient(given))
        return tables.program([None if at in tables.leaves else one for at, one in enumerate(weights)], given, rows)

    return trace(run, *program.in_specs, mesh=automatic(mesh))
