"""`braidax inspect machine`: what this machine can do."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

import braidax as bx
from braidax.cli import app
from braidax.tune import Calibration


def run(*arguments: str | Path, cache: Path) -> tuple[int, str]:
    """Returns exit code and output."""
    environment = {"BRAIDAX_CACHE": str(cache), "COLUMNS": "160"}
    result = CliRunner().invoke(app, ["inspect", *map(str, arguments)], env=environment)
    return result.exit_code, result.output


def test_it_prints_rates_and_keeps_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, cache = tmp_path / "folder", tmp_path / "cache"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    code, output = run("machine", "--mesh", "data=1", "--folder", folder, cache=cache)
    assert code == 0
    assert [line.split()[0] for line in output.splitlines()] == [
        "machine",
        "a",
        "host",
        "copies",
        "disk",
        "small",
        "decoding",
    ]
    assert list(folder.iterdir()) == []
    code, again = run("machine", "--mesh", "data=1", "--folder", folder, "--json", cache=cache)
    assert code == 0
    assert f"{Calibration.from_json(again)}\n" == output


def test_a_path_of_that_name_is_inspected_as_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with bx.Checkpointer(tmp_path / "machine", bx.Every(1)) as saver:
        saver.update({"step": 1})
    monkeypatch.chdir(tmp_path)
    code, output = run("machine", cache=tmp_path)
    assert code == 0
    assert "step-00000001" in output
    code, output = run("machine", "--again", cache=tmp_path)
    assert code == 2
    assert "--again is of machine, and machine is another" in " ".join(output.split())


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("x.npz", "--folder", "."), "--folder is of machine, and x.npz is another; leave it out"),
        (("machine", "--split", "train"), "--split is not of machine; leave it out"),
        (("machine", "--check", "all"), "--check is not of machine; leave it out"),
        (("machine", "--mesh", "data"), "'data': expected different axes with positive sizes"),
    ],
)
def test_options_of_something_else_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, output = run(*arguments, cache=tmp_path)
    assert code == 2
    assert told in " ".join(output.replace("│", " ").split())


def test_a_folder_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, output = run("machine", "--mesh", "data=1", "--folder", tmp_path / "absent", cache=tmp_path)
    assert code == 1
    assert "absent' is no folder: expected one whose disk is to be measured" in output
