"""How rows of the result of a primitive are made of rows of its operands."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn
from jax.extend.random import threefry2x32_p

from .positions import Positions
from .values import Value

_THREEFRY = "threefry2x32"
_COUNTED = tuple(map(np.dtype, ("int32", "uint32", "float32")))  # what XLA counts in without another rounding
_DROPPED = ("FILL_OR_DROP", "PROMISE_IN_BOUNDS")


class NotAloneError(Exception):
    """Rows are not made each by itself; it says why, and does not leave this folder."""


@runtime_checkable
class Rows(Protocol):
    """Computes values, or rows of them."""

    def alone(self, value: Value, at: Positions) -> Any:
        """Returns the rows of a value at some positions."""
        ...

    def whole(self, value: Value) -> Any:
        """Returns a value that does not go by rows."""
        ...


Rule = Callable[[Rows, Value, JaxprEqn, Positions], Any]
"""Returns the rows of a value at some positions. **Raises:** `NotAloneError`."""


def elementwise(rows: Rows, value: Value, equation: JaxprEqn, at: Positions) -> Any:
    """Of a primitive that computes each element of the same element of its operands."""
    if not any(one.shape and one.shape[0] == value.shape[0] > 1 for one in value.operands):
        raise NotAloneError(f"{value.name} of nothing that goes by rows")
    given = [
        rows.alone(one, at) if one.shape and one.shape[0] == value.shape[0] else rows.whole(one)
        for one in value.operands
    ]
    params = {name: _without_sharding(name, param) for name, param in equation.params.items()}
    found = equation.primitive.bind(*given, **equation.primitive.get_bind_params(params))
    return found[value.output] if equation.primitive.multiple_results else found


def _without_sharding(name: str, param: Any) -> Any:
    return None if name == "sharding" else param


def _broadcast(rows: Rows, value: Value, equation: JaxprEqn, at: Positions) -> Any:
    dims, (operand, *_) = tuple(equation.params["broadcast_dimensions"]), value.operands
    count = at.low.shape[0]
    if 0 in dims and operand.shape[dims.index(0)] != 1:
        if dims[0] != 0:
            raise NotAloneError("broadcast_in_dim with rows that are no rows of its operand")
        given = rows.alone(operand, at)
    else:
        given = rows.whole(operand)
    return jax.lax.broadcast_in_dim(given, (count, *value.shape[1:]), dims)


def _reshape(rows: Rows, value: Value, equation: JaxprEqn, at: Positions) -> Any:
    (operand, *_) = value.operands
    if equation.params["dimensions"] is not None or not operand.shape or not math.prod(value.shape):
        raise NotAloneError("reshape of nothing that goes by rows")
    count, num_rows, num_given = at.low.shape[0], value.shape[0], operand.shape[0]
    if num_given % num_rows == 0:  # a row is made of several
        each = num_given // num_rows
        inner = at if each == 1 else at.reshaped(count, 1).times(each).plus(jnp.arange(each, dtype=jnp.uint32))
        inner = inner if each == 1 else inner.reshaped(-1)
        return rows.alone(operand, inner).reshape(count, *value.shape[1:])
    if num_rows % num_given == 0 and num_rows <= 1 << 32:  # or is a part of one
        each = num_rows // num_given
        found = rows.alone(operand, Positions(jnp.uint32(0), at.low // each))
        parts = found.reshape(count, each, math.prod(value.shape[1:]))
        which = (at.low % each).astype(jnp.int32).reshape(count, 1, 1)
        return jnp.take_along_axis(parts, which, axis=1).reshape(count, *value.shape[1:])
    raise NotAloneError(f"reshape of {list(operand.shape)} to {list(value.shape)}")


def _squeeze(rows: Rows, value: Value, equation: JaxprEqn, at: Positions) -> Any:
    (operand,) = value.operands
    if 0 in equation.params["dimensions"]:
        raise NotAloneError("squeeze of rows")
    return jax.lax.squeeze(rows.alone(operand, at), equation.params["dimensions"])


def _transpose(rows: Rows, value: Value, equation: JaxprEqn, at: Positions) -> Any:
    (operand,), order = value.operands, equation.params["permutation"]
    if order[0] != 0:
        raise NotAloneError("transpose of rows and columns")
    return jax.lax.transpose(rows.alone(operand, at), order)


def _slice(rows: Rows, value: Value, equation: JaxprEqn, at: Positions) -> Any:
    (operand,), params = value.operands, equation.params
    starts, strides = params["start_indices"], params["strides"] or [1] * len(operand.shape)
    ends = params["limit_indices"]
    inner = at if strides[0] == 1 else at.times(strides[0])
    inner = inner if starts[0] == 0 else inner.plus(jnp.uint32(starts[0]))
    found = rows.alone(operand, inner)
    return jax.lax.slice(found, (0, *starts[1:]), (found.shape[0], *ends[1:]), (1, *strides[1:]))


def _concatenate(rows: Rows, value: Value, equation: JaxprEqn, at: Positions) -> Any:
    dim = equation.params["dimension"]
    if dim:
        return jax.lax.concatenate([rows.alone(one, at) for one in value.operands], dim)
    _check_32_bits(value)
    found, start = None, 0
    for one in value.operands:
        if one.shape[0]:
            given = _at(rows, one, at.low - jnp.uint32(start))
            found = given if found is None else jnp.where(_column(at.low >= start, given), given, found)
        start += one.shape[0]
    return found


def _pad(rows: Rows, value: Value, equation: JaxprEqn, at: Positions) -> Any:
    (operand, fill), ((low, _, inner), *rest) = value.operands, equation.params["padding_config"]
    if inner or not operand.shape[0]:
        raise NotAloneError("pad between rows")
    _check_32_bits(value)
    local = at.low + jnp.uint32(-low) if low < 0 else at.low - jnp.uint32(low)
    given = jax.lax.pad(_at(rows, operand, local), rows.whole(fill), ((0, 0, 0), *rest))
    inside = (at.low >= max(low, 0)) & (local < operand.shape[0])
    return jnp.where(_column(inside, given), given, rows.whole(fill))


def _iota(rows: Rows, value: Value, equation: JaxprEqn, at: Positions) -> Any:
    params, shape = equation.params, (at.low.shape[0], *value.shape[1:])
    if params["dimension"]:
        one = jax.lax.broadcasted_iota(value.dtype, (1, *value.shape[1:]), params["dimension"])
        return jnp.broadcast_to(one, shape)
    _check_32_bits(value)
    if value.dtype not in _COUNTED:
        raise NotAloneError(f"rows are counted in {value.dtype}")
    return jax.lax.broadcast_in_dim(at.low.astype(value.dtype), shape, (0,))


def _random_bits(rows: Rows, value: Value, equation: JaxprEqn, at: Positions) -> Any:
    """Encrypts the positions of the wanted elements, as JAX encrypts those of all."""
    (key,), width = value.operands, equation.params["bit_width"]
    size = math.prod(value.shape[1:])
    given = rows.whole(key)
    if key.shape or str(jax.random.key_impl(given)) != _THREEFRY:
        raise NotAloneError(f"random bits of {key.dtype}{list(key.shape)}, which are no function of the position")
    if not jax.config.jax_threefry_partitionable:  # pyright: ignore[reportAttributeAccessIssue]
        raise NotAloneError("jax_threefry_partitionable is off, and random bits are no function of the position")
    if size >> 32:
        raise NotAloneError(f"a row has {size} elements")
    first, second = jax.random.key_data(given)
    inner = at.reshaped(-1, 1).times(size).plus(jnp.arange(size, dtype=jnp.uint32))
    inner = inner.reshaped(at.low.shape[0], *value.shape[1:])
    high, low = threefry2x32_p.bind(first, second, inner.high, inner.low)
    if width == 64:
        return (high.astype(value.dtype) << np.array(32, value.dtype)) | low.astype(value.dtype)
    return (high ^ low).astype(value.dtype)


def _scatter(rows: Rows, value: Value, equation: JaxprEqn, at: Positions) -> Any:
    """Writes consecutive whole rows at a place that is known without the table."""
    (operand, where, update), params = value.operands, equation.params
    numbers, width = params["dimension_numbers"], len(operand.shape)
    is_one = not numbers.operand_batching_dims and numbers.scatter_dims_to_operand_dims == (0,) and where.shape == (1,)
    of_rows = numbers.inserted_window_dims == (0,) and numbers.update_window_dims == tuple(range(width - 1))
    of_some = numbers.inserted_window_dims == () and numbers.update_window_dims == tuple(range(width))
    parts = (1, *update.shape) if of_rows else update.shape
    known = params["mode"] is not None and params["mode"].name in _DROPPED and params["update_jaxpr"] is None
    if not is_one or not (of_rows or of_some) or parts[1:] != operand.shape[1:] or not known:
        raise NotAloneError("scatter of anything but consecutive rows to one place")
    _check_32_bits(value)
    place = rows.whole(where)[0]
    fits = (place >= 0) & (place <= operand.shape[0] - parts[0])
    return _written(rows, operand, jnp.reshape(rows.whole(update), parts), place, fits, at)


def _dynamic_update_slice(rows: Rows, value: Value, equation: JaxprEqn, at: Positions) -> Any:
    operand, update, *starts = value.operands
    if update.shape[1:] != operand.shape[1:]:
        raise NotAloneError("dynamic_update_slice of parts of rows")
    _check_32_bits(value)
    place = jnp.clip(rows.whole(starts[0]), 0, operand.shape[0] - update.shape[0])
    return _written(rows, operand, rows.whole(update), place, np.True_, at)


def _written(rows: Rows, operand: Value, update: Any, place: Any, fits: Any, at: Positions) -> Any:
    given = rows.alone(operand, at)
    local = at.low - jnp.asarray(place).astype(jnp.uint32)  # below 0 it is large
    inside = fits & (local < update.shape[0])
    return jnp.where(_column(inside, given), jnp.take(update, local, axis=0, mode="clip"), given)


def _at(rows: Rows, value: Value, local: jax.Array) -> Any:
    """Returns rows of a value, any where it has none of that number."""
    last = jnp.uint32(value.shape[0] - 1)
    return rows.alone(value, Positions(jnp.uint32(0), jnp.minimum(local, last)))


def _check_32_bits(value: Value) -> None:
    if value.shape[0] > 1 << 32:
        raise NotAloneError(f"{value.name} has {value.shape[0]} rows")


def _column(mask: jax.Array, like: Any) -> jax.Array:
    return mask.reshape(-1, *[1] * (like.ndim - 1))


RULES: Mapping[str, Rule] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "transpose": _transpose,
    "slice": _slice,
    "concatenate": _concatenate,
    "pad": _pad,
    "iota": _iota,
    "random_bits": _random_bits,
    "scatter": _scatter,
    "dynamic_update_slice": _dynamic_update_slice,
}
"""By the name of a primitive."""
