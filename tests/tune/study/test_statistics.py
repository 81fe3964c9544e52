"""Statistics of a study, on data whose effects are known."""

import itertools
from fractions import Fraction

import numpy as np
import pytest

from braidax.errors import ArgumentError
from braidax.tune.study.statistics import contrast, estimate, interaction, mean_contrast


def test_the_median_and_the_whole_range_of_few_blocks() -> None:
    found = estimate([3.0, 1.0, 2.0])
    assert (found.value, found.low, found.high, found.num_blocks) == (2.0, 1.0, 3.0, 3)
    assert found.coverage == 0.75  # 1 - 2/2³: both ends of all signs alike
    assert found.sign == "undecided"  # three blocks are too few for a verdict
    assert estimate([3.0, 1.0, 2.0, 4.0, 5.0]).sign == "more"  # five have 94 %


def test_an_interval_is_that_of_signed_ranks() -> None:
    """Of 8 values: 3 of the 36 means are left out on each side (Wilcoxon, T ≤ 3 of 256 in 5 ways each)."""
    values = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0])
    means = np.sort([(a + b) / 2 for a, b in itertools.combinations_with_replacement(values, 2)])
    found = estimate(values)
    assert (found.low, found.high) == (means[3], means[-4])
    assert found.coverage == pytest.approx(1 - 10 / 256)


@pytest.mark.parametrize("count", [1, 2, 5, 6, 7, 10])
def test_the_coverage_is_exact(count: int) -> None:
    """Over all signs of values whose center is 0 and that are symmetric: how often the interval holds 0."""
    sizes = np.arange(1, count + 1) + 0.1 * np.arange(count) ** 2
    held = 0
    for signs in itertools.product((1, -1), repeat=count):
        found = estimate(sizes * np.array(signs))
        held += found.low <= 0 <= found.high
    assert Fraction(held, 2**count) == Fraction(estimate(sizes).coverage).limit_denominator(2**count)
    assert count < 6 or held / 2**count >= 0.95


def test_effects_and_interactions_come_out_of_what_they_were_put_into() -> None:
    """Noise that a block shares with all its runs cancels."""
    drift = np.array([0.0, 5.0, -3.0, 2.0, 9.0, -1.0])
    neither, first, second = 10 + drift, 12 + drift, 7 + drift
    both = neither + 2 - 3 + 1.5
    crossed = interaction(both, first, second, neither)
    assert (crossed.value, crossed.low, crossed.high) == pytest.approx((1.5, 1.5, 1.5))
    assert crossed.sign == "more"
    alone = contrast([second], [neither])
    assert (alone.value, alone.sign) == (-3.0, "less")
    assert mean_contrast([(second, neither), (both, first)]).value == pytest.approx((-3 - 1.5) / 2)


def test_what_may_be_zero_is_undecided() -> None:
    assert estimate([-1.0, 1.0, 2.0, -2.0, 0.5, 0.1]).sign == "undecided"


def test_no_values_are_refused() -> None:
    with pytest.raises(ArgumentError, match="values is empty: expected one of each block"):
        estimate([])
