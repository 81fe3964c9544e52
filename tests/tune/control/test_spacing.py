"""How far apart checkpoints are set, when what they cost asks for another distance."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from braidax.checkpoint import Adaptive, Checkpointer
from braidax.checkpoint.interval.adaptive_cost import Estimate
from braidax.tune import Limits
from braidax.tune.control.spacing import SpacingControl


def distances(folder: Path, asked: Sequence[int | None], limits: Limits, *, cost: float = 0.0) -> list[int]:
    """Returns the distance after each window, at first 50, where checkpoints take so many updates until durable.

    **Arguments:** `asked`: None where nothing is known.
    """
    found: list[int] = [50]
    with Checkpointer(folder, Adaptive()) as saver:
        spacing: Any = saver.spacing
        spacing.num_updates = 50
        control = SpacingControl(saver, limits)
        for number in asked:
            measured = number and Estimate(0.01, cost, 0.0, 0.01 * number, number, has_calm=True)
            spacing._costs = SimpleNamespace(estimate=lambda measured=measured: measured)
            entry = control.decide(0)
            found.append(spacing.num_updates)
            assert (entry is None) == (found[-2] == found[-1])
    return found[1:]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ([63], [63]),  # a quarter further apart: at once
        ([40], [40]),
        ([56, 54, 56], [50, 50, 50]),  # a tenth is noise
        ([56, 56], [50, 56]),  # but not when it comes twice
        ([45, 44], [50, 44]),
        ([56, 45, 56, 45], [50, 50, 50, 50]),  # once in each direction
        ([54, 54, 54, 54], [50, 50, 50, 50]),  # less than a tenth
        ([57, 58, 64, 64], [50, 58, 58, 64]),  # a move begins anew
        ([56, None, 56, 56], [50, 50, 50, 56]),  # and so does what is measured anew
    ],
)
def test_small_moves_are_made_when_they_are_asked_for_twice(
    tmp_path: Path, asked: list[int | None], expected: list[int]
) -> None:
    assert distances(tmp_path, asked, Limits(overhead=0.1)) == expected


def test_what_is_promised_is_kept_at_once(tmp_path: Path) -> None:
    limits = Limits(overhead=0.0001, max_lost_seconds=0.505)
    assert distances(tmp_path, [2], limits, cost=0.01) == [47]  # steps of 10 ms, and 30 ms for a checkpoint
