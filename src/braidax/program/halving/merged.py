"""Loops that only make what another loop goes over: each of their steps is computed in the step that reads it."""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.extend.core import Literal as Constant

from braidax.program.cutting.part import variables

from .loop_parts import LoopParts, with_parts
from .opened import is_loop, with_bodies


def loops_merged(jaxpr: Jaxpr) -> Jaxpr:
    """Returns a jaxpr of the same values without loops whose steps are independent and that one other loop reads.

    Nothing is computed twice, and what they would stack is never stored. Bodies of loops are entered.

    **Arguments:** `jaxpr`: written out, so that no two loops share variables.
    """
    equations = with_bodies(jaxpr, loops_merged)
    at = 0
    while at < len(equations):
        reader = _only_reader(equations, at, jaxpr.outvars)
        if reader is None:
            at += 1
            continue
        equations[reader] = _merged(LoopParts.of(equations[at]), LoopParts.of(equations[reader]))
        del equations[at]
    return jaxpr.replace(eqns=equations)


def _only_reader(equations: Sequence[JaxprEqn], at: int, outputs: Sequence[Any]) -> int | None:
    """Returns which loop goes over all that a loop makes, step by step; None if that is read otherwise."""
    loop = equations[at]
    if not is_loop(loop) or loop.params["num_carry"] or loop.params["jaxpr"].consts:
        return None
    made = {*loop.outvars}
    readers = [number for number, one in enumerate(equations) if variables(one.invars) & made]
    if len(readers) != 1 or variables(outputs) & made:
        return None
    (reader,) = readers
    if not is_loop(equations[reader]) or equations[reader].params["jaxpr"].consts:
        return None
    parts = LoopParts.of(equations[reader])
    otherwise = variables(one.outer for one in (*parts.consts, *parts.carries))
    return None if otherwise & made or parts.length != loop.params["length"] else reader


def _merged(makes: LoopParts, reads: LoopParts) -> JaxprEqn:
    """Returns the loop that computes what it goes over."""
    made = dict(zip(makes.equation.outvars, makes.body.outvars, strict=True))
    here: dict[Var, Any] = {
        one.inner: made[one.outer] for one in reads.slices if not isinstance(one.outer, Constant) and one.outer in made
    }

    def named(atom: Any) -> Any:
        return atom if isinstance(atom, Constant) else here.get(atom, atom)

    own = [one.replace(invars=[named(atom) for atom in one.invars]) for one in reads.body.eqns]
    count = len(reads.carries)
    pairs = zip(reads.equation.outvars[count:], reads.body.outvars[count:], strict=True)
    stacks = [(outer, named(one)) for outer, one in pairs]
    operands = (
        [*reads.consts, *makes.consts],
        [one._replace(result=named(one.result)) for one in reads.carries],
        [*(one for one in reads.slices if one.inner not in here), *makes.slices],
    )
    return with_parts(reads, operands, stacks, [*makes.body.eqns, *own])
