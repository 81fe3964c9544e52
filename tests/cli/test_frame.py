"""`braidax frame`: a program that is written for Polars in one process, run on ranks; its words, errors and signals."""

import contextlib
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from typer.testing import CliRunner

from braidax.cli import app
from braidax.gang import LocalGang
from tests.support.gang.programs import wait_until_gone
from tests.support.terminal import on_terminal

COMMAND = [sys.executable, "-m", "braidax.cli", "frame"]
PREPARE = """
import os, sys
import polars as pl
from beside import DIVISOR

def share(x):
    return x / DIVISOR

table = pl.LazyFrame({"k": [i % 7 for i in range(100)], "v": range(100)})
pid = pl.col("v").map_batches(lambda v: v * 0 + os.getpid()).first().alias("pid")
sums = table.group_by("k").agg(pl.col("v").sum(), pid)
found = sums.sort("k").collect()
assert set(found["pid"]) & {os.getpid()} == set(), "it was computed here"
found.drop("pid").write_csv(sys.argv[1])
table.sort("v", descending=True).with_columns(
    pl.col("v").map_batches(share, return_dtype=pl.Float64, is_elementwise=True).alias("half")
).sink_parquet("sorted.parquet", compression="lz4", row_group_size=30)
table.sink_csv("again.csv", separator=";")
assert table.select(pl.len()).collect(engine="streaming").item() == 100
assert [one.height for one in pl.collect_all([table, table.head(3)])] == [100, 3]
table.describe()
table.collect().filter(pl.col("v") > 3).group_by("k").len()
pl.read_parquet("sorted.parquet")
print(sys.argv[1:], __name__, __file__)
"""
TOLD = (
    "braidax frame: 4 plans ran on 2 ranks; on Polars alone, in this process: 1 × collect(engine='streaming'), "
    "1 × collect_all, 1 × describe\n"
)


def run(*arguments: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*COMMAND, *arguments], cwd=folder, capture_output=True, text=True, timeout=100, check=False)


def test_a_program_gets_on_ranks_what_polars_gives(tmp_path: Path) -> None:
    (tmp_path / "prepare.py").write_text(PREPARE)
    (tmp_path / "beside.py").write_text("DIVISOR = 2")
    ended = run("prepare.py", "--ranks", "2", "sums.csv", "--ranks", "9", folder=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, TOLD)
    assert ended.stdout == "['sums.csv', '--ranks', '9'] __main__ prepare.py\n"
    table = pl.DataFrame({"k": [i % 7 for i in range(100)], "v": range(100)})
    assert pl.read_csv(tmp_path / "sums.csv").equals(table.group_by("k").agg(pl.col("v").sum()).sort("k"))
    expected = table.sort("v", descending=True).with_columns((pl.col("v") / 2).alias("half"))
    assert pl.read_parquet(tmp_path / "sorted.parquet").equals(expected)
    assert pl.scan_parquet(tmp_path / "sorted.parquet").select(pl.len()).collect().item() == 100
    assert pl.read_csv(tmp_path / "again.csv", separator=";").equals(table)


@pytest.fixture(scope="module")
def rank() -> Iterator[LocalGang]:
    with LocalGang(1) as gang:
        yield gang


Run = Callable[[str], tuple[int, str, str]]


