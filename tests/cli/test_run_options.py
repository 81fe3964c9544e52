"""The options of a run: what a later session is told, and what is kept."""

import json
from pathlib import Path

import pytest

from braidax.cli.run_options import compare, keep
from braidax.errors import ArgumentError

OPTIONS = {"task": "digits", "--data": None, "--batch-size": 64, "--seed": 3}


def test_the_same_options_are_kept_once_and_not_mentioned(tmp_path: Path) -> None:
    assert compare(tmp_path, OPTIONS, saved=False).told == ""
    for _ in range(2):
        keep(tmp_path, OPTIONS)
        assert (compare(tmp_path, OPTIONS, saved=True).told, compare(tmp_path, OPTIONS, saved=True).seed) == ("", 3)
    (line,) = (tmp_path / "options.jsonl").read_text().splitlines()
    assert json.loads(line).keys() == {*OPTIONS, "time"}


def test_what_changed_is_said_and_the_seed_stays(tmp_path: Path) -> None:
    keep(tmp_path, OPTIONS)
    found = compare(tmp_path, {**OPTIONS, "--data": "/a", "--batch-size": 8}, saved=True)
    assert (
        found.told == f"{tmp_path} goes on with other options: --data /a instead of none, --batch-size 8 instead of 64"
    )
    found = compare(tmp_path, {**OPTIONS, "--seed": 0}, saved=True)
    assert (found.seed, found.told.startswith(f"{tmp_path} keeps its --seed 3")) == (3, True)


def test_a_run_without_a_checkpoint_begins_anew_with_what_is_given(tmp_path: Path) -> None:
    keep(tmp_path, OPTIONS)
    found = compare(tmp_path, {**OPTIONS, "--seed": 4}, saved=False)
    assert (found.seed, found.told) == (4, f"{tmp_path} has no checkpoint yet: the run begins anew")


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "options.jsonl").write_text('{"task": "dig')
    with pytest.raises(ArgumentError, match=r"options.jsonl ends with '\{\"task\": \"dig'.*remove that line"):
        compare(tmp_path, OPTIONS, saved=True)
