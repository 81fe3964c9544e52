"""What a run has found is saved whole or not at all, and the page is made from it."""

import json
import os
from pathlib import Path

import pytest

from benchmarks import page
from benchmarks.harness import Report, arguments, run
from benchmarks.harness.files import write_whole


def _saved(path: Path, *asked: str) -> None:
    found = Report(arguments("comm", "Messages.", ["messages"]).parse_args(["--json", str(path), *asked]), "no-such")
    for at, ours, gloo in (("8 B", [1, 1, 2], [4, 4, 4]), ("1 GiB", [20, 30, 20], [10, 10, 10])):
        found.add("messages, 2 ranks", "ours", "one way", "us", ours, at=at)
        found.add("messages, 2 ranks", "gloo", "one way", "us", gloo, at=at)
    found.missing("messages, 2 ranks", "mpi4py", "not installed (mpi4py)")
    found.add("start", "ours", "to the first barrier", "s", [0.5])
    found.against("tcp", "messages, 2 ranks", "one way", ours="ours", peers=["gloo", "mpi4py"])
    found.at_most("start", 0.5, 0.4)
    found.at_most("idle", 0.5, 2)
    found.finish()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "comm").mkdir()
    (tmp_path / "opening.md").write_text("# Benchmarks\n")
    (tmp_path / "comm" / "notes.md").write_text("One host.\n")
    (tmp_path / "reasons.toml").write_text(
        '[comm.tcp]\nwhy = "copies twice"\nchange = "a copy less"\n[naive]\nnot_run = "2026"\n'
    )
    return tmp_path


def test_the_page_is_made_from_results(folder: Path) -> None:
    _saved(folder / "results" / "comm.json")
    written = page.page(folder, ["comm", "naive"])
    assert written.index("## Where a peer wins") < written.index("## comm")
    lines = written.splitlines()
    assert (
        "| comm | `tcp`: one way, messages, 2 ranks | ours | 1 GiB: **0.5 (0.333–0.5)** of gloo | copies twice "
        "| a copy less |" in lines
    )
    assert "| comm | `start` | 0.5 | <= 0.4 | not known yet | not known yet |" in lines
    assert "| `tcp` | 0.5 (0.333–0.5) | gloo at 1 GiB, without mpi4py | >= 1 | **no** |" in lines
    assert "| `idle` | 0.5 |  | <= 2 | yes |" in lines
    assert "|  | ours / best peer | ours | gloo | mpi4py |" in lines
    assert "| 8 B | **4 (2–4)** of gloo | 1 (1–2) | 4 | not installed (mpi4py) |" in lines
    assert "| 1 GiB | **0.5 (0.333–0.5)** of gloo | 20 (20–30) | 10 | not installed (mpi4py) |" in lines
    assert "- mpi4py is missing: not installed (mpi4py)" in lines
    assert "One host." in lines
    assert written.endswith("## naive\n\n*Not run yet since 2026.*\n")


def test_a_reason_that_nothing_needs_is_said(folder: Path) -> None:
    with (folder / "reasons.toml").open("a") as file:
        file.write('[comm.idle]\nwhy = "x"\nchange = "y"\n[chess]\n')
    assert page.unneeded(folder, ["comm", "naive"]) == ["reasons.toml: there is no benchmark 'chess'"]
    _saved(folder / "results" / "comm.json")
    assert page.unneeded(folder, ["comm", "naive"]) == [
        "reasons.toml: comm.idle needs no reason",
        "reasons.toml: there is no benchmark 'chess'",
    ]


def test_a_quick_or_partial_run_is_no_result(folder: Path) -> None:
    for asked, words in ((["--quick"], "--quick"), (["--only", "messages"], "--only")):
        with pytest.raises(SystemExit, match=f"{words} --json: the page shows whole runs only; name a FILE"):
            Report(arguments("comm", "Messages.", ["messages"]).parse_args([*asked, "--json"]))
        with pytest.raises(SystemExit, match=words):
            path = os.path.relpath(page.FOLDER / "results" / "comm.json")
            Report(arguments("comm", "Messages.", ["messages"]).parse_args([*asked, "--json", path]))
    _saved(folder / "results" / "comm.json", "--quick")
    with pytest.raises(ValueError, match=r"comm\.json: expected a whole run of form 1, found 1 or --quick"):
        page.page(folder, ["comm"])


def test_no_file_is_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "comm.json"
    _saved(path)
    before = path.read_text()
    assert json.loads(before)["rows"][0]["values"] == [1, 1, 2]

    def stopped(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", stopped)
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, "half")
    assert [file.name for file in tmp_path.iterdir()] == ["comm.json"]
    assert path.read_text() == before


def test_a_benchmark_that_is_stopped_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> int:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as ended:
        run(main)
    assert ended.value.code == 130
    assert "stopped by Ctrl-C" in capsys.readouterr().err


def test_the_readme_is_the_page() -> None:
    assert (page.FOLDER / "README.md").read_text() == page.page(page.FOLDER)
