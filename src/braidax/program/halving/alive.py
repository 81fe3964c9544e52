"""What some values of a program are computed from, also within its loops."""

from collections.abc import Collection, Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Var

from braidax.program.cutting.part import variables

from .loop_parts import LoopParts
from .opened import BARRIER, is_loop


def alive(
    jaxpr: Jaxpr,
    outputs: Sequence[Any],
    *,
    also: Collection[Var] = frozenset(),
    stops: Collection[Var] = frozenset(),
    effects: Collection[int] = (),
) -> set[Var]:
    """Returns the variables, also of loops, that some outputs are computed from.

    **Arguments:** `also`: others that are wanted, in whatever loop. `stops`: what is given. `effects`: the ids of
    equations that stay in any case.
    """
    found = {*also}

    def visit(jaxpr: Jaxpr, wanted: set[Var]) -> None:
        found.update(wanted)
        for equation in reversed(jaxpr.eqns):
            wants = [one in found and one not in stops for one in equation.outvars]
            if is_loop(equation):
                if any(wants) or (also and _holds(equation, also)):
                    loop(LoopParts.of(equation), wants)
            elif equation.primitive is BARRIER:
                found.update(variables(atom for atom, want in zip(equation.invars, wants, strict=True) if want))
            elif any(wants) or id(equation) in effects:
                found.update(variables(equation.invars))

    def loop(parts: LoopParts, wants: Sequence[bool]) -> None:
        found.update(own.inner for own, want in zip(parts.carries, wants, strict=False) if want)
        stacks = [
            one
            for one, want in zip(parts.body.outvars[len(parts.carries) :], wants[len(parts.carries) :], strict=True)
            if want
        ]
        size = -1
        while size != len(found):
            size = len(found)
            carried = [one.result for one in parts.carries if one.inner in found and one.inner not in stops]
            visit(parts.body, variables([*stacks, *carried]))
        taken = (*parts.consts, *parts.carries, *parts.slices)
        found.update(variables(one.outer for one in taken if one.inner in found and one.inner not in stops))

    visit(jaxpr, variables(outputs))
    return found


def made_of(jaxpr: Jaxpr, inputs: Collection[Var]) -> set[Var]:
    """Returns the variables, not those within loops, that are computed from some inputs."""
    found = {*inputs}
    for equation in jaxpr.eqns:
        if variables(equation.invars) & found:
            found.update(equation.outvars)
    return found


def _holds(equation: JaxprEqn, some: Collection[Var]) -> bool:
    """Whether the body of a loop has any of these variables, at any depth."""
    body: Jaxpr = equation.params["jaxpr"].jaxpr
    if any(one in some for one in body.invars):
        return True
    return any(any(out in some for out in one.outvars) or (is_loop(one) and _holds(one, some)) for one in body.eqns)
