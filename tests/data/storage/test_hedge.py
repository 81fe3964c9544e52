"""Hedging: late means later than nearly all of the recent ones, and never many at once."""

import math

import numpy as np
import pytest

from braidax.data.storage.hedge import Hedge


def test_late_is_the_99th_percentile_of_recent_requests_of_that_size() -> None:
    hedge = Hedge(None)
    assert hedge.after(1000) == math.inf  # nothing is known yet
    seconds = np.random.default_rng(0).permutation(np.concatenate([np.full(252, 0.05), np.full(4, 0.8)]))
    for second in seconds:
        hedge.note(1000, float(second))
    assert hedge.after(1000) == 0.8
    assert hedge.after(1_000_000) == math.inf  # large ones take longer
    for _ in range(256):
        hedge.note(1000, 0.05)
    assert hedge.after(1000) == 0.1  # twice the median: without a tail there is nothing to gain


def test_fast_requests_are_not_hedged_for_noise() -> None:
    hedge = Hedge(None)
    for _ in range(100):
        hedge.note(1000, 0.0005)
    assert hedge.after(1000) == 0.01


@pytest.mark.parametrize("seconds", [0.0, 0.5, math.inf])
def test_it_can_be_set(seconds: float) -> None:
    hedge = Hedge(seconds)
    hedge.note(1000, 0.05)
    assert hedge.after(1000) == seconds
    assert all(hedge.opens(1) for _ in range(50))


def test_few_are_hedged_at_once() -> None:
    hedge = Hedge(None)
    assert [hedge.opens(60) for _ in range(5)] == [True, True, True, False, False]
    hedge.closes()
    assert hedge.opens(60)
    assert not hedge.opens(60)
