"""Medians of a few runs, differences within blocks, and intervals by ranks: exact for any symmetric noise, and the same
whenever they are computed."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from braidax.errors import ArgumentError

_WANTED, _SURE = 0.95, 0.9
Sign = Literal["less", "more", "undecided"]


@dataclass(frozen=True)
class Estimate:
    """A number with its interval.

    **Fields:** `value`: the estimate. `low`, `high`: the interval. `coverage`: the least probability that it holds the
    true value, 0.95 where there are 6 blocks or more. `num_blocks`: that it is of.
    """

    value: float
    low: float
    high: float
    coverage: float
    num_blocks: int

    @property
    def sign(self) -> Sign:
        """Whether it is below or above zero, with all of an interval of 90 % at least; of few blocks none is."""
        if self.coverage < _SURE:
            return "undecided"
        if self.high < 0:
            return "less"
        return "more" if self.low > 0 else "undecided"


def estimate(values: ArrayLike) -> Estimate:
    """Returns the median of a quantity, one value of each block, and an interval for it.

    The interval is between two of the sorted means of pairs (Walsh averages), by the exact distribution of Wilcoxon's
    signed ranks: it has at least 95 %, or where fewer than 6 blocks cannot give that, it is as wide as the values, and
    `coverage` says how much that is. (Hodges and Lehmann, Annals of Mathematical Statistics 34, 1963.)

    **Raises:** `ArgumentError` for no values.
    """
    given = np.asarray(values, np.float64).ravel()
    if not given.size:
        raise ArgumentError("values is empty: expected one of each block")
    at, other = np.triu_indices(given.size)
    walsh = np.sort((given[at] + given[other]) / 2)
    cut, coverage = _cut(given.size)
    return Estimate(float(np.median(given)), float(walsh[cut]), float(walsh[-1 - cut]), coverage, given.size)


@functools.cache
def _cut(count: int) -> tuple[int, float]:
    """Returns how many averages are outside of the interval on each side, and the coverage of it."""
    ways = np.zeros(count * (count + 1) // 2 + 1)
    ways[0] = 1.0
    for rank in range(1, count + 1):  # of the sums of signed ranks, by dynamic programming
        ways[rank:] = ways[rank:] + ways[:-rank]
    below = np.cumsum(ways) / 2.0**count
    fitting = [cut for cut in range(len(ways) // 2) if 1 - 2 * below[cut] >= _WANTED]
    cut = max(fitting, default=0)
    return cut, max(0.0, float(1 - 2 * below[cut]))


def contrast(plus: Sequence[ArrayLike], minus: Sequence[ArrayLike]) -> Estimate:
    """Returns the sum of some quantities less that of others, taken within each block.

    **Arguments:** `plus`, `minus`: of each, a value for every block.
    """
    return estimate(_summed(plus) - _summed(minus))


def interaction(both: ArrayLike, first: ArrayLike, second: ArrayLike, neither: ArrayLike) -> Estimate:
    """Returns `T(ab) - T(a) - T(b) + T(∅)`: by how much two overlaps take longer than one by one."""
    return contrast([both, neither], [first, second])


def median(values: ArrayLike) -> float:
    """Returns the median."""
    return float(np.median(np.asarray(values, np.float64)))


def mean_contrast(pairs: Sequence[tuple[ArrayLike, ArrayLike]]) -> Estimate:
    """Returns the average of several differences, taken within each block: a main effect."""
    total = sum((np.asarray(one, np.float64) - np.asarray(other, np.float64) for one, other in pairs), np.zeros(()))
    return estimate(total / max(1, len(pairs)))


def percent(part: float, whole: float) -> float:
    """Returns a part in percent of the whole; NaN of nothing."""
    return 100 * part / whole if whole else math.nan


def _summed(values: Sequence[ArrayLike]) -> np.ndarray:
    return np.sum([np.asarray(one, np.float64) for one in values], axis=0) if values else np.zeros(())
