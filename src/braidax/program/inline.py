"""A program without the borders of jitted functions, so that what belongs together stands in one jaxpr."""

from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.extend.core.primitives import jit_p

from .bodies import Path, equations_of
from .lines import comes_from_library
from .rewrite import evaluate
from .trace import Program, trace


def inlined(program: Program) -> Program:
    """Returns a program whose jitted functions, at any depth, are written out where they are called.

    Those that say how their arguments lie stay as they are.
    """
    if not _calls(program.closed):
        return program

    def run(*args: Any) -> Any:
        outputs = _written_out(program.closed, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(program.out_specs), outputs)

    return trace(run, *program.in_specs)


def _calls(closed: ClosedJaxpr) -> list[Path]:
    """Returns the paths of calls that are in no other one."""
    found: list[Path] = []
    for path, equation in equations_of(closed.jaxpr):
        within = any(path[: len(outer)] == outer for outer in found)
        if equation.primitive is jit_p and not within and not is_specified(equation):
            found.append(path)
    return found


def is_specified(equation: JaxprEqn) -> bool:
    """Whether a jitted function says how its arguments or results lie."""
    told = (*equation.params["in_shardings"], *equation.params["out_shardings"])
    return any(isinstance(one, jax.sharding.Sharding) for one in told)


def _written_out(closed: ClosedJaxpr, inputs: Any) -> list[Any]:
    rules = {path: lambda equation, inputs: _written_out(_with_line(equation), inputs) for path in _calls(closed)}
    return evaluate(closed, rules, inputs)[0]


def _with_line(call: JaxprEqn) -> ClosedJaxpr:
    """Returns what a call computes; what a library's function consists of has the line of the call."""
    closed: ClosedJaxpr = call.params["jaxpr"]
    if not comes_from_library(closed.jaxpr):
        return closed
    line = call.source_info.traceback
    equations = [one.replace(source_info=one.source_info.replace(traceback=line)) for one in closed.jaxpr.eqns]
    return ClosedJaxpr(closed.jaxpr.replace(eqns=equations), closed.consts)
