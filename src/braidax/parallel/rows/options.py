"""What a user's optimizer and strategies say of the tables of a step."""

import fnmatch
import functools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import optax

from braidax.errors import ArgumentError
from braidax.parallel.plan.strategies import Hybrid
from braidax.parallel.plan.strategy import Strategy
from braidax.program import join

from . import RowOptimizer, Split, TracedOptimizer
from .touched import Touched

OutOfRange = Literal["as jax", "raise"]


@dataclass(frozen=True)
class RowOptions:
    """How rows move, and what becomes of ids that no row has.

    **Fields:** `transformation`: of the step. `params`: PyTree of specs of what is trained. `tables`: names of the
    variables that are read by rows; nothing else is asked about. `by_pattern`: row optimizers by pattern of a path; the
    first that matches counts. `out_of_range`, `touched`: see `Hybrid`. `loss`: spec of it.
    """

    transformation: optax.GradientTransformation
    params: Any
    tables: tuple[str, ...]
    by_pattern: Mapping[str, RowOptimizer]
    out_of_range: OutOfRange
    touched: Mapping[str, Touched]
    loss: jax.ShapeDtypeStruct

    def own(self, name: str) -> RowOptimizer | None:
        """Returns the row optimizer that a strategy gives a table, or None."""
        path = join("params", name)
        return next((one for pattern, one in self.by_pattern.items() if fnmatch.fnmatchcase(path, pattern)), None)

    @functools.cached_property
    def traced(self) -> TracedOptimizer:
        """The optimizer of the step, on all variables."""
        return TracedOptimizer(self.transformation, self.params, self.loss)

    @functools.cached_property
    def _split(self) -> Split:
        return self._split_for(self.tables)

    def _split_for(self, tables: Collection[str]) -> Split:
        apart = [name for name in tables if self.own(name) is not None]
        return self.traced.split([name for name in tables if name not in apart], apart=apart)

    def no_rows(self, name: str) -> str:
        """Returns why the rows of a table cannot be moved; "" if they can."""
        return self._split.refused.get(name, "")

    def num_replayed(self, name: str) -> int:
        """Returns what `RowWork` has of it."""
        update = self._split.tables.get(name)
        return 1 + len(update.kept) if update is not None and update.replays else 0

    def split(self, tables: Collection[str]) -> Split:
        """Returns the optimizer, split where some of the tables are moved by rows, as it allows."""
        return self._split if {*tables} == {*self.tables} - {*self._split.refused} else self._split_for(tables)


def row_options(
    optimizer: optax.GradientTransformation,
    strategies: Mapping[str, Strategy],
    params: Any,
    tables: Collection[str],
    loss: jax.ShapeDtypeStruct,
) -> RowOptions:
    """Gathers the options.

    **Arguments:** `params`: PyTree of specs of what is trained. `tables`: names of the variables that are read by rows;
    without any, the optimizer is asked nothing. `loss`: spec of it.

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
    return RowOptions(optimizer, params, tuple(tables), by_pattern, "raise" if raising else "as jax", touched, loss)


def out_of_range_told(told: str) -> str:
    """Returns what is wrong with a batch, or "". **Arguments:** `told`: how many ids no row has, of which tables."""
    return told and (
        f"has ids out of range: {told}; expected 0 <= id < rows: mend the data, or choose what such ids mean by "
        f'jnp.take(..., mode="clip" or "fill") and Hybrid(out_of_range="as jax")'
    )


def counted_out_of_range(tables: Mapping[str, jax.ShapeDtypeStruct], counts: Iterable[int]) -> str:
    """Returns the same of how many ids no row has, for each of some tables, by name and in their order."""
    pairs = zip(tables.items(), counts, strict=True)
    told = (f"{count} for {join('params', name)} of {spec.shape[0]} rows" for (name, spec), count in pairs if count)
    return out_of_range_told(", ".join(told))
