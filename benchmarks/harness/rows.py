"""Rows: the figures of one system, or why there are none."""

import statistics
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """The figures of one system.

    **Fields:** `case`: the table. `at`: the line of it, "" where a line is a system. `metric`, in `unit`: of a unit
    that ends in `/s` more is better, of every other one less. `values`: one a run. `missing`: why there are none.
    """

    case: str
    at: str
    system: str
    metric: str
    unit: str
    values: tuple[float, ...]
    missing: str = ""

    @property
    def median(self) -> float:
        """Over all runs."""
        return statistics.median(self.values)

    @property
    def runs(self) -> int:
        """How many there were."""
        return len(self.values)

    @property
    def more_is_better(self) -> bool:
        """Whether it is a rate."""
        return self.unit.endswith("/s")

    def __str__(self) -> str:
        """The median and, of several runs, the smallest and the largest: `57.4 (51.2–80)`."""
        return self.missing or ranged(self.median, min(self.values), max(self.values))


def ranged(median: float, low: float, high: float) -> str:
    """Returns a median with its range, and alone where there is none."""
    return short(median) if short(low) == short(high) else f"{short(median)} ({short(low)}–{short(high)})"


def short(value: float) -> str:
    """Returns three digits, or all of a whole number: `0.0571`, `57.1`, `57,123`."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
