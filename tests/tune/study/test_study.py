"""One real study of a tiny network: killed, gone on with, reported."""

import csv
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from braidax.cores import usable_cores
from braidax.errors import ArgumentError, CallFailed
from braidax.gang.program import Program
from braidax.tune.study import Design, Place, Progress, Run, StudyFolder, Written, run_study, write_report
from braidax.tune.study.findings import find
from braidax.tune.study.report.charts import milliseconds
from tests.support.tree import ROOT
from tests.support.tune.study.tiny import ABOUT, CASE, DESIGN, fail

PLACE = Place(devices=2)
LIMIT_SECONDS = 120.0


class Studied:
    """The study when it was over: what was there after the kill, what was told then, what was written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.killed = _killed(path)
        self.told: list[Progress] = []
        self.folder = StudyFolder(path, ABOUT)
        self.kept = self.folder.runs
        run_study(CASE, DESIGN, self.folder, place=PLACE, tell=self.told.append)
        self.written: Written = write_report(self.folder, CASE, DESIGN)
        self.page = self.written.page.read_text()
        self.results: dict[str, Any] = json.loads(self.written.results.read_text())


def _killed(path: Path) -> bytes:
    """Kills a study that has begun as `kill -9` does, and cuts its last line; returns the lines that it had kept."""
    runs = path / "runs.jsonl"
    program = Program("tests.support.tune.study.killed", (str(path),), "module", "nothing")
    process = subprocess.Popen([sys.executable, *program.command], env=dict(os.environ), cwd=str(ROOT))
    try:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not (runs.exists() and runs.read_bytes().count(b"\n") >= 2):
            assert process.poll() is None, "the study ended before it was killed"
            assert time.monotonic() < deadline, "no run was over in time"
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
    kept = runs.read_bytes()
    runs.write_bytes(kept + kept[: len(kept) // 3].rstrip(b"\n"))
    return kept


@pytest.fixture(scope="module")
def studied(tmp_path_factory: pytest.TempPathFactory) -> Studied:
    return Studied(tmp_path_factory.mktemp("study") / "tiny")


def test_a_killed_study_keeps_its_runs_and_goes_on(studied: Studied) -> None:
    assert (studied.path / "runs.jsonl").read_bytes().startswith(studied.killed)
    order = [(run.block, run.setting) for run in studied.folder.runs]
    assert order == list(DESIGN.order())
    num_kept = studied.killed.count(b"\n")
    assert studied.kept == studied.folder.runs[:num_kept]
    runs = [one.doing for one in studied.told if one.doing.startswith("block ")]
    assert len(runs) == len(DESIGN.order()) - num_kept


def test_progress_counts_up_to_its_end(studied: Studied) -> None:
    done = [one.done for one in studied.told]
    assert done == sorted(done)
    assert studied.told[-1].done == studied.told[-1].total
    assert studied.told[0].left_seconds > studied.told[-1].left_seconds == 0


def test_a_study_that_is_over_measures_nothing_more(studied: Studied) -> None:
    told: list[Progress] = []
    run_study(CASE, DESIGN, StudyFolder(studied.path, ABOUT), place=PLACE, tell=told.append)
    assert told == []
    assert not (studied.path / "scratch").exists()


def test_runs_are_of_real_steps_and_lanes_add_up(studied: Studied) -> None:
    for run in studied.folder.runs:
        assert len(run.steps) == DESIGN.length(run.setting).num_counted == 4
        assert sum(run.steps) / 4 == pytest.approx(run.step_seconds)
        assert sum(run.lanes.values()) == pytest.approx(run.step_seconds, rel=0.01)
    saving = [run.lanes["snapshot stall"] > 0 for run in studied.folder.runs if run.setting.checkpoint_every]
    others = [run.lanes["snapshot stall"] == 0 for run in studied.folder.runs if not run.setting.checkpoint_every]
    assert all(saving)
    assert all(others)


def test_runs_note_what_they_took_of_the_cores_and_what_was_waited_for(studied: Studied) -> None:
    for run in studied.folder.runs:
        assert run.use is not None
        assert run.use.num_cores == usable_cores()
        assert run.use.core_seconds > 0
        assert run.use.waited_seconds <= run.lanes["snapshot stall"] + 1e-9
        assert (run.use.saving_seconds > 0) == (run.setting.checkpoint_every is not None)


def _events(path: Path) -> list[dict[str, Any]]:
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def test_traces_show_checkpoints_where_they_were_on(studied: Studied) -> None:
    for setting in DESIGN.settings:
        events = _events(studied.path / "traces" / f"{setting.name}.json.gz")
        lanes = {event["cat"] for event in events if event["ph"] == "X"}
        assert "step" in lanes
        assert ("checkpoint" in lanes) == (setting.checkpoint_every is not None)


def test_the_page_asks_for_nothing_from_elsewhere(studied: Studied) -> None:
    assert "http" not in studied.page.replace("http-equiv", "")
    assert not re.search(r"<(link|img|iframe|script src|object|embed)|@import|url\(", studied.page)
    assert "prefers-color-scheme:dark" in studied.page
    assert 'name="viewport"' in studied.page


def test_numbers_of_the_page_are_those_of_the_results_and_lead_to_traces(studied: Studied) -> None:
    carried = re.search(r'<script type="application/json" id="results">(.*?)</script>', studied.page, re.DOTALL)
    assert carried is not None
    assert json.loads(carried[1]) == studied.results
    for one in studied.results["settings"]:
        ids = re.findall(rf'<details id="(t\d+)"><summary>{re.escape(one["label"])}: ([\d.]+) ms', studied.page)
        assert len(ids) == 1
        anchor, number = ids[0]
        assert number == milliseconds(one["seconds"]["value"])
        assert f'<a href="#{anchor}">{number}</a>' in studied.page
        for lane, seconds in one["lanes"].items():
            assert f'<a href="#{anchor}">{milliseconds(seconds)}</a>' in studied.page, lane
        assert (studied.path / one["trace"]).exists()
    for one in [*studied.results["effects"], *studied.results["crossed"]]:
        assert f">{milliseconds(one['alone']['value'])}</a>" in studied.page
        assert one["verdict"] in studied.page
    anchors = set(re.findall(r'href="#(t\d+)"', studied.page))
    assert anchors == set(re.findall(r'id="(t\d+)"', studied.page))


def test_what_was_predicted_is_in_all_that_is_written(studied: Studied) -> None:
    (crossed,) = studied.results["crossed"]
    assert crossed["held"] == "undecided"  # two blocks decide nothing
    seconds = crossed["predicted"]["seconds"]
    assert sum(crossed["predicted"]["lanes"].values()) == pytest.approx(seconds)
    assert f'>{milliseconds(seconds)}</td><td class="words">undecided</td>' in studied.page
    rows = csv.DictReader(studied.written.tables[1].read_text().splitlines())
    (row,) = (row for row in rows if row["what"] == "interaction, predicted")
    assert (float(row["seconds"]), row["verdict"]) == (seconds, "undecided")


def test_results_are_the_medians_of_the_runs(studied: Studied) -> None:
    for one in studied.results["settings"]:
        seconds = [run.step_seconds for run in studied.folder.runs if run.setting.name == one["name"]]
        assert one["seconds"]["value"] == pytest.approx(sum(seconds) / 2)
        assert (one["seconds"]["low"], one["seconds"]["high"]) == (min(seconds), max(seconds))
        assert one["seconds"]["coverage"] == 0.5
    (hypothesis,) = studied.results["hypotheses"]
    assert hypothesis["pair"] == "checkfreq-ddp"
    assert hypothesis["verdict"] in ("confirmed", "refuted", "undecided")


def test_tables_have_a_row_for_each_run(studied: Studied) -> None:
    runs, effects = ([*csv.DictReader(path.read_text().splitlines())] for path in studied.written.tables)
    assert [float(row["step_seconds"]) for row in runs] == [run.step_seconds for run in studied.folder.runs]
    assert {row["what"] for row in effects} >= {
        "effect, alone",
        "interaction, alone",
        "interaction, predicted",
        "all on less the best single one",
    }


def test_the_poster_is_a_pdf_of_one_page(studied: Studied) -> None:
    data = studied.written.poster.read_bytes()
    assert data.startswith(b"%PDF-1.7")
    assert data.rstrip().endswith(b"%%EOF")
    assert data.count(b"/Type /Page ") == 1
    place = int(data.rsplit(b"startxref\n", 1)[1].split()[0])
    assert data[place : place + 4] == b"xref"
    for number, offset in enumerate(re.findall(rb"(\d{10}) 00000 n ", data), 1):
        assert data[int(offset) :].startswith(b"%d 0 obj" % number)
    assert b"All on worse than the best single one?" in data


def test_a_report_needs_a_whole_block(studied: Studied) -> None:
    runs: list[Run] = list(studied.folder.runs)
    with pytest.raises(ArgumentError, match="runs has 3 runs, and no block with all 4 settings: run the study on"):
        find(DESIGN, runs[:3])
    assert find(DESIGN, runs[:4]).timed[0].seconds.num_blocks == 1


@pytest.mark.parametrize("num_bytes", [None, 0, 5, 500])
def test_a_trace_that_is_gone_or_cut_is_named(studied: Studied, tmp_path: Path, num_bytes: int | None) -> None:
    folder = StudyFolder(tmp_path, ABOUT)
    for run in studied.folder.runs:
        folder.append(run)
    if num_bytes is not None:
        shutil.copytree(studied.path / "traces", tmp_path / "traces")
        os.truncate(tmp_path / "traces" / "nothing.json.gz", num_bytes)
    with pytest.raises(ArgumentError, match=r"nothing\.json\.gz is no trace of this study .* give another --out"):
        write_report(folder, CASE, DESIGN)


def test_what_training_raises_comes_out(tmp_path: Path) -> None:
    case = replace(CASE, make=fail)
    with pytest.raises(CallFailed, match="ValueError: no samples today"):
        run_study(case, DESIGN, StudyFolder(tmp_path, ABOUT), place=PLACE)


@pytest.mark.slow
def test_two_processes_train_in_stages(tmp_path: Path) -> None:
    design = Design(("pipedream-prefetch",), num_blocks=1, num_steps=3)
    folder = StudyFolder(tmp_path, ABOUT)
    run_study(CASE, design, folder, place=Place(processes=2, devices=2))
    assert {run.setting.microbatches for run in folder.runs} == {None, 4}
    trace = _events(tmp_path / "traces" / "microbatches=4.json.gz")
    steps = {(event["pid"], event["name"]) for event in trace if event["ph"] == "X" and event["cat"] == "step"}
    assert len({pid for pid, _ in steps}) == 2
    assert len(steps) == 2 * (4 + 3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"processes": 3}, "processes=3: expected 1 or 2, each of which can have a stage"),
        ({"devices": 3}, "devices=3: expected a multiple of 2, the number of stages"),
    ],
)
def test_places_that_cannot_be(options: dict[str, int], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        Place(**options)
