"""Values that several operations read, computed once.

XLA for CPUs computes a cheap value again in each of its readers, and all that it is made of as well: in a chain of
layers that add to one another the last one added up all, three times; and what is brought in another order for a
product, and handed on, it brings there twice. It does so only where a reader need not read
more than one large operand for that. So values are multiplied by a product of two vectors, which is one: the compiler
of the loop knows that, the one that decides what is computed where does not.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jax.extend.core import Literal as Constant

from braidax.program.bodies import aval_of

from .opened import written

_LARGE_BYTES = 64 << 10
_CHEAP = frozenset({"add", "add_any", "sub", "mul", "max", "min", "neg", "square", "integer_pow", "transpose"})
_WIDENED = "broadcast_in_dim"


def held(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Returns a program of the same values, bit by bit, in which large values with several readers are computed once.

    Values within loops are left alone. The vectors are made of the first input with enough numbers of 32 bits:
    parameters come first, and what is given up should not have to be there until the end. Without such an input
    nothing is changed.
    """
    jaxpr = closed.jaxpr
    counts, made = _readers(jaxpr), {one: equation for equation in jaxpr.eqns for one in equation.outvars}
    repeated = {id(one): max(aval_of(one.outvars[0]).shape) for one in jaxpr.eqns if _is_repeated(one, counts, made)}
    least = max(repeated.values(), default=0)
    source = next((one for one in jaxpr.invars if _is_source(one) and aval_of(one).size >= least), None)
    if source is None or not repeated:
        return closed
    equations: list[JaxprEqn] = []
    for equation in jaxpr.eqns:
        if id(equation) not in repeated:
            equations.append(equation)
            continue
        (result,) = equation.outvars
        value = Var(aval_of(result))
        equations += [equation.replace(outvars=[value]), *written(_times_one, [value, source], [result])]
    return ClosedJaxpr(jaxpr.replace(eqns=equations, debug_info=jaxpr.debug_info.with_unknown_names()), closed.consts)


def _times_one(value: jax.Array, source: jax.Array) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(source.reshape(-1)[: max(value.shape)], jnp.uint32)
    one = jnp.uint32(1)
    ones = ((bits | one) & one).astype(value.dtype)
    first = jax.lax.broadcast_in_dim(ones[: value.shape[0]], value.shape, (0,))
    last = jax.lax.broadcast_in_dim(ones[: value.shape[-1]], value.shape, (value.ndim - 1,))
    return value * (first * last)


def _readers(jaxpr: Jaxpr) -> Callable[[Var], int]:
    """Returns what counts the readers of a variable, of what only has another shape those of that."""
    readers: dict[Any, list[JaxprEqn | None]] = {}
    for equation in jaxpr.eqns:
        for atom in {one for one in equation.invars if not isinstance(one, Constant)}:
            readers.setdefault(atom, []).append(equation)
    for atom in jaxpr.outvars:
        readers.setdefault(atom, []).append(None)

    def count(one: Var) -> int:
        found = readers.get(one, [])
        return sum(
            1 if reader is None or reader.primitive.name != "reshape" else count(reader.outvars[0]) for reader in found
        )

    return count


def _is_repeated(equation: JaxprEqn, readers: Callable[[Var], int], made: Mapping[Any, JaxprEqn]) -> bool:
    """Whether the result of an equation is computed again in each reader."""
    if equation.primitive.name not in _CHEAP or not _is_large(equation.outvars[0]):
        return False
    large = {atom for atom in equation.invars if not isinstance(atom, Constant) and _is_read(atom, made)}
    return len(large) < 2 and readers(equation.outvars[0]) > 1


def _is_read(atom: Any, made: Mapping[Any, JaxprEqn]) -> bool:
    return _is_large(atom) and (atom not in made or made[atom].primitive.name != _WIDENED)


def _is_large(atom: Any) -> bool:
    aval = aval_of(atom)
    is_number = jnp.issubdtype(aval.dtype, jnp.floating)
    return is_number and len(aval.shape) > 1 and aval.size * aval.dtype.itemsize >= _LARGE_BYTES


def _is_source(one: Any) -> bool:
    dtype = aval_of(one).dtype
    return dtype in (jnp.float32, jnp.int32, jnp.uint32)
