"""The folder of a study: what is kept, gone on with, and refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from braidax.errors import ArgumentError
from braidax.tune import LANES
from braidax.tune.study import FORMAT, Run, Setting, StudyFolder, Use
from tests.support.tune.study.tiny import ABOUT


def run(block: int) -> Run:
    lanes = dict.fromkeys(LANES, 0.0) | {"compute": 0.25}
    return Run(block, Setting(prefetch=2), 0.25, lanes, (0.2, 0.3))


def test_runs_are_kept_and_a_line_that_was_cut_is_taken_away(tmp_path: Path) -> None:
    folder = StudyFolder(tmp_path / "s", ABOUT)
    folder.append(run(0))
    folder.append(run(1))
    path = tmp_path / "s" / "runs.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])  # as a kill amid a write leaves it
    again = StudyFolder(tmp_path / "s", ABOUT)
    assert again.runs == (run(0),)
    again.append(run(1))
    assert path.read_bytes() == whole
    assert StudyFolder(tmp_path / "s", ABOUT).runs == (run(0), run(1))


def test_nothing_of_a_killed_study_is_among_the_checkpoints_of_the_next_one(tmp_path: Path) -> None:
    folder = StudyFolder(tmp_path / "s", ABOUT)
    left = tmp_path / "s" / "scratch" / "run" / "step-00000002"
    left.mkdir(parents=True)
    with folder.scratch() as scratch:
        assert not left.exists()
        left.mkdir(parents=True)  # by a process that has not ended yet
        assert list(scratch.iterdir()) == []
    assert not (tmp_path / "s" / "scratch").exists()


def test_a_run_keeps_what_it_took_of_the_cores_and_one_without_is_read() -> None:
    used = replace(run(0), use=Use(core_seconds=0.4, num_cores=2.0, saving_seconds=0.1, waited_seconds=0.01))
    assert Run.from_line(used.to_line(), "here") == used
    assert '"use"' not in run(0).to_line()
    for strange, words in (
        (Use(-1.0, 2.0, 0.0, 0.0), "a number that is no time"),
        (Use(0.4, 0.0, 0.0, 0.0), "it has no cores"),
    ):
        with pytest.raises(ArgumentError, match=rf"here has .*{words}"):
            Run.from_line(replace(used, use=strange).to_line(), "here")


def test_a_line_that_is_no_run_is_named(tmp_path: Path) -> None:
    folder = StudyFolder(tmp_path, ABOUT)
    folder.append(run(0))
    path = tmp_path / "runs.jsonl"
    path.write_text(path.read_text() + '{"block": 1, "setting": {"prefetch": -3}}\n')
    with pytest.raises(
        ArgumentError, match=r"runs\.jsonl:2 has '\{\"block\": 1, .*remove that line, and what it had is"
    ):
        StudyFolder(tmp_path, ABOUT)
    path.write_text(run(0).to_line().replace("0.25", "NaN"))
    with pytest.raises(ArgumentError, match=r"runs\.jsonl:1 .*a number that is no time"):
        StudyFolder(tmp_path, ABOUT)


def test_a_folder_of_another_version_is_refused(tmp_path: Path) -> None:
    StudyFolder(tmp_path, ABOUT)
    path = tmp_path / "study.json"
    path.write_text(path.read_text().replace(FORMAT, "braidax study 0"))
    words = (
        "is of the version 'braidax study 0', and this braidax reads and writes 'braidax study 2'; give another folder"
    )
    with pytest.raises(ArgumentError, match=words):
        StudyFolder(tmp_path, ABOUT)


def test_another_study_says_what_differs(tmp_path: Path) -> None:
    StudyFolder(tmp_path, ABOUT)
    with pytest.raises(ArgumentError, match="has a study with another machine: cores is 2, not 4; give another folder"):
        StudyFolder(tmp_path, {**ABOUT, "machine": {"cores": 4}})


def test_files_of_others_stay_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ArgumentError, match=r"has files that are of no study \(thesis.txt\), which stay as they are"):
        StudyFolder(tmp_path, ABOUT)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    with pytest.raises(ArgumentError, match="is no folder that can be written to"):
        StudyFolder(tmp_path / "thesis.txt", ABOUT)


def test_a_report_is_replaced_only_while_it_is_the_studys_own(tmp_path: Path) -> None:
    folder = StudyFolder(tmp_path, ABOUT)
    folder.write("report.html", b"one")
    folder.write("report.html", b"two")
    assert (tmp_path / "report.html").read_bytes() == b"two"
    (tmp_path / "report.html").write_bytes(b"two, with my remarks")
    with pytest.raises(ArgumentError, match=r"report\.html is not as this study wrote it, and stays as it is; move it"):
        StudyFolder(tmp_path, ABOUT).write("report.html", b"three")
    assert (tmp_path / "report.html").read_bytes() == b"two, with my remarks"
    (tmp_path / "poster.pdf").write_bytes(b"a poster of somebody")
    with pytest.raises(ArgumentError, match=r"poster\.pdf is not as this study wrote it"):
        folder.write("poster.pdf", b"ours")


def test_a_kill_between_two_writes_does_not_lose_the_report(tmp_path: Path) -> None:
    """The list is written first: the file before is known then, and the one to come."""
    folder = StudyFolder(tmp_path, ABOUT)
    folder.write("a", b"one")
    written = json.loads((tmp_path / "written.json").read_text())
    folder.write("a", b"two")
    (tmp_path / "a").write_bytes(b"one")  # the list of both is there, the second file is not
    assert len(json.loads((tmp_path / "written.json").read_text())["a"]) == 1 + len(written["a"])
    StudyFolder(tmp_path, ABOUT).write("a", b"three")
    assert (tmp_path / "a").read_bytes() == b"three"
