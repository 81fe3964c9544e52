"""Between which numbers a scalar stays, whatever the counts are that it is made of."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .terms import Term, terms_between

Range = tuple[float, float]

_ANY = (-math.inf, math.inf)
_UNIT = (-1.0, 1.0)


def bounds(term: Term) -> Range:
    """Returns the least and the largest value of a scalar term, whose integer inputs are counts: never negative."""
    known: dict[int, Range] = {}
    for one in terms_between([term], {}):
        found = _ANY
        if one.is_literal:
            found = (float(one.value), float(one.value))
        elif one.is_input and not one.shape and _is_integer(one):
            found = (0.0, 2.0**31)
        elif one.dtype.kind == "b":
            found = (0.0, 1.0)
        elif one.making is not None and not one.shape:
            rule = _RULES.get(one.making.primitive.name)
            ranges = [known[operand.number] for operand in one.operands]
            found = rule(one.making.params, ranges) if rule is not None else _ANY
        known[one.number] = found if not any(math.isnan(end) for end in found) else _ANY
    return known[term.number]


def _is_integer(term: Term) -> bool:
    return term.dtype.kind in "iu"


def _ends(function: Callable[[float, float], float], one: Range, other: Range) -> Range:
    """Of a function that is monotonic in both: 0 times infinity is 0, since no count is infinite."""
    values = [function(a, b) for a in one for b in other]
    return min(values), max(values)


def _times(a: float, b: float) -> float:
    return 0.0 if a == 0 or b == 0 else a * b


def _divided(_: Any, ranges: Sequence[Range]) -> Range:
    one, other = ranges
    if other[0] <= 0 <= other[1]:
        return _ANY
    return _ends(lambda a, b: 0.0 if math.isinf(b) else a / b, one, other)


def _power(_: Any, ranges: Sequence[Range]) -> Range:
    base, exponent = ranges
    if base[0] < 0 or (base[0] == 0 and exponent[0] < 0):
        return _ANY
    return _ends(_pow, base, exponent)


def _pow(a: float, b: float) -> float:
    try:
        return a**b
    except OverflowError:
        return math.inf


def _whole_power(params: Mapping[str, Any], ranges: Sequence[Range]) -> Range:
    (one,), y = ranges, params["y"]
    if y < 0 and one[0] <= 0 <= one[1]:
        return _ANY
    low, high = sorted(_pow(end, y) for end in one)
    return (min(low, 0.0), high) if one[0] <= 0 <= one[1] else (low, high)


def _rising(function: Callable[[float], float]) -> Callable[..., Range]:
    def rule(_: Any, ranges: Sequence[Range]) -> Range:
        try:
            low, high = (function(end) for end in ranges[0])
        except (OverflowError, ValueError):
            return _ANY
        return low, high

    return rule


def _over_all(_: Any, ranges: Sequence[Range]) -> Range:
    return min(low for low, _ in ranges), max(high for _, high in ranges)


def _absolute(_: Any, ranges: Sequence[Range]) -> Range:
    ((low, high),) = ranges
    return (0.0 if low <= 0 <= high else min(abs(low), abs(high))), max(abs(low), abs(high))


def _rounded(_: Any, ranges: Sequence[Range]) -> Range:
    return ranges[0][0] - 1, ranges[0][1] + 1


def _same(_: Any, ranges: Sequence[Range]) -> Range:
    return ranges[0]


_RULES: Mapping[str, Callable[..., Range]] = {
    "add": lambda _, r: (r[0][0] + r[1][0], r[0][1] + r[1][1]),
    "sub": lambda _, r: (r[0][0] - r[1][1], r[0][1] - r[1][0]),
    "mul": lambda _, r: _ends(_times, *r),
    "div": _divided,
    "neg": lambda _, r: (-r[0][1], -r[0][0]),
    "max": lambda _, r: (max(r[0][0], r[1][0]), max(r[0][1], r[1][1])),
    "min": lambda _, r: (min(r[0][0], r[1][0]), min(r[0][1], r[1][1])),
    "clamp": lambda _, r: (min(max(r[1][0], r[0][0]), r[2][1]), min(max(r[1][1], r[0][1]), r[2][1])),
    "select_n": lambda _, r: _over_all(_, r[1:]),
    "pow": _power,
    "integer_pow": _whole_power,
    "square": lambda _, r: _whole_power({"y": 2}, r),
    "sqrt": _rising(math.sqrt),
    "exp": _rising(math.exp),
    "tanh": _rising(math.tanh),
    "logistic": lambda _, r: (0.0, 1.0),
    "cos": lambda _, r: _UNIT,
    "sin": lambda _, r: _UNIT,
    "sign": lambda _, r: _UNIT,
    "abs": _absolute,
    "floor": _rounded,
    "ceil": _rounded,
    "round": _rounded,
    "rem": lambda _, r: (-max(map(abs, r[1])), max(map(abs, r[1]))),
    "copy": _same,
    "copy_p": _same,
    "convert_element_type": _same,
    "stop_gradient": _same,
}
