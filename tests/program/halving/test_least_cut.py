"""The values of least size between sources and sinks."""

from itertools import combinations

import numpy as np
import pytest

from braidax.program.halving.least_cut import least_cut

CHAIN = [("a", "b"), ("b", "c"), ("c", "d")]


def reach(arrows: list[tuple[int, int]], sources: set[int], taken: set[int]) -> set[int]:
    found = sources - taken
    while more := {other for one, other in arrows if one in found} - found - taken:
        found |= more
    return found


def test_the_least_value_of_a_chain_is_taken_and_of_equal_ones_the_last() -> None:
    assert least_cut({"a": 3, "b": 2, "c": 5, "d": 4}, CHAIN, {"a"}, {"d"}) == {"b"}
    assert least_cut({"a": 3, "b": 2, "c": 2, "d": 4}, CHAIN, {"a"}, {"d"}) == {"c"}
    assert least_cut({"a": 3, "b": None, "c": None, "d": 4}, CHAIN, {"a"}, {"d"}) == {"a"}
    assert least_cut({"a": 3, "b": 2, "c": 5, "d": 1}, CHAIN, {"a", "d"}, {"d"}) == {"d"}
    assert least_cut({"a": 3, "b": 2, "c": 5, "d": 1}, CHAIN, {"b"}, {"a"}) == set()
    assert least_cut({"a": 3, "b": 0, "c": 5, "d": 1}, CHAIN, {"a"}, {"d"}) == {"b"}


@pytest.mark.parametrize("seed", [*range(10), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(10, 30))])
def test_nothing_that_is_less_will_do(seed: int) -> None:
    random = np.random.default_rng(seed)
    sizes = {at: int(random.integers(1, 9)) for at in range(9)}
    arrows = [(one, other) for one, other in combinations(range(9), 2) if random.random() < 0.35]
    sources, sinks = {0, 1, int(random.integers(9))}, {7, 8, int(random.integers(9))}
    taken = least_cut(sizes, arrows, sources, sinks)
    assert not reach(arrows, sources, taken) & sinks
    every = (set(some) for count in range(10) for some in combinations(range(9), count))
    least = min(sum(sizes[at] for at in some) for some in every if not reach(arrows, sources, some) & sinks)
    assert sum(sizes[at] for at in taken) == least
