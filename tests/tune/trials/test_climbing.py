"""Trials over a grid: what they find, how few they are, and what cannot run."""

import itertools
import random
from collections.abc import Callable, Mapping
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


def between(measure: Callable[[Mapping[str, Any]], list[float]]) -> Any:
    """Returns a duel of settings that are measured one after the other."""
    return lambda best, other: (measure(best), measure(other))


@pytest.mark.parametrize("seed", range(4))
def test_twelve_trials_find_the_best_of_256_settings_within_three_percent(seed: int) -> None:
    seeds = itertools.count(100 * seed)
    start = {"microbatches": 1, "threads": 2, "every": 30, "bytes": 4}
    found = climb(SPACE, between(lambda setting: steps_of(cost(setting), 0.02, next(seeds))), start=start)
    names = list(SPACE)
    best = min(cost(dict(zip(names, values, strict=True))) for values in itertools.product(*SPACE.values()))
    assert len(found.trials) <= 12
    assert cost(found.best) <= 1.03 * best


def test_a_knob_goes_on_while_that_helps_and_no_setting_is_tried_twice() -> None:
    tried: list[tuple[int, int]] = []

    def duel(best: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[list[float], list[float]]:
        tried.append((best["threads"], other["threads"]))
        seconds = {1: 8.0, 2: 4.0, 4: 2.0, 8: 3.0}
        return steps_of(seconds[best["threads"]], 0.01, 0), steps_of(seconds[other["threads"]], 0.01, len(tried))

    found = climb({"threads": [1, 2, 4, 8]}, duel, start={"threads": 1})
    assert tried == [(1, 2), (2, 4), (4, 8)]
    assert found.best == {"threads": 4}
    assert [trial.verdict for trial in found.trials] == ["kept", "kept", "no better"]
    lines = str(found).splitlines()
    assert lines[0].startswith("threads=2: 4e+03 ms a step, 50.")
    assert lines[-1] == "best: threads=4"


def test_what_is_below_the_noise_is_not_kept() -> None:
    def measure(setting: Mapping[str, Any]) -> list[float]:
        return steps_of(1.0 - 0.012 * setting["x"], 0.2, setting["x"])

    assert climb({"x": [1, 2]}, between(measure), start={"x": 1}).best == {"x": 1}


def test_trials_that_are_left_look_again_at_what_is_close_and_take_all_its_steps_into_account() -> None:
    seeds = itertools.count(4)
    seconds = {1: 1.0, 2: 0.97, 3: 1.2}
    tried: list[int] = []

    def duel(best: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[list[float], list[float]]:
        tried.append(other["x"])
        return tuple(steps_of(seconds[one["x"]], 0.1, next(seeds)) for one in (best, other))  # pyright: ignore[reportReturnType]

    found = climb({"x": [3, 1, 2]}, duel, start={"x": 1})
    errors = [trial.found.error for trial in found.trials if trial.setting == {"x": 2} and trial.found is not None]
    assert found.best == {"x": 2}
    assert tried[:2] == [2, 3]
    assert tried[2:] == [2] * (len(errors) - 1)  # and 3 is out of the question
    assert len(errors) >= 3
    assert errors == sorted(errors, reverse=True)
    assert [trial.verdict for trial in found.trials] == ["no better"] * (len(tried) - 1) + ["kept"]


def test_a_setting_that_cannot_run_is_told_and_another_one_is_tried() -> None:
    def measure(setting: Mapping[str, Any]) -> list[float]:
        if setting["x"] == 3:
            raise ArgumentError("x=3: expected what divides the batch")
        return steps_of(float(setting["x"]), 0.01, 0)

    found = climb({"x": [1, 2, 3]}, between(measure), start={"x": 2})
    assert found.best == {"x": 1}
    assert str(found).splitlines()[0] == "x=3: cannot run: x=3: expected what divides the batch"


def test_a_budget_of_trials_is_kept() -> None:
    start = {"microbatches": 8, "threads": 1, "every": 10, "bytes": 64}
    found = climb(SPACE, between(lambda setting: steps_of(cost(setting), 0.0, 0)), start=start, max_trials=3)
    assert len(found.trials) == 3


def test_a_start_outside_of_the_space_is_refused() -> None:
    duel = between(lambda setting: [1.0] * 8)
    with pytest.raises(ArgumentError, match=r"start has x=5, which is none of \[1, 2\]: expected one of its values"):
        climb({"x": [1, 2]}, duel, start={"x": 5})
    with pytest.raises(ArgumentError, match="max_trials=0: expected how many settings to measure, 1 or more"):
        climb({"x": [1, 2]}, duel, start={"x": 1}, max_trials=0)
