"""What an operation comes to where some of its operands are known numbers.

Nothing is rounded otherwise than the operation rounds. What is multiplied by 0, or divides it, is taken to be finite.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Number = Any

_SAME = frozenset({"copy", "copy_p", "stop_gradient", "name", "device_put", "sharding_constraint"})
_SHAPING = frozenset({"broadcast_in_dim", "reshape", "squeeze", "transpose"})
_ZERO_AT_ZERO = frozenset(
    {"tanh", "sin", "tan", "sinh", "asin", "asinh", "atan", "atanh", "expm1", "log1p", "erf", "cbrt", "square", "sqrt"}
)
_FOLDED: Mapping[str, Callable[..., Number]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "neg": np.negative, "abs": np.abs, "sign": np.sign,
    "square": np.square, "sqrt": np.sqrt, "max": np.maximum, "min": np.minimum, "floor": np.floor, "ceil": np.ceil,
    "is_finite": np.isfinite, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "eq": np.equal, "ne": np.not_equal, "and": np.bitwise_and, "or": np.bitwise_or, "not": np.invert,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
}  # fmt: skip


def simpler(
    literal: Callable[[Any], Any], primitive: Any, params: Mapping[str, Any], operands: Sequence[Any], aval: Any
) -> Any:
    """Returns an operand or a literal that is what an operation gives, or None.

    **Arguments:** `literal`: makes one of the result's shape and dtype. `operands`: `Term`s. `aval`: of the result.
    """
    name = primitive.name
    if name == "select_n":
        return _select(operands, aval)
    known = [one.value for one in operands if one.is_literal]
    if name in _SHAPING or name == "convert_element_type":
        return literal(known[0]) if known else _if_like(operands[0], aval, unless=name == "transpose")
    if name in _SAME or (name == "integer_pow" and params["y"] == 1):
        return _if_like(operands[0], aval)
    if name == "reduce_sum" and operands[0].equals(0):
        return literal(0)
    if name in ("reduce_max", "reduce_min", "reduce_and", "reduce_or") and known:
        return literal(known[0])
    if operands and operands[0].equals(0) and (name in _ZERO_AT_ZERO or (name == "integer_pow" and params["y"] > 0)):
        return literal(0)
    if known and len(known) == len(operands):
        return _folded(literal, name, known)
    return _PAIRS[name](literal, *operands, aval) if name in _PAIRS and len(operands) == 2 else None


def _folded(literal: Callable[[Any], Any], name: str, known: Sequence[Any]) -> Any:
    if name == "div" and not np.issubdtype(np.asarray(known[0]).dtype, np.integer):
        with np.errstate(all="ignore"):
            return literal(np.divide(*known))
    if name not in _FOLDED:
        return None
    with np.errstate(all="ignore"):
        return literal(_FOLDED[name](*known))


def _select(operands: Sequence[Any], aval: Any) -> Any:
    which, *cases = operands
    if which.is_literal:
        return _if_like(cases[int(which.value)], aval)
    if all(case is cases[0] or (case.is_literal and cases[0].equals(case.value)) for case in cases):
        return _if_like(cases[0], aval)  # 0 and -0 are the same
    return None


def _if_like(one: Any, aval: Any, *, unless: bool = False) -> Any:
    return one if one.shape == tuple(aval.shape) and one.dtype == aval.dtype and not unless else None


def _add(literal: Any, one: Any, other: Any, aval: Any) -> Any:
    if one.equals(0):
        return _if_like(other, aval)
    return _if_like(one, aval) if other.equals(0) else None


def _sub(literal: Any, one: Any, other: Any, aval: Any) -> Any:
    return _if_like(one, aval) if other.equals(0) else None


def _mul(literal: Any, one: Any, other: Any, aval: Any) -> Any:
    if one.equals(0) or other.equals(0):
        return literal(0)
    if one.equals(1):
        return _if_like(other, aval)
    return _if_like(one, aval) if other.equals(1) else None


def _div(literal: Any, one: Any, other: Any, aval: Any) -> Any:
    if one.equals(0):
        return literal(0)
    return _if_like(one, aval) if other.equals(1) else None


def _pow(literal: Any, one: Any, other: Any, aval: Any) -> Any:
    if one.equals(0) and other.is_literal and other.value > 0:
        return literal(0)
    return _if_like(one, aval) if other.equals(1) else None


def _and(literal: Any, one: Any, other: Any, aval: Any) -> Any:
    if aval.dtype != np.bool_:
        return None
    if one.equals(False) or other.equals(False):
        return literal(False)
    return _if_like(other, aval) if one.equals(True) else _if_like(one, aval) if other.equals(True) else None


def _or(literal: Any, one: Any, other: Any, aval: Any) -> Any:
    if aval.dtype != np.bool_:
        return None
    if one.equals(True) or other.equals(True):
        return literal(True)
    return _if_like(other, aval) if one.equals(False) else _if_like(one, aval) if other.equals(False) else None


def _same(literal: Any, one: Any, other: Any, aval: Any) -> Any:
    return _if_like(one, aval) if one is other else None


_PAIRS: Mapping[str, Callable[..., Any]] = {
    "add": _add, "sub": _sub, "mul": _mul, "div": _div, "pow": _pow, "and": _and, "or": _or, "max": _same, "min": _same,
}  # fmt: skip
