"""What a primitive makes of values that go by the rows of a table."""

from collections.abc import Mapping, Sequence
from typing import Any

from .kinds import ELEMENTWISE

SUMS: Mapping[str, float] = {"reduce_sum": 0.0, "reduce_and": True, "reduce_or": False}
"""What joins all rows, and what a row must be that counts for nothing."""

_REDUCTIONS = frozenset({*SUMS, "reduce_max", "reduce_min", "reduce_prod"})


def by_rows(primitive: Any, params: Mapping[str, Any], operands: Sequence[Any], shape: tuple[int, ...]) -> str:
    """Returns "" if the result goes by rows as the operands do, or why not.

    **Arguments:** `operands`: `Term`s, at least one of which goes by rows. `shape`: of the result.
    """
    name, first = primitive.name, operands[0]
    if primitive in ELEMENTWISE:
        odd = [one for one in operands if one.shape and not _meets(one, shape)]
        return f"{name} with an array whose rows differ" if odd else ""
    if name in _REDUCTIONS:
        return f"{name} over all rows" if 0 in params["axes"] else ""
    kept = {
        "broadcast_in_dim": lambda: params["broadcast_dimensions"][:1] == (0,) and shape[:1] == first.shape[:1],
        "reshape": lambda: params["dimensions"] is None and shape[:1] == first.shape[:1],
        "squeeze": lambda: 0 not in params["dimensions"],
        "transpose": lambda: params["permutation"][0] == 0,
    }
    return "" if name in kept and len(operands) == 1 and kept[name]() else f"{name}"


def is_even(primitive: Any, params: Mapping[str, Any], operands: Sequence[Any], shape: tuple[int, ...]) -> bool:
    """Whether all rows of a result are alike, of operands that do not go by rows."""
    if not shape:
        return False
    if primitive.name == "broadcast_in_dim":
        dims = params["broadcast_dimensions"]
        if 0 not in dims:
            return True
        length = operands[0].shape[0]
        return (operands[0].even and shape[0] == length) or (length == 1 and shape[0] > 1)
    if primitive not in ELEMENTWISE:
        return False
    return all(not one.shape or _meets(one, shape) for one in operands) and any(one.shape for one in operands)


def _meets(one: Any, shape: tuple[int, ...]) -> bool:
    """Whether row `i` of a result is made of row `i` of an operand, or of one that is the same for all."""
    if len(one.shape) != len(shape):
        return False
    return one.shape[0] == 1 or (one.shape[0] == shape[0] and bool(one.table or one.even))
