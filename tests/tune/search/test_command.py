"""`braidax plan --search`."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from braidax.cli import app
from braidax.parallel import Link
from braidax.tune import Cluster


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", "digits", "--search", *arguments], env={"COLUMNS": "160"})
    return result.exit_code, result.output


def test_a_cluster_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where the digits are written
    file = tmp_path / "cluster.json"
    file.write_text(Cluster(64, 1e12, Link(1e10, 1e-5)).to_json())
    code, output = run("--cluster", str(file))
    assert code == 0, output
    assert " candidates, of which 0 need too much memory\n" in output
    assert " wins\n" in output
    code, output = run("--cluster", str(file), "--memory-gb", "1e-9")
    assert code == 1
    assert "memory_bytes=1: it binds" in output
    file.write_text("[]")
    code, output = run("--cluster", str(file))
    assert (code, "cluster.json is no cluster" in output) == (1, True)


def test_what_does_not_go_with_it_is_refused() -> None:
    code, output = run("--mesh", "data=2")
    assert (code, "leave out --mesh" in output) == (2, True)
    code, output = run("--target", "h100:8")
    assert (code, "give --cluster FILE, too" in output) == (2, True)
