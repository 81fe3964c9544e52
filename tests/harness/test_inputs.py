"""Inputs of benchmarks are there whole or not at all; a figure counts all that a system was asked for."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.harness.inputs import made_whole
from benchmarks.shuffle.timing import Timed


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_is_made_has_its_name_when_it_is_whole(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "inputs" / kind
    with made_whole(place) as unfinished:
        inner = unfinished if kind == "file" else unfinished / "a"
        inner.parent.mkdir(exist_ok=True)
        inner.write_text("whole")
        assert not place.exists()
    assert (place if kind == "file" else place / "a").read_text() == "whole"
    assert list(place.parent.iterdir()) == [place]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_of_what_is_stopped_nothing_is_left(tmp_path: Path, kind: str) -> None:
    with pytest.raises(KeyboardInterrupt), made_whole(tmp_path / kind) as unfinished:
        inner = unfinished if kind == "file" else unfinished / "a"
        inner.parent.mkdir(exist_ok=True)
        inner.write_text("half")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_a_system_is_asked_for_whole_epochs_and_for_no_batch_that_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ticks = itertools.count()
    monkeypatch.setattr("benchmarks.shuffle.timing.time.perf_counter", lambda: 0.01 * next(ticks))
    asked: list[int] = []
    used: list[int] = []

    def make(num_batches: int) -> Iterator[int]:
        asked.append(num_batches)
        assert used == [] or len(used) == sum(asked[:-1]), "it begins anew when all before was used"
        return iter(range(num_batches))

    timed = Timed(make, 8, epoch=5, seconds=1.0, use=used.append)
    assert timed() == pytest.approx(100 * 8 / 1.0, rel=0.02)
    assert asked == [2, 5, 100]  # an epoch takes 0.05 s by this clock, which ticks at each look at it
    assert len(used) == sum(asked)
    timed()
    assert asked[3:] == [100]
