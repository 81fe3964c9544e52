"""A jaxpr written out: jitted functions and rematerialized ones in place, variables that no two loops share."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jax.extend.core import Literal as Constant
from jax.extend.core.primitives import closed_call_p, jit_p, remat_p, scan_p
from jax.lax import optimization_barrier, optimization_barrier_p

from braidax.program.bodies import aval_of, bodies, has_references
from braidax.program.cutting.part import spec_of_aval
from braidax.program.inline import is_specified

BARRIER = optimization_barrier_p
"""Its results are its operands."""


def written_out(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Returns a jaxpr of the same values whose calls, also within loops, stand where they are made.

    Those that say how their arguments lie stay, and so does what is in a `while` or a `cond`. What is computed again is
    held back by a barrier, as JAX does it.
    """
    return _copied(closed.jaxpr, closed.consts)


def written(fn: Callable[..., Any], operands: Sequence[Any], results: Sequence[Var]) -> list[JaxprEqn]:
    """Returns the equations of a function of operands that give results."""
    jaxpr = jax.make_jaxpr(fn)(*(spec_of_aval(aval_of(one)) for one in operands)).jaxpr
    names: dict[Any, Any] = dict(zip(jaxpr.invars, operands, strict=True))
    names.update(zip(jaxpr.outvars, results, strict=True))
    found: list[JaxprEqn] = []
    for one in jaxpr.eqns:
        names.update({var: Var(aval_of(var)) for var in one.outvars if var not in names})
        inputs = [atom if isinstance(atom, Constant) else names[atom] for atom in one.invars]
        found.append(one.replace(invars=inputs, outvars=[names[var] for var in one.outvars]))
    return found


def is_loop(equation: JaxprEqn) -> bool:
    """Whether an equation is a scan whose body may be taken apart."""
    return equation.primitive is scan_p and not equation.effects and not has_references(equation)


def with_bodies(jaxpr: Jaxpr, change: Callable[[Jaxpr], Jaxpr]) -> list[JaxprEqn]:
    """Returns the equations of a jaxpr, those of loops with changed bodies."""
    found: list[JaxprEqn] = []
    for equation in jaxpr.eqns:
        if is_loop(equation):
            closed = equation.params["jaxpr"]
            body = ClosedJaxpr(change(closed.jaxpr), closed.consts)
            equation = equation.replace(params={**equation.params, "jaxpr": body})
        found.append(equation)
    return found


def _copied(jaxpr: Jaxpr, consts: Sequence[Any]) -> ClosedJaxpr:
    writing = _Writing()
    inputs = [Var(aval_of(one)) for one in jaxpr.invars]
    held = [Var(aval_of(one)) for one in jaxpr.constvars]
    outputs = writing.write(jaxpr, [*held, *inputs])
    writing.consts = dict(zip(held, consts, strict=True)) | writing.consts
    made = jaxpr.replace(
        constvars=[*writing.consts], invars=inputs, outvars=outputs, eqns=writing.equations,
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )  # fmt: skip
    return ClosedJaxpr(made, [*writing.consts.values()])


class _Writing:
    """The equations and constants of a jaxpr that is being written."""

    def __init__(self) -> None:
        self.consts: dict[Var, Any] = {}
        self.equations: list[JaxprEqn] = []

    def write(self, jaxpr: Jaxpr, operands: Sequence[Any]) -> list[Any]:
        """Writes a jaxpr. **Arguments:** `operands`: in place of its constants and inputs. **Returns:** its outputs."""
        names: dict[Var, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], operands, strict=True))

        def read(atom: Any) -> Any:
            return atom if isinstance(atom, Constant) else names[atom]

        for equation in jaxpr.eqns:
            inputs = [read(atom) for atom in equation.invars]
            if _is_opened(equation):
                names.update(zip(equation.outvars, self._open(equation, inputs), strict=True))
                continue
            outputs = [Var(aval_of(one)) for one in equation.outvars]
            names.update(zip(equation.outvars, outputs, strict=True))
            params = equation.params
            if is_loop(equation):
                params = {**params, "jaxpr": _copied(params["jaxpr"].jaxpr, params["jaxpr"].consts)}
            self.equations.append(equation.replace(invars=inputs, outvars=outputs, params=params))
        return [read(atom) for atom in jaxpr.outvars]

    def _open(self, equation: JaxprEqn, inputs: list[Any]) -> list[Any]:
        (body,) = bodies(equation)
        held = [Var(aval_of(one)) for one in body.jaxpr.constvars]
        self.consts.update(zip(held, body.consts, strict=True))
        if equation.primitive is remat_p and equation.params["differentiated"]:
            inputs = self._held_back(inputs, equation.params["prevent_cse"])
        return self.write(body.jaxpr, [*held, *inputs])

    def _held_back(self, inputs: list[Any], guards: Any) -> list[Any]:
        every = guards if isinstance(guards, tuple) else (guards,) * len(inputs)
        chosen = [at for at, one in enumerate(inputs) if every[at] and not isinstance(one, Constant)]
        if not chosen:
            return inputs
        operands = [inputs[at] for at in chosen]
        specs = [spec_of_aval(aval_of(one)) for one in operands]
        (barrier,) = jax.make_jaxpr(optimization_barrier)(specs).jaxpr.eqns
        results = [Var(aval_of(one)) for one in operands]
        self.equations.append(barrier.replace(invars=operands, outvars=results))
        found = list(inputs)
        for at, one in zip(chosen, results, strict=True):
            found[at] = one
        return found


def _is_opened(equation: JaxprEqn) -> bool:
    if equation.primitive is jit_p:
        return not is_specified(equation) and not has_references(equation)
    return equation.primitive in (closed_call_p, remat_p) and not has_references(equation)
