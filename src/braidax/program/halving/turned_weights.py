"""Weights that products take turned, given to a program turned already: so they are turned once for many runs of it.

The gradient of a layer's input is a product with its weights turned. A compiler turns them in each product, and a
pipeline has one for every microbatch, of the same weights.
"""

from collections.abc import Collection
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jax.extend.core import Literal as Constant
from jax.extend.core.primitives import dot_general_p, transpose_p

from braidax.program.bodies import aval_of, bodies

from .opened import BARRIER, written_out

LARGE_BYTES = 64 << 10
"""What has less is turned within its product: an argument more costs as much."""


class TurnedWeight(NamedTuple):
    """An input with its dims in another order. **Fields:** `number`: of the input. `order`: as of `jnp.transpose`."""

    number: int
    order: tuple[int, ...]


def with_turned_weights(
    closed: ClosedJaxpr, weights: Collection[int], *, before: int
) -> tuple[ClosedJaxpr, tuple[TurnedWeight, ...]]:
    """Returns a program of the same values whose products with large weights take these as they lie.

    Second operands of products without a batch are looked at, outside of loops.

    **Arguments:** `weights`: which inputs, by number. `before`: which input the turned weights are put in front of.

    **Returns:** the program, and what it is given more.
    """
    closed = written_out(closed)
    jaxpr = closed.jaxpr
    lies = {jaxpr.invars[at]: TurnedWeight(at, (*range(aval_of(jaxpr.invars[at]).ndim),)) for at in weights}
    lies = {one: told for one, told in lies.items() if _is_large(one)}
    turned, equations = dict[TurnedWeight, Var](), list[JaxprEqn]()
    for equation in jaxpr.eqns:
        if equation.primitive is BARRIER:
            pairs = zip(equation.outvars, equation.invars, strict=True)
            lies.update((one, lies[atom]) for one, atom in pairs if not isinstance(atom, Constant) and atom in lies)
        elif equation.primitive is transpose_p and (told := _told(lies, equation.invars[0])):
            order = tuple(told.order[dim] for dim in equation.params["permutation"])
            lies[equation.outvars[0]] = TurnedWeight(told.number, order)
        elif _is_plain_product(equation) and (told := _told(lies, equation.invars[1])):
            equation = _of_weight_as_it_lies(equation, told, jaxpr, turned)
        equations.append(equation)
    inputs = [*jaxpr.invars[:before], *turned.values(), *jaxpr.invars[before:]]
    debug_info = jaxpr.debug_info.with_unknown_names()
    made = jaxpr.replace(invars=inputs, eqns=equations, debug_info=debug_info)
    return ClosedJaxpr(made, closed.consts), tuple(turned)


def suits_packing(jaxpr: Jaxpr) -> bool:
    """Whether no product takes a large second operand turned, and all are of 32 bits, at any depth."""
    turned = {one for equation in jaxpr.eqns if equation.primitive is transpose_p for one in equation.outvars}
    for equation in jaxpr.eqns:
        if equation.primitive is dot_general_p and aval_of(equation.invars[1]).dtype != jnp.float32:
            return False
        if _is_plain_product(equation) and _is_large(operand := equation.invars[1]):
            (_, contracted), _ = equation.params["dimension_numbers"]
            if tuple(contracted) != (*range(len(contracted)),) or operand in turned:
                return False
        if not all(suits_packing(body.jaxpr) for body in bodies(equation)):
            return False
    return True


def _told(lies: dict[Var, TurnedWeight], atom: Any) -> TurnedWeight | None:
    return None if isinstance(atom, Constant) else lies.get(atom)


def _is_plain_product(equation: JaxprEqn) -> bool:
    if equation.primitive is not dot_general_p or equation.params["out_sharding"] is not None:
        return False
    return not equation.params["dimension_numbers"][1][0]


def _is_large(atom: Any) -> bool:
    aval = aval_of(atom)
    return aval.size * aval.dtype.itemsize >= LARGE_BYTES


def _of_weight_as_it_lies(
    equation: JaxprEqn, told: TurnedWeight, jaxpr: Jaxpr, turned: dict[TurnedWeight, Var]
) -> JaxprEqn:
    """Returns a product whose second operand has those dims first that are summed over.

    **Arguments:** `told`: which weight that is, and how it is turned. `turned`: inputs for such, to which one is added.
    """
    (contracted, others), batched = equation.params["dimension_numbers"]
    kept = [dim for dim in range(len(told.order)) if dim not in others]
    wanted = TurnedWeight(told.number, tuple(told.order[dim] for dim in (*others, *kept)))
    operand, weight = jaxpr.invars[told.number], aval_of(jaxpr.invars[told.number])
    if wanted.order != (*range(weight.ndim),):
        shape = tuple(weight.shape[dim] for dim in wanted.order)
        operand = turned.setdefault(wanted, Var(ShapedArray(shape, weight.dtype, weight.weak_type)))
    numbers = (tuple(contracted), (*range(len(others)),)), batched
    params = {**equation.params, "dimension_numbers": numbers}
    return equation.replace(invars=[equation.invars[0], operand], params=params)
