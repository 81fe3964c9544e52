"""The tutorial: its two files and its commands, one after the other, in an empty folder; stopped, and gone on with.

And the page of one's own model, whose three models are all trained as it says.
"""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.laws.pages import blocks, fresh_processes
from tests.support.tree import ROOT


def python(folder: Path, *arguments: str) -> str:
    """Runs Python in a folder, and returns what it wrote."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=True).stdout


@pytest.mark.slow
def test_the_tutorial_trains_stops_and_goes_on(tmp_path: Path) -> None:
    make, train = (code for _, code, _ in blocks((ROOT / "docs" / "tutorial.md").read_text())[:2])
    (tmp_path / "make.py").write_text(make)
    (tmp_path / "train.py").write_text(train)
    python(tmp_path, "make.py")
    assert "8,000" in python(tmp_path, "-m", "braidax", "inspect", "train.npz")
    assert "step 250/250" in python(tmp_path, "train.py")

    command = [sys.executable, "-u", "train.py", "1000"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "going on after step 250\n"
        assert any(line.startswith("epoch 3 done") for line in run.stdout)
        run.send_signal(signal.SIGINT)
        run.stdout.read()
    assert run.returncode == -signal.SIGINT

    stopped = steps_done(tmp_path)
    epochs = stopped // 125 + 1
    launch = ("-m", "braidax", "launch", "--processes", "2", "train.py", str(epochs))
    assert f"going on after step {stopped}\n" in python(tmp_path, *launch)
    assert steps_done(tmp_path) == epochs * 125
    assert "verified" in python(tmp_path, "-m", "braidax", "inspect", "runs/first")
    exported = python(tmp_path, "-m", "braidax", "export", "runs/first", "model.safetensors")
    assert exported == f"model.safetensors: the parameters of step {epochs * 125:,}, 79,872 bytes\n"


def steps_done(folder: Path) -> int:
    """Returns the number of the last step in the metrics."""
    lines = [json.loads(line) for line in (folder / "runs/first/metrics.jsonl").read_text().splitlines()]
    return max(line["step"] for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("library", ["nnx", "eqx"])
def test_a_model_of_another_library_is_trained_by_the_same_lines(library: str, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "own_model.md").read_text()
    models, train = page.split("\n## Train\n")
    assert train.count("linen_") >= 4
    (tmp_path / "page.md").write_text(models + "\n" + re.sub("linen_(init|logits)", rf"{library}_\1", train))
    with fresh_processes() as pages:
        status, output = pages.run(tmp_path / "page.md", tmp_path)
    assert status == 0, output
    assert "going on after step 40\n" in output
    exported = python(tmp_path, "-m", "braidax", "export", "runs/own", "exported.safetensors")
    assert exported.startswith("exported.safetensors: the parameters of step 80, ")
