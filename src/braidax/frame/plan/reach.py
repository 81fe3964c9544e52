"""Expressions that look at rows before or behind their own: as far as some rows, or at all of them by one value."""

from typing import Any, Literal

from braidax.frame.plan.expressions import Expression, is_scalar, kind_of

Direction = Literal["forward", "backward"]
"""Whether a row depends on those before it, or on those behind it."""

_LAGS = frozenset({"Shift", "ShiftAndFill", "Diff", "PctChange"})
_PEAKS = frozenset({"PeakMin", "PeakMax"})
_ROLLING = frozenset({"Min", "Max", "Mean", "Sum", "Quantile", "Var", "Std", "Skew", "Kurtosis", "Rank"})
"""What a window may give. Not what a user's function gives, which would see windows that are none; and no correlation:
Polars takes it of differences of running sums, so that rows which have left the window long ago tell in it."""

_CUMULATIVE = frozenset({"CumSum", "CumProd", "CumMin", "CumMax", "CumCount"})


def is_lag(expression: Expression) -> bool:
    """Returns whether a row depends on its own and that one which lies some rows before, as the second part says."""
    name, _ = _function(expression)
    inputs = expression["Function"]["input"] if name in _LAGS else []
    return len(inputs) > 1 and not is_scalar(inputs[0]) and all(map(is_scalar, inputs[1:]))


def window_of(expression: Expression) -> tuple[int, int] | None:
    """Returns how many rows before and behind its own a row depends on at most; None for what has no such bounds."""
    name, options = _function(expression)
    if name == "RollingExpr" and kind_of(options["function"]) in _ROLLING:
        return None if _draws(options) else _window(options["options"])
    if name == "FillNullWithStrategy":
        limit = _limit(options)
        return None if limit is None else (limit, 0) if kind_of(options) == "Forward" else (0, limit)
    return (1, 1) if name in _PEAKS else None


def carries(expression: Expression) -> Direction | None:
    """Returns where one value comes from, in which all rows but those of a rank tell; None for what has none such."""
    name, options = _function(expression)
    if name in _CUMULATIVE:
        return "backward" if options["reverse"] else "forward"
    if name == "FillNullWithStrategy" and kind_of(options) in ("Forward", "Backward") and _limit(options) is None:
        return "forward" if kind_of(options) == "Forward" else "backward"
    return None


def function_of(expression: Expression) -> str:
    """Returns the name of a function."""
    return _function(expression)[0]


def _function(expression: Expression) -> tuple[str, Any]:
    """Returns the name of a function and its options; none for other kinds."""
    if kind_of(expression) != "Function":
        return "", None
    function = expression["Function"]["function"]
    return kind_of(function), function[kind_of(function)] if isinstance(function, dict) else None


def _limit(strategy: Any) -> int | None:
    return strategy[kind_of(strategy)] if kind_of(strategy) in ("Forward", "Backward") else None


def _window(options: Any) -> tuple[int, int]:
    size = int(options["window_size"])
    return (size // 2, size // 2) if options["center"] else (max(size - 1, 0), 0)


def _draws(options: Any) -> bool:
    """Returns whether ties are told apart by random numbers."""
    params = options["options"]["fn_params"]
    return isinstance(params, dict) and "Rank" in params and params["Rank"]["method"] == "Random"


__all__ = ["Direction", "carries", "function_of", "is_lag", "window_of"]
