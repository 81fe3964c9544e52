"""Which settings a study has, and in which order."""

from typing import Any

import pytest

from braidax.errors import ArgumentError
from braidax.tune.study import FACTORS, PAIRS, Design, Length, Levels, Setting, crossed, parse_pairs, sweep, sweeps_of


def test_all_mixes_of_four_factors() -> None:
    settings = crossed(Levels(), FACTORS)
    assert len(set(settings)) == 16
    assert (settings[0].on, settings[-1].on) == ((), FACTORS)
    assert settings[-1] == Setting(2, 5, "overlapped", 4)
    assert settings[-1].name == "prefetch=2+checkpoint_every=5+sync=overlapped+microbatches=4"
    assert len({one.name for one in settings}) == 16


def test_programs_are_shared_by_what_needs_none_of_its_own() -> None:
    assert Setting(2, 5, "overlapped", 4).program == Setting(sync="overlapped", microbatches=4)
    assert len({one.program for one in crossed(Levels(), FACTORS)}) == 4


@pytest.mark.parametrize("seed", [0, 7])
def test_blocks_are_shuffled_and_every_second_one_goes_back(seed: int) -> None:
    design = Design(("full",), num_blocks=4, seed=seed)
    order = design.order()
    blocks = [[setting for block, setting in order if block == number] for number in range(4)]
    assert [block for block, _ in order] == sorted(block for block, _ in order)
    assert all(set(each) == set(design.settings) and len(each) == 16 for each in blocks)
    assert (blocks[1], blocks[3]) == (blocks[0][::-1], blocks[2][::-1])
    assert blocks[0] != blocks[2] != list(design.settings)
    assert order == Design(("full",), num_blocks=4, seed=seed).order()
    assert order != Design(("full",), num_blocks=4, seed=seed + 1).order()


def test_a_run_counts_whole_intervals_from_one_that_is_due() -> None:
    design = Design(num_steps=30)
    assert design.length(Setting()) == Length(4, 30)
    assert design.length(Setting(checkpoint_every=5)) == Length(5, 30)
    assert design.length(Setting(checkpoint_every=7)) == Length(7, 35)
    assert design.length(Setting(checkpoint_every=3)) == Length(6, 30)


def test_sweeps_begin_with_off_and_add_settings() -> None:
    levels = Levels()
    found = sweep(levels, "prefetch", (1, 4), beside=("checkpoint", "prefetch"))
    assert found.beside == ("checkpoint",)
    assert [(one.prefetch, one.checkpoint_every) for one in found.settings] == [(0, 5), (1, 5), (4, 5)]
    quick, full = (Design(("full",), levels, sweeps_of(levels, FACTORS, quick=some)) for some in (True, False))
    assert len(quick.settings) == 18  # 16, prefetch 1, a checkpoint each step
    assert len(full.settings) == 16 + 2 * (3 + 3 + 2)
    small = sweeps_of(levels, FACTORS, quick=False, most_microbatches=4)
    assert [one.values for one in small if one.factor == "pipeline"] == [(2, 4), (2, 4)]


def test_pairs_are_read_from_a_text() -> None:
    assert parse_pairs("sync-prefetch, checkfreq-ddp,sync-prefetch") == ("sync-prefetch", "checkfreq-ddp")
    assert Design(("checkfreq-ddp",)).factors == ("checkpoint", "sync")
    with pytest.raises(ArgumentError, match="--pairs a,full: 'a' is no experiment; expected some of checkfreq-ddp, "):
        parse_pairs("a,full")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prefetch": -1}, "prefetch=-1: expected batches ahead, 0 for none"),
        ({"checkpoint_every": 0}, "checkpoint_every=0: expected a number from 1 on, or None"),
        ({"microbatches": 0}, "microbatches=0: expected a number from 1 on, or None"),
        ({"sync": "late"}, 'sync=\'late\': expected "one piece" or "overlapped"'),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_settings_that_cannot_be(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        Setting(**options)
    assert str(raised.value) == words


def test_designs_that_cannot_be() -> None:
    with pytest.raises(ArgumentError, match=r"pairs has \['x'\]: expected some of checkfreq-ddp"):
        Design(("x",))
    with pytest.raises(ArgumentError, match="num_blocks=0: expected 1 or more"):
        Design(num_blocks=0)
    with pytest.raises(ArgumentError, match='factor="sync" has two values'):
        sweep(Levels(), "sync", (1,))
    assert set(PAIRS) == {"checkfreq-ddp", "sync-prefetch", "pipedream-checkfreq", "pipedream-prefetch", "full"}
