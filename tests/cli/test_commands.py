"""What every command line has: a version, help by either name, and `python -m braidax`."""

import platform
import subprocess
import sys
from pathlib import Path

import jax
import jaxlib
import numpy as np
import pytest
from typer.testing import CliRunner

import braidax
from braidax.bindings import missing_bindings
from braidax.cli import app
from braidax.cli.versions import describe_bindings
from braidax.comm import Communicator
from tests.support.comm.ranks import outcomes


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})
    return result.exit_code, " ".join(result.output.split())


def test_the_version_is_told_with_what_a_report_needs() -> None:
    code, told = run("--version")
    assert code == 0
    python = f"Python {platform.python_version()}, JAX {jax.__version__}, jaxlib {jaxlib.__version__}, "
    assert told.startswith(f"braidax {braidax.__version__} {python}NumPy ")
    assert told.endswith(" compiled: tcp, ucx, frame, groups, servers, records, order")


def test_bindings_that_are_not_there_are_told_with_the_page_that_helps(tmp_path: Path) -> None:
    missing = missing_bindings(tmp_path)
    assert list(missing.values()) == ["not compiled"] * 7
    assert describe_bindings(missing) == (
        "compiled: nothing; without: tcp (not compiled), ucx (not compiled), frame (not compiled), "
        "groups (not compiled), servers (not compiled), records (not compiled), order (not compiled); "
        "docs/install.md#what-is-compiled says how to get them"
    )
    broken = tmp_path / "comm" / "transports" / "ucx_binding.abi3.so"
    broken.parent.mkdir(parents=True)
    broken.write_bytes(b"of another machine")
    assert missing_bindings(tmp_path)["ucx"].startswith("cannot be loaded: ")
    assert describe_bindings({"ucx": "not compiled"}).startswith(
        "compiled: tcp, frame, groups, servers, records, order; without: ucx ("
    )


def test_who_asks_what_is_compiled_computes_as_before() -> None:
    def sums(comm: Communicator) -> float:
        before = float(comm.all_reduce(np.ones(4))[0])
        assert missing_bindings() == {}
        comm.barrier()
        return before + float(comm.all_reduce(np.ones(4))[0])

    assert outcomes(2, sums, transport="tcp") == [4.0, 4.0]
    assert outcomes(2, sums, transport="tcp") == [4.0, 4.0]  # ranks that begin afterwards


@pytest.mark.parametrize("command", [[], ["train"], ["plan"], ["launch"], ["frame"], ["inspect"]])
def test_help_has_two_names(command: list[str]) -> None:
    code, short = run(*command, "-h")
    assert (code, short) == run(*command, "--help")
    assert code == 0
    assert "Usage: " + " ".join(["root", *command]) in short


def test_python_runs_the_package_as_the_command(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "braidax", "--version"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith(f"braidax {braidax.__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothere.py"], "error: there is no program nothere.py (seen from "),
        (["-n", "2", "nothere.py"], "error: there is no program nothere.py (seen from "),
        (["-n", "2", "folder"], "error: folder is a folder without __main__.py"),
        (["-n", "2", "-m", "no_module.x"], "error: there is no module no_module.x (seen from "),
        (["-n", "2", "--transport", "udp", "here.py"], "error: --transport='udp': expected one of ['mpi', 'tcp', 'ucx"),
        (["here.py"], "error: --processes is not given: say how many"),
        (["here.py", "-n", "2"], "such as `braidax launch -n 2 here.py`: what stands behind SCRIPT is its own"),
    ],
)
def test_what_cannot_be_launched_is_said_before_a_process_is_started(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*arguments: object, **options: object) -> int:
        raise AssertionError("started")

    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.py").write_text("")
    (tmp_path / "folder").mkdir()
    monkeypatch.setattr("braidax.cli.launch.launch_here", start)
    code, output = run("launch", *arguments)
    assert (code, said in output) == (1, True), output


def test_programs_that_are_here_are_launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.py").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__main__.py").write_text("")
    monkeypatch.setattr("braidax.cli.launch.launch_here", lambda *arguments, **options: 7)
    for program in (["here.py"], ["folder"], ["-m", "here"], ["-m", "folder.part"], ["-m", "braidax.cli"]):
        assert run("launch", "-n", "2", *program) == (7, "")
