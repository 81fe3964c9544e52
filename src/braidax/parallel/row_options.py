"""What a user's optimizer and strategies say of the tables of a step."""

import fnmatch
from collections.abc import Collection, Mapping
from typing import Any, Literal, NamedTuple

import optax

from braidax.errors import ArgumentError

from .rows import Clipping, RowOptimizer, recognized, row_optimizer, split_clipping
from .strategies import Hybrid, Strategy
from .touched import Touched

OutOfRange = Literal["as jax", "raise"]


class RowOptions(NamedTuple):
    """How rows move, and what becomes of ids that no row has.

    **Fields:** `default`: moves rows as the optimizer would, or None, and then `why` not. `by_pattern`: row optimizers
    by pattern of a variable's path; the first that matches counts. `out_of_range`, `touched`: see `Hybrid`. `clipping`:
    of the optimizer, where it clips by the norm of all gradients.
    """

    default: RowOptimizer | None
    why: str
    by_pattern: Mapping[str, RowOptimizer]
    out_of_range: OutOfRange
    touched: Mapping[str, Touched]
    clipping: Clipping | None

    def optimizer(self, path: str) -> RowOptimizer | None:
        """Returns what moves the rows of a variable, or None."""
        matching = (found for pattern, found in self.by_pattern.items() if fnmatch.fnmatchcase(path, pattern))
        return next(matching, self.default)

    def no_rows(self, path: str) -> str:
        """Returns why the rows of a variable cannot be moved; "" if they can."""
        return "" if self.optimizer(path) is not None else self.why


def row_options(
    optimizer: optax.GradientTransformation, strategies: Mapping[str, Strategy], tables: Collection[str]
) -> RowOptions:
    """Gathers the options.

    **Arguments:** `tables`: names of the variables that are read by rows; without any, the optimizer is asked nothing.

    **Raises:** `ArgumentError` where strategies contradict each other.
    """
    hybrids = {axis: strategy for axis, strategy in strategies.items() if isinstance(strategy, Hybrid)}
    by_pattern: dict[str, Any] = {}
    for axis, strategy in hybrids.items():
        for pattern, moved in strategy.row_optimizers.items():
            if by_pattern.setdefault(pattern, moved) != moved:
                raise ArgumentError(
                    f"strategies[{axis!r}] gives row_optimizers[{pattern!r}] and another axis gives it otherwise: "
                    f"expected one optimizer for a table; say it once"
                )
    raising = any(strategy.out_of_range == "raise" for strategy in hybrids.values())
    touched = {path: found for strategy in hybrids.values() for path, found in strategy.touched.items()}
    out_of_range: OutOfRange = "raise" if raising else "as jax"
    if not tables:
        return RowOptions(None, "no variable is read by rows", by_pattern, out_of_range, touched, None)
    clipping = split_clipping(optimizer)
    moved = optimizer if clipping is None else clipping.inner
    try:
        default, why = recognized(moved) or row_optimizer(moved), ""
    except ArgumentError as error:
        default, why = None, str(error)
    return RowOptions(default, why, by_pattern, out_of_range, touched, clipping)
