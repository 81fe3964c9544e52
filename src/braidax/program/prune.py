"""Dead code: a program without what its wanted outputs do not need."""

from collections.abc import Sequence

import jax
from jax.extend.core import ClosedJaxpr
from jax.interpreters.partial_eval import dce_jaxpr

from .trace import Program


def prune(
    closed: ClosedJaxpr, outputs: Sequence[bool], droppable: Sequence[bool]
) -> tuple[ClosedJaxpr, tuple[bool, ...]]:
    """Removes the equations that no wanted output needs, at any depth, and inputs that nothing reads any more.

    **Arguments:** `outputs`: which outputs are wanted. `droppable`: which inputs may go.

    **Returns:** the smaller jaxpr, and which inputs it has kept. Equations with effects stay.
    """
    jaxpr, kept = dce_jaxpr(closed.jaxpr, list(outputs), [not may for may in droppable])
    return ClosedJaxpr(jaxpr, closed.consts), tuple(kept)


def reads_argument(program: Program, argument: int) -> bool:
    """Whether any output of a program depends on one of its arguments."""
    before = len(jax.tree.leaves(program.in_specs[:argument]))
    count = len(jax.tree.leaves(program.in_specs[argument]))
    jaxpr = program.closed.jaxpr
    _, kept = prune(program.closed, [True] * len(jaxpr.outvars), [True] * len(jaxpr.invars))
    return any(kept[before : before + count])
