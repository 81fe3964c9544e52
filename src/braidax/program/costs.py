"""What a program costs: operations and bytes of every equation, as often as its loops run it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Jaxpr, JaxprEqn, Var, jaxprs_in_params, primitives
from jax.extend.core.primitives import cond_p, conv_general_dilated_p, dot_general_p, scan_p

from .bodies import aval_of, bodies
from .kinds import ARGUMENTS, ARITHMETIC, REDUCTIONS, TRANSCENDENTAL


@dataclass(frozen=True)
class Cost:
    """Work of an equation or of a program.

    `flops` are additions and multiplications, `transcendentals` calls of such functions, and the bytes are those that
    are read and written when every equation reads its operands and writes its results: what fusion saves is not seen.
    """

    flops: float = 0.0
    transcendentals: float = 0.0
    read_bytes: float = 0.0
    written_bytes: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        """Both, one after the other."""
        return Cost(
            self.flops + other.flops,
            self.transcendentals + other.transcendentals,
            self.read_bytes + other.read_bytes,
            self.written_bytes + other.written_bytes,
        )

    def __mul__(self, times: float) -> "Cost":
        """The same several times."""
        return Cost(
            self.flops * times, self.transcendentals * times, self.read_bytes * times, self.written_bytes * times
        )


_OTHER_FORMS = frozenset(
    {
        primitives.broadcast_in_dim_p, primitives.convert_element_type_p, primitives.reshape_p, primitives.slice_p,
        primitives.squeeze_p, primitives.transpose_p,
    }
)  # fmt: skip


def cost_of(what: Jaxpr | JaxprEqn) -> Cost:
    """Counts the work of a jaxpr (`program.closed.jaxpr`), or of one equation with all that it holds.

    A scan counts as often as it runs, a while (whose number of steps is unknown) once, and of a cond the branch with
    most operations.

    **Arguments:** `what`: with shapes; values are not looked at.

    **Returns:** the `Cost`. Equations that no rule covers count as bytes only.
    """
    if not isinstance(what, JaxprEqn):
        return sum((cost_of(equation) for equation in what.eqns), Cost())
    inner = [(body.jaxpr, 1 if body.length is None else body.length) for body in bodies(what)]
    if not inner and what.primitive not in _FLOPS:  # what combines two elements of a scatter is no body
        inner = [(jaxpr, 1) for jaxpr in jaxprs_in_params(what.params)]
    if inner:
        costs = [cost_of(jaxpr) * times for jaxpr, times in inner]
        if what.primitive is cond_p:
            return max(costs, key=lambda cost: (cost.flops, cost.read_bytes))
        return sum(costs, Cost())
    read, written = _bytes(what)
    if what.primitive in TRANSCENDENTAL:
        return Cost(0.0, float(aval_of(what.outvars[0]).size), read, written)
    rule = _FLOPS.get(what.primitive)
    return Cost(float(rule(what)) if rule else 0.0, 0.0, read, written)


def cost_behind(jaxpr: Jaxpr, leaves: Sequence[Var]) -> Cost:
    """Returns the work of what reads anything that was made of trained leaves: gradients go back through all of it."""
    own, made, cost = {*leaves}, set[Var](), Cost()
    for equation in jaxpr.eqns:
        inputs = {atom for atom in equation.invars if isinstance(atom, Var)}
        if inputs & made:
            cost += cost_of(equation)
        elif inputs <= own and equation.primitive in _OTHER_FORMS:
            own.update(equation.outvars)
            continue
        elif equation.primitive is scan_p and inputs & own:  # its first step has nothing before it
            length = equation.params["length"]
            cost += cost_of(equation) * ((length - 1) / length)
        if inputs & (made | own):
            made.update(equation.outvars)
    return cost


def _bytes(equation: JaxprEqn) -> tuple[float, float]:
    """What is read and written: all operands and results, but of a table only the part that is touched."""
    sizes = [bytes_of(aval_of(atom)) for atom in equation.invars]
    written = sum(bytes_of(aval_of(variable)) for variable in equation.outvars)
    if equation.primitive in _FREE:
        return 0.0, 0.0
    if equation.primitive in _PARTS:
        return written + sum(sizes[1:]), written
    if equation.primitive is primitives.dynamic_update_slice_p:
        return sum(sizes[1:]), sizes[1]
    if equation.primitive in _SCATTERS:
        combines = equation.primitive is not primitives.scatter_p
        return sum(sizes[1:]) + (sizes[2] if combines else 0.0), sizes[2]
    return sum(sizes), written


def bytes_of(value: Any) -> int:
    """Returns the bytes of what has a shape and dtype, keys as their numbers; none of what is no array."""
    if not isinstance(value, ShapedArray | jax.ShapeDtypeStruct):
        return 0
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(value.shape, value.dtype))
    return prod(value.shape) * np.dtype(value.dtype).itemsize


def _of_result(equation: JaxprEqn) -> int:
    return aval_of(equation.outvars[0]).size


def _of_operand(equation: JaxprEqn) -> int:
    return aval_of(equation.invars[0]).size


def _of_updates(equation: JaxprEqn) -> int:
    return aval_of(equation.invars[2]).size


def _of_window(equation: JaxprEqn) -> int:
    return aval_of(equation.outvars[0]).size * prod(equation.params["window_dimensions"])


def _of_operand_window(equation: JaxprEqn) -> int:
    return aval_of(equation.invars[0]).size * prod(equation.params["window_dimensions"])


def _of_sort(equation: JaxprEqn) -> float:
    operand = aval_of(equation.invars[0])
    return operand.size * float(np.log2(max(operand.shape[equation.params["dimension"]], 2)))


def _of_dot(equation: JaxprEqn) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    return 2 * aval_of(equation.outvars[0]).size * prod(aval_of(equation.invars[0]).shape[dim] for dim in contracted)


def _of_conv(equation: JaxprEqn) -> int:
    """Multiplications with padding, or with the holes of a dilated operand, are not done."""
    params, numbers = equation.params, equation.params["dimension_numbers"]
    image, kernel, out = (aval_of(v).shape for v in (*equation.invars[:2], equation.outvars[0]))
    touched = 1
    for at in range(len(params["window_strides"])):
        size, taps, results = (
            shape[spec[at + 2]]
            for shape, spec in (
                (image, numbers.lhs_spec), (kernel, numbers.rhs_spec), (out, numbers.out_spec)
            )
        )  # fmt: skip
        starts = np.arange(results)[:, None] * params["window_strides"][at] - params["padding"][at][0]
        places = starts + np.arange(taps)[None] * params["rhs_dilation"][at]
        hole = params["lhs_dilation"][at]
        touched *= int(((places >= 0) & (places % hole == 0) & (places < size * hole)).sum())
    features = kernel[numbers.rhs_spec[0]] * kernel[numbers.rhs_spec[1]]
    return 2 * touched * features * image[numbers.lhs_spec[0]] // params["batch_group_count"]


_FREE = frozenset({primitives.reshape_p, primitives.squeeze_p, primitives.iota_p, primitives.name_p})
_PARTS = frozenset({primitives.gather_p, primitives.slice_p, primitives.dynamic_slice_p})
_SCATTERS = frozenset(
    {
        primitives.scatter_p, primitives.scatter_add_p, primitives.scatter_mul_p, primitives.scatter_max_p,
        primitives.scatter_min_p,
    }
)  # fmt: skip
_FLOPS: dict[Any, Callable[[JaxprEqn], int | float]] = {
    **dict.fromkeys(ARITHMETIC, _of_result),
    **dict.fromkeys(_SCATTERS, _of_updates),
    primitives.scatter_p: lambda _: 0,
    primitives.reduce_p: _of_operand,
    **dict.fromkeys(
        [
            *REDUCTIONS, *ARGUMENTS,
            primitives.cumsum_p, primitives.cummax_p, primitives.cummin_p, primitives.cumprod_p, primitives.top_k_p,
        ],
        _of_operand,
    ),
    **dict.fromkeys(
        [primitives.reduce_window_sum_p, primitives.reduce_window_max_p, primitives.reduce_window_min_p], _of_window
    ),
    **dict.fromkeys(
        [primitives.select_and_scatter_add_p, primitives.select_and_gather_add_p], _of_operand_window
    ),
    primitives.sort_p: _of_sort,
    dot_general_p: _of_dot,
    conv_general_dilated_p: _of_conv,
}  # fmt: skip
