"""Trials over a grid: what they find, how few they are, and what cannot run."""

import itertools
import random
from collections.abc import Mapping
from typing import Any

import pytest

from braidax.errors import ArgumentError
from braidax.tune import climb

SPACE = {"microbatches": [1, 2, 4, 8], "threads": [1, 2, 4, 8], "every": [10, 30, 100, 300], "bytes": [1, 4, 16, 64]}


def steps_of(seconds: float, noise: float, seed: int) -> list[float]:
    rng = random.Random(seed)
    return [seconds * rng.uniform(1 - noise, 1 + noise) for _ in range(16)]


def cost(setting: Mapping[str, Any]) -> float:
    """A step that computes, waits for data and for checkpoints, which hinder one another."""
    computes = 0.020 * (1 + 0.1 * abs(setting["microbatches"] - 2) ** 0.5) + 0.001 * setting["threads"]
    reads = 0.060 / setting["threads"]
    persists = 0.030 / setting["every"] * (1 + 0.1 * setting["threads"])
    return max(computes, reads) + persists + 0.0002 * abs(setting["bytes"] - 4) ** 0.5


@pytest.mark.parametrize("seed", range(4))
def test_twelve_trials_find_the_best_of_256_settings_within_three_percent(seed: int) -> None:
    seeds = itertools.count(100 * seed)
    start = {"microbatches": 1, "threads": 2, "every": 30, "bytes": 4}
    found = climb(SPACE, lambda setting: steps_of(cost(setting), 0.02, next(seeds)), start=start)
    names = list(SPACE)
    best = min(cost(dict(zip(names, values, strict=True))) for values in itertools.product(*SPACE.values()))
    assert len(found.trials) <= 12
    assert cost(found.best) <= 1.03 * best


def test_a_knob_goes_on_while_that_helps_and_no_setting_is_measured_twice() -> None:
    measured: list[int] = []

    def measure(setting: Mapping[str, Any]) -> list[float]:
        measured.append(setting["threads"])
        return steps_of({1: 8.0, 2: 4.0, 4: 2.0, 8: 3.0}[setting["threads"]], 0.01, len(measured))

    found = climb({"threads": [1, 2, 4, 8]}, measure, start={"threads": 1})
    assert measured == [1, 2, 4, 8]
    assert found.best == {"threads": 4}
    assert [trial.verdict for trial in found.trials] == ["start", "kept", "kept", "no better"]
    assert str(found).splitlines()[1].startswith("threads=2: 4.01e+03 ms a step, 49.9 % faster")


def test_what_is_below_the_noise_is_not_kept() -> None:
    found = climb(
        {"x": [1, 2]}, lambda setting: steps_of(1.0 - 0.012 * setting["x"], 0.2, setting["x"]), start={"x": 1}
    )
    assert found.best == {"x": 1}


def test_a_setting_that_cannot_run_is_told_and_another_one_is_tried() -> None:
    def measure(setting: Mapping[str, Any]) -> list[float]:
        if setting["x"] == 3:
            raise ArgumentError("x=3: expected what divides the batch")
        return steps_of(float(setting["x"]), 0.01, 0)

    found = climb({"x": [1, 2, 3]}, measure, start={"x": 2})
    assert found.best == {"x": 1}
    assert str(found).splitlines()[1] == "x=3: cannot run: x=3: expected what divides the batch"
    with pytest.raises(ArgumentError, match="x=3: expected what divides the batch"):
        climb({"x": [1, 2, 3]}, measure, start={"x": 3})


def test_a_budget_of_trials_is_kept() -> None:
    found = climb(
        SPACE,
        lambda setting: steps_of(cost(setting), 0.0, 0),
        start=dict.fromkeys(SPACE, 0) | {"microbatches": 8, "threads": 1, "every": 10, "bytes": 64},
        max_trials=3,
    )
    assert len(found.trials) == 3


def test_a_start_outside_of_the_space_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"start has x=5, which is none of \[1, 2\]: expected one of its"):
        climb({"x": [1, 2]}, lambda setting: [1.0] * 8, start={"x": 5})
    with pytest.raises(ArgumentError, match="max_trials=0: expected how many settings to measure, 1 or more"):
        climb({"x": [1, 2]}, lambda setting: [1.0] * 8, start={"x": 1}, max_trials=0)
