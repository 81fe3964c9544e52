"""The best mix of a case: trials on a bench that stays."""

from pathlib import Path

import pytest

from braidax.tune.study import SPACE, Length, Place, Run, Setting, find_best_mix, open_bench
from tests.support.tune.study.tiny import CASE


def run_of(setting: Setting, length: Length) -> Run:
    """Returns a run whose steps wait for data without prefetch, and for checkpoints the more the oftener they are."""
    seconds = 0.010 + (0.004 if setting.prefetch == 0 else 0.0) + 0.02 / (setting.checkpoint_every or 1)
    seconds *= 1.2 if setting.microbatches else 1.0
    steps = tuple(seconds * (1 + 0.01 * (at % 3)) for at in range(length.num_counted))
    return Run(0, setting, seconds, {"compute": seconds}, steps)


def test_trials_find_the_mix_with_the_fastest_steps() -> None:
    start = Setting(checkpoint_every=5, microbatches=2)
    found = find_best_mix(run_of, start=start)
    best = Setting(**found.best)
    assert (best.prefetch, best.checkpoint_every, best.microbatches, best.sync) == (1, 20, None, "one piece")
    assert len(found.trials) <= 12


def test_both_mixes_run_for_as_many_whole_intervals_in_turns() -> None:
    measured: list[tuple[Setting, Length]] = []

    def measure(setting: Setting, length: Length) -> Run:
        measured.append((setting, length))
        return run_of(setting, length)

    space = {"prefetch": (0, 1), "checkpoint_every": (20,)}
    find_best_mix(measure, space, start=Setting(checkpoint_every=20), num_steps=30)
    off, on = Setting(checkpoint_every=20), Setting(prefetch=1, checkpoint_every=20)
    assert [setting for setting, _ in measured] == [off, on, on, off]
    assert {length for _, length in measured} == {Length(20, 40)}


def test_a_space_of_the_four_overlaps_has_256_mixes() -> None:
    sizes = {name: len(values) for name, values in SPACE.items()}
    assert sizes == {"prefetch": 8, "sync": 2, "microbatches": 4, "checkpoint_every": 4}


@pytest.mark.slow  # test_study.py runs settings on one
def test_a_bench_runs_settings_as_often_as_it_is_asked_to(tmp_path: Path) -> None:
    settings = [Setting(), Setting(prefetch=2, checkpoint_every=3), Setting()]
    with open_bench(CASE, tmp_path, place=Place(devices=2)) as measure:
        runs = [measure(setting, Length(3, 6)) for setting in settings]
    assert [run.setting for run in runs] == settings
    assert [len(run.steps) for run in runs] == [6, 6, 6]
    for run in runs:
        assert abs(sum(run.lanes.values()) - run.step_seconds) < 1e-9
