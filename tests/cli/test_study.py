"""`braidax study`: interrupted, gone on with, and what it refuses."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from braidax.cli import app
from braidax.cli.cases import CASES, find_case
from braidax.tasks.generated import write_cifar10, write_image_folders, write_reviews
from braidax.tune import LANES
from braidax.tune.study import Case, Design, Run, StudyFolder, Written
from braidax.tune.study.findings import find

LIMIT_SECONDS = 240.0


OPTIONS = ["--case", "digits", "--quick", "--blocks", "1", "--pairs", "sync-prefetch"]


def command(out: Path) -> list[str]:
    return [sys.executable, "-m", "braidax", "study", *OPTIONS, "--out", str(out)]


def test_what_an_interrupted_study_keeps_and_what_it_found_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of runs that are made up: real ones are interrupted below, and in tests/tune/study."""

    def measure(case: Case, design: Design, folder: StudyFolder, **options: Any) -> None:
        at = len(folder.runs)
        for number, (block, setting) in enumerate(design.order()[at : at + 3], at):
            seconds = 0.25 + number / 100
            folder.append(Run(block, setting, seconds, dict.fromkeys(LANES, 0.0) | {"compute": seconds}, (seconds,)))
        if len(folder.runs) < len(design.order()):
            raise KeyboardInterrupt

    def report(folder: StudyFolder, case: Case, design: Design) -> Written:
        page, poster, results, table = (folder.write(name, b"") for name in ("page", "poster", "results", "table"))
        return Written(page, poster, results, (table,), find(design, folder.runs))

    monkeypatch.setattr("braidax.cli.study.run_study", measure)
    monkeypatch.setattr("braidax.cli.study.write_report", report)
    out = tmp_path / "study"
    first, second = (
        CliRunner().invoke(app, ["study", *OPTIONS, "--out", str(out)], env={"COLUMNS": "200"}) for _ in range(2)
    )
    assert first.exit_code == 130, first.output
    assert "5 settings, 1 block, 5 runs\n" in first.stdout
    assert f"interrupted: {out} keeps 3 of 5 runs; run the same command to go on" in " ".join(first.stdout.split())
    assert second.exit_code == 0, second.output
    assert "5 settings, 1 block, 5 runs, 3 of them done before" in second.stdout
    assert "data: 1,500 real 8×8 images that scikit-learn ships" in second.stdout
    assert "sync-prefetch: all on worse than the best single one? Undecided: " in second.stdout
    for name in ("page", "poster", "results", "table"):
        assert str(out / name) in second.stdout


@pytest.mark.slow  # above, and tests/tune/study/test_study.py::test_a_killed_study_keeps_its_runs_and_goes_on
def test_digits_are_studied_and_an_interrupted_study_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "study"
    environment = {**os.environ, "BRAIDAX_CACHE": str(tmp_path / "cache"), "COLUMNS": "200"}
    process = subprocess.Popen(command(out), stdout=subprocess.PIPE, text=True, env=environment)
    try:
        deadline, runs = time.monotonic() + LIMIT_SECONDS, out / "runs.jsonl"
        while not (runs.exists() and runs.read_bytes()):
            assert process.poll() is None, "the study ended before it was interrupted"
            assert time.monotonic() < deadline, "no run was over in time"
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        told = process.communicate(timeout=LIMIT_SECONDS)[0]
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    kept = re.search(r"interrupted: \S+ keeps (\d) of 5 runs; run the same command to go on", told)
    assert kept is not None, told
    done = subprocess.run(command(out), capture_output=True, text=True, env=environment, check=True)
    assert f"5 settings, 1 block, 5 runs, {kept[1]} of them done before" in done.stdout
    assert "data: 1,500 real 8×8 images that scikit-learn ships" in done.stdout
    assert "sync-prefetch: all on worse than the best single one? Undecided: " in done.stdout
    for name in ("report.html", "poster.pdf", "results.json", "runs.csv"):
        assert (out / name).exists()
        assert str(out / name) in done.stdout
    assert not (out / "scratch").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--case", "mnist"], "error: --case mnist: there is no such case; expected one of digits, cifar-resnet18, "),
        (["--pairs", "all"], "error: --pairs all: 'all' is no experiment; expected some of checkfreq-ddp, "),
        (["--limit", "gpu=2"], "error: --limit gpu=2: 'gpu' is no limit, or there twice; expected some of memory=2G"),
        (["--limit", "memory=9"], "error: limit memory=9 bytes: JAX alone takes 512M; allow more"),
        (["--data", "x"], "error: --data x: the case digits has its own samples, 1,500 real 8×8 images"),
        (
            ["--case", "cifar-resnet18", "--data", "/no/where"],
            "error: --data /no/where: there is nothing; expected CIFAR-10 as downloaded",
        ),
    ],
)
def test_what_cannot_be_studied_is_said_before_anything_is_made(tmp_path: Path, options: list[str], words: str) -> None:
    out = tmp_path / "out"
    done = CliRunner().invoke(app, ["study", "--out", str(out), *options])
    assert done.exit_code == 1
    assert done.stderr.startswith(words)
    assert not out.exists()


def test_folders_of_others_and_of_other_versions_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    done = CliRunner().invoke(app, ["study", "--quick", "--out", str(tmp_path)])
    assert done.exit_code == 1
    assert "has files that are of no study (notes.txt), which stay as they are; give an empty folder" in done.stderr
    (tmp_path / "study.json").write_text('{"format": "braidax study 9"}')
    done = CliRunner().invoke(app, ["study", "--quick", "--out", str(tmp_path)])
    assert done.exit_code == 1
    assert "is of the version 'braidax study 9', and this braidax reads and writes 'braidax study 2'" in done.stderr


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name.endswith("resnet50") else ()) for name in CASES]
)
def test_every_case_has_its_samples(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few made-up ones, in the files that the real ones come in."""
    monkeypatch.setenv("BRAIDAX_CACHE", str(tmp_path / "cache"))
    kind = name.partition("-")[0]
    few = {
        "cifar": lambda: write_cifar10(tmp_path, num_train=40, num_test=4),
        "imagenet": lambda: write_image_folders(tmp_path, num_classes=2, num_each=5, size=(120, 160)),
        "imdb": lambda: write_reviews(tmp_path, num_train=8, num_test=4),
    }
    data = few[kind]() if kind in few else None
    case = find_case(name, data, quick=True)
    work = case.make()
    spec = work.source.sample_spec
    if kind == "imdb":
        assert (spec["words"].shape, len(work.source)) == ((32,), 8)
    else:
        size = {"digits": (8, 8, 1), "cifar": (32, 32, 3), "imagenet": (96, 96, 3)}[kind]
        assert (spec["image"].shape, len(work.source)) == (size, {"digits": 1500, "cifar": 40, "imagenet": 10}[kind])
    assert case.mixes_samples == (kind != "imdb")
    assert ("not the real" in case.facts["data"]) is False