@pytest.fixture
def run_here(rank: LocalGang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the command in this process on a rank that is there, and checks that it leaves all else as it was."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("braidax.cli.frame.LocalGang", lambda ranks: contextlib.nullcontext(rank))

    def state() -> Any:
        return dict(vars(pl.LazyFrame)), pl.collect_all, sys.argv, list(sys.path), rank.names()

    def run(script: str) -> tuple[int, str, str]:
        (tmp_path / "script.py").write_text("import polars as pl\n" + script)
        before = state()
        result = CliRunner().invoke(app, ["frame", "--ranks", "1", "script.py"], env={"COLUMNS": "200"})
        assert state() == before
        return result.exit_code, result.stdout, result.stderr

    return run


@pytest.mark.parametrize(
    ("script", "code", "said"),
    [
        ("print('nothing')", 0, "braidax frame: 0 plans ran on 1 rank; on Polars alone, in this process: none\n"),
        ("import sys; pl.LazyFrame({'a': [1]}).collect(); sys.exit(7)", 7, "braidax frame: 1 plan ran on 1 rank; "),
        ("pl.LazyFrame({'a': [1]}).sink_csv('a.csv', lazy=True)", 0, "process: 1 × sink_csv(lazy=True)\n"),
        (
            "pl.LazyFrame({'a': [1]}).collect(optimizations=pl.QueryOptFlags.none())",
            0,
            "process: 1 × collect(optimizations=…)\n",
        ),
    ],
)
def test_where_plans_ran_is_told_however_a_program_ends(script: str, code: int, said: str, run_here: Run) -> None:
    found = run_here(script)
    assert (found[0], said in found[2]) == (code, True), found


def test_what_a_program_raises_is_shown_from_its_own_first_line(run_here: Run) -> None:
    code, _, told = run_here("raise KeyError('x')")
    assert code == 1
    assert told.startswith('Traceback (most recent call last):\n  File "script.py", line 2, in <module>\n')
    assert told.endswith(
        "KeyError: 'x'\nbraidax frame: 0 plans ran on 1 rank; on Polars alone, in this process: none\n"
    )


def test_a_program_catches_what_polars_raises(run_here: Run) -> None:
    script = (
        "for wrong in (pl.col('a').str.to_integer(), pl.col('b')):\n"
        "    try:\n"
        "        pl.LazyFrame({'a': ['x']}).select(wrong).collect()\n"
        "    except pl.exceptions.PolarsError as error:\n"
        "        print(type(error).__name__, *error.__notes__[:1] if hasattr(error, '__notes__') else ['here'])\n"
    )
    code, shown, _ = run_here(script)
    assert (code, shown.splitlines()) == (0, ["ComputeError on rank 0 of a gang", "ColumnNotFoundError here"])


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--ranks", "0", "script.py"], 2, "Invalid value for '--ranks'"),
        (["script.py", "--ranks=no"], 2, "Invalid value for '--ranks'"),
        (["script.py", "--gang", "slurm"], 2, "Invalid value for '--gang'"),
        (["script.py", "--ranks"], 1, "error: --ranks is not given"),
        (["--ranks"], 2, "'--ranks' requires an argument"),
        (["-x", "script.py"], 2, "No such option: -x"),
        ([], 2, "Missing argument 'SCRIPT'"),
        (["nothere.py", "--ranks", "2"], 1, "error: SCRIPT nothere.py: there is none (seen from "),
        ([".", "--ranks", "2"], 1, "error: SCRIPT .: is a folder; expected the path of a Python file"),
        (["script.py"], 1, "error: --ranks is not given: say how many ranks to start, such as `braidax frame --ranks"),
        (["script.py", "--", "--ranks", "2"], 1, "error: --ranks is not given"),
        (["script.py", "--gang", "ray"], 1, "error: --ranks is not given"),
        (
            ["--scheduler", "tcp://a:1", "script.py"],
            1,
            "error: --scheduler tcp://a:1 is of --gang dask, and not of local",
        ),
        (["script.py", "--gang", "dask"], 1, "DASK_SCHEDULER_ADDRESS is not set"),
    ],
)
def test_what_cannot_run_is_said_before_a_process_is_started(
    arguments: list[str], code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*arguments: object, **options: object) -> None:
        raise AssertionError("started")

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DASK_SCHEDULER_ADDRESS", raising=False)
    (tmp_path / "script.py").write_text("raise AssertionError('it runs')")
    monkeypatch.setattr("braidax.cli.frame.LocalGang", start)
    result = CliRunner().invoke(app, ["frame", *arguments], env={"COLUMNS": "200"})
    words = " ".join(result.output.split())
    assert (result.exit_code, said in words) == (code, True), result.output


WAITING = """
import os, time
import polars as pl

def wait(x):
    os.write(1, f"pid {os.getpid()}\\n".encode())  # at once: Polars calls this in several threads
    time.sleep(600)
    return x

pl.LazyFrame({"a": range(4)}).with_columns(pl.col("a").map_elements(wait, return_dtype=pl.Int64)).collect()
"""


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, -signal.SIGTERM, marks=pytest.mark.slow)],
)
def test_a_signal_ends_program_and_ranks(number: int, code: int, tmp_path: Path) -> None:
    (tmp_path / "waiting.py").write_text(WAITING)
    with subprocess.Popen(
        [*COMMAND, "waiting.py", "--ranks", "2"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        pids: set[int] = set()
        for line in process.stdout:
            pids |= {int(pid) for pid in re.findall(r"^\[\d\] pid (\d+)$", line, re.MULTILINE)}
            if len(pids) == 2:
                break
        process.send_signal(number)
        _, told = process.communicate(timeout=60)
    assert process.returncode == code, told
    if number == signal.SIGINT:
        assert told.endswith("on Polars alone, in this process: none\ninterrupted\n")
        assert "Traceback" not in told
    wait_until_gone(sorted(pids), seconds=10)


def test_what_ranks_do_is_shown_on_a_terminal_and_stdout_is_the_program_s(tmp_path: Path) -> None:
    """The program's plan takes until somebody has seen it there."""
    until_seen = "[time.sleep(0.01) for _ in range(6000) if not os.path.exists('go')]; print('went on', flush=True)"
    script = WAITING.replace("time.sleep(600)", until_seen)
    (tmp_path / "waiting.py").write_text(f"{script}\nprint('ended')")
    with on_terminal([*COMMAND, "--ranks", "2", "waiting.py"], tmp_path) as terminal:
        terminal.until("HStack .*runs on 2 of 2")
        (tmp_path / "go").touch()
        told = terminal.rest()
    assert (terminal.process.returncode, told.splitlines()[-1]) == (0, "ended")
    assert "HStack" not in told
    assert ("[0] went on" in told, "went on" in terminal.text) == (True, False)
    assert terminal.written.endswith(
        "\x1b[2Kbraidax frame: 1 plan ran on 2 ranks; on Polars alone, in this process: none\r\n"
    )
