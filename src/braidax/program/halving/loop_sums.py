"""Sums to which the stacked results of a loop are added: the loop adds each to its place, and stacks nothing.

A stage's gradients of scanned layers are such stacks. Added behind the loop they need a second buffer of all of them,
which is filled with zeros, written, read and given up in every microbatch.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var, jaxpr_as_fun
from jax.extend.core import Literal as Constant
from jax.extend.core.primitives import add_p, convert_element_type_p
from jax.sharding import AbstractMesh

from braidax.program.bodies import aval_of
from braidax.program.cutting.part import closed_part
from braidax.program.trace import trace

from .loop_parts import LoopParts
from .opened import is_loop, written


class _Sum(NamedTuple):
    """What a loop is to add: which of its results, behind which casts, to which input, and what is then the sum."""

    stack: Var
    casts: tuple[Var, ...]
    given: Var
    total: Var


def adding_in_loops(fn: Callable[..., Any], *, mesh: AbstractMesh) -> Callable[..., Any]:
    """Returns a function of the same values whose loops add what they make to sums that it is given.

    **Arguments:** `fn`: a pure function of PyTrees of arrays, to be jitted. `mesh`: as of `trace`.
    """

    def run(*args: Any) -> Any:
        program = trace(fn, *args, mesh=mesh)
        outputs = jaxpr_as_fun(sums_in_loops(program.closed))(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(program.out_specs), outputs)

    return run


def sums_in_loops(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Returns a jaxpr of the same values in which stacks that are only added to inputs are added in their loops."""
    jaxpr = closed.jaxpr
    found = _sums(jaxpr)
    gone = {var for own in found.values() for one in own for var in (*one.casts, one.total)}
    equations = [
        _adding(equation, found[at]) if at in found else equation
        for at, equation in enumerate(jaxpr.eqns)
        if not any(one in gone for one in equation.outvars)
    ]
    return ClosedJaxpr(jaxpr.replace(eqns=equations), closed.consts)


def _sums(jaxpr: Jaxpr) -> dict[int, list[_Sum]]:
    """Returns what each loop is to add, by its place among the equations."""
    readers = Counter(atom for one in jaxpr.eqns for atom in one.invars if not isinstance(atom, Constant))
    readers.update(atom for atom in jaxpr.outvars if not isinstance(atom, Constant))
    made = {one: at for at, equation in enumerate(jaxpr.eqns) for one in equation.outvars}
    inputs, found = {*jaxpr.invars}, dict[int, list[_Sum]]()
    for equation in jaxpr.eqns:
        if equation.primitive is not add_p:
            continue
        for given, term in (equation.invars, equation.invars[::-1]):
            if isinstance(given, Constant) or given not in inputs or readers[given] != 1:
                continue
            chain = _stacked(term, made, jaxpr.eqns, readers)
            if chain and aval_of(chain[-1]).shape == aval_of(given).shape:
                *casts, stack = chain
                found.setdefault(made[stack], []).append(_Sum(stack, tuple(casts), given, equation.outvars[0]))
                break
    return found


def _stacked(term: Any, made: Mapping[Var, int], equations: Sequence[JaxprEqn], readers: Counter[Var]) -> list[Var]:
    """Returns a term, what its casts are of, and last the result that a loop stacks; nothing if others read any."""
    chain: list[Var] = []
    while not isinstance(term, Constant) and term in made and readers[term] == 1:
        equation = equations[made[term]]
        chain.append(term)
        if is_loop(equation):
            return chain if equation.outvars.index(term) >= equation.params["num_carry"] else []
        if equation.primitive is not convert_element_type_p:
            return []
        (term,) = equation.invars
    return []


def _adding(equation: JaxprEqn, sums: Sequence[_Sum]) -> JaxprEqn:
    """Returns a loop that adds."""
    parts, closed = LoopParts.of(equation), equation.params["jaxpr"]
    count, length, is_reverse = len(parts.carries), parts.length, equation.params["reverse"]
    step = ShapedArray((), np.dtype(np.int32))
    at, following = Var(step), Var(step)
    equations = list(parts.body.eqns)
    equations += written(lambda one: one + np.int32(-1 if is_reverse else 1), [at], [following])
    held, added = [Var(aval_of(one.given)) for one in sums], [Var(aval_of(one.given)) for one in sums]
    for one, old, new in zip(sums, held, added, strict=True):
        term = parts.body.outvars[equation.outvars.index(one.stack)]
        equations += written(_added_at, [old, at, term], [new])
    gone = {one.stack for one in sums}
    stacks = [at for at in range(count, len(equation.outvars)) if equation.outvars[at] not in gone]
    inputs = [*(one.inner for one in (*parts.consts, *parts.carries)), at, *held, *(one.inner for one in parts.slices)]
    outputs = [*parts.body.outvars[:count], following, *added, *(parts.body.outvars[at] for at in stacks)]
    begin = Constant(np.int32(length - 1 if is_reverse else 0), step)
    outer = [*(one.outer for one in (*parts.consts, *parts.carries)), begin, *(one.given for one in sums)]
    body = closed_part(closed.jaxpr, closed.consts, inputs, outputs, equations)
    return equation.replace(
        invars=[*outer, *(one.outer for one in parts.slices)],
        outvars=[
            *equation.outvars[:count],
            Var(step),
            *(one.total for one in sums),
            *(equation.outvars[at] for at in stacks),
        ],
        params={**equation.params, "jaxpr": body, "num_carry": count + 1 + len(sums)},
    )


def _added_at(total: Any, at: Any, term: Any) -> Any:
    begin = (at, *(np.int32(0),) * (total.ndim - 1))
    old = lax.dynamic_slice(total, begin, (1, *total.shape[1:]), allow_negative_indices=False)
    return lax.dynamic_update_slice(total, old + term.astype(total.dtype)[None], begin, allow_negative_indices=False)
