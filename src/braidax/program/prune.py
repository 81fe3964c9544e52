"""Dead code: a program without what its wanted outputs do not need."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.extend.core.primitives import custom_jvp_call_p, custom_vjp_call_p
from jax.interpreters.partial_eval import dce_jaxpr

from .bodies import equations_of, has_references
from .rewrite import evaluate
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


def inputs_of(closed: ClosedJaxpr, output: int) -> set[int]:
    """Returns the inputs that an output depends on."""
    wanted = [at == output for at in range(len(closed.jaxpr.outvars))]
    _, kept = prune(closed, wanted, [True] * len(closed.jaxpr.invars))
    return {at for at, one in enumerate(kept) if one}


def without_prints(closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    """Evaluates a jaxpr but for equations that give nothing and have effects: prints, and callbacks without a result.

    It is for values, and not to be differentiated: `custom_jvp` and `custom_vjp` are entered where they hold some.
    """

    def replace(equation: JaxprEqn, inputs: list[Any]) -> list[Any]:
        return without_prints(equation.params["call_jaxpr"], inputs) if equation.outvars else []

    custom = (custom_jvp_call_p, custom_vjp_call_p)
    gone = (
        path
        for path, one in equations_of(closed.jaxpr)
        if one.effects and not has_references(one) and (not one.outvars or one.primitive in custom)
    )
    return evaluate(closed, dict.fromkeys(gone, replace), args)[0]
