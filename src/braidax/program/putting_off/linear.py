"""Which operations sum over the samples, and which carry parts of a sum on."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import JaxprEqn
from jax.extend.core import primitives as p

from braidax.program.bodies import aval_of

Dim = int | None

_JOINTLY = frozenset(
    {
        p.add_p, p.add_jaxvals_p, p.sub_p, p.neg_p, p.convert_element_type_p, p.copy_p, p.name_p, p.broadcast_in_dim_p,
        p.reshape_p, p.transpose_p, p.squeeze_p, p.rev_p, p.slice_p, p.pad_p, p.concatenate_p, p.reduce_sum_p,
        p.cumsum_p,
    }
)  # fmt: skip
_JOINTLY_BY_NAME = frozenset({"split", "stack", "unstack"})
"""Linear in all operands at once."""

_IN_SOME: Mapping[Any, Callable[[int], tuple[int, ...]]] = {
    p.dynamic_slice_p: lambda count: (0,),
    p.dynamic_update_slice_p: lambda count: (0, 1),
    p.select_n_p: lambda count: (*range(1, count),),
    p.div_p: lambda count: (0,),
    p.gather_p: lambda count: (0,),
    p.scatter_add_p: lambda count: (0, 2),
}
"""Linear in some operands at once, of so many."""

_IN_ONE = frozenset({p.mul_p, p.dot_general_p})
"""Linear in one operand or the other."""


def linear_in(equation: JaxprEqn, in_parts: Sequence[bool]) -> tuple[int, ...]:
    """Returns in which operands an equation is linear at once, if these hold all that are sums; else nothing.

    **Arguments:** `in_parts`: of each operand, whether it is a sum over samples.
    """
    sums, count = [at for at, one in enumerate(in_parts) if one], len(equation.invars)
    if not all(jnp.issubdtype(aval_of(one).dtype, jnp.floating) for one in equation.outvars):
        return ()
    found: tuple[int, ...] = ()
    if equation.primitive in _JOINTLY or equation.primitive.name in _JOINTLY_BY_NAME:
        found = (*range(count),)
    elif equation.primitive in _IN_SOME:
        found = _IN_SOME[equation.primitive](count)
    elif equation.primitive in _IN_ONE and len(sums) == 1:
        found = (*sums,)
    return found if sums and {*sums} <= {*found} else ()


def summed_along(equation: JaxprEqn, dims: Sequence[Dim], num_parts: int) -> tuple[Dim, ...]:
    """Returns along which dims the operands of an equation can be divided so that its result is the sum of parts.

    **Arguments:** `dims`: of the operands, which goes along the samples. **Returns:** nothing where it is no such sum.
    """
    rule = _RULES.get(equation.primitive)
    found = () if rule is None else rule(equation, dims)
    shapes = [aval_of(one).shape for one in equation.invars]
    divides = found and all(
        one is None or shape[one] % num_parts == 0 for one, shape in zip(found, shapes, strict=True)
    )
    return found if divides and jnp.issubdtype(aval_of(equation.outvars[0]).dtype, jnp.floating) else ()


def _reduce(equation: JaxprEqn, dims: Sequence[Dim]) -> tuple[Dim, ...]:
    return (dims[0],) if dims[0] in [int(axis) for axis in equation.params["axes"]] else ()


def _dot(equation: JaxprEqn, dims: Sequence[Dim]) -> tuple[Dim, ...]:
    contracted, _ = equation.params["dimension_numbers"]
    return next((pair for pair in zip(*contracted, strict=True) if _meets(pair, dims)), ())


def _conv(equation: JaxprEqn, dims: Sequence[Dim]) -> tuple[Dim, ...]:
    params, numbers = equation.params, equation.params["dimension_numbers"]
    if params["feature_group_count"] > 1 or params["batch_group_count"] > 1:
        return ()
    pair = (numbers.lhs_spec[1], numbers.rhs_spec[1])
    return pair if _meets(pair, dims) else ()


def _scatter(equation: JaxprEqn, dims: Sequence[Dim]) -> tuple[Dim, ...]:
    numbers, ids, updates = equation.params["dimension_numbers"], *map(aval_of, equation.invars[1:])
    if dims[1] is None or dims[1] >= ids.ndim - 1 or dims[1] in numbers.scatter_indices_batching_dims:
        return ()
    others = [dim for dim in range(updates.ndim) if dim not in numbers.update_window_dims]
    return (None, dims[1], others[dims[1]])


def _meets(pair: Sequence[int], dims: Sequence[Dim]) -> bool:
    return any(dim == one for dim, one in zip(dims, pair, strict=True))


_RULES: Mapping[Any, Callable[[JaxprEqn, Sequence[Dim]], tuple[Dim, ...]]] = {
    p.reduce_sum_p: _reduce,
    p.dot_general_p: _dot,
    p.conv_general_dilated_p: _conv,
    p.scatter_add_p: _scatter,
}
