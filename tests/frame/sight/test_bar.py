"""Bars of a plan that ranks compute: what is drawn on a terminal, what is not elsewhere, and what is left behind."""

import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import braidax.frame as bf
from braidax.errors import ArgumentError
from braidax.frame.sight import bar
from braidax.gang import LocalGang
from tests.support.gang.programs import wait_until_gone
from tests.support.terminal import CURSOR_HIDDEN, CURSOR_SHOWN, Terminal, on_terminal

PLAN = """
import os, sys, threading, time
import polars as pl
import braidax.frame as bf
from braidax.gang import LocalGang

def waiting():
    def wait(frame):
        told = [one.name for one in threading.enumerate() if one.name == "braidax-telling"]
        os.write(1, f"pid {os.getpid()} {told}\\n".encode())  # at once, if several threads do
        end = time.monotonic() + 100
        while not os.path.exists("go") and time.monotonic() < end:
            time.sleep(0.01)
        if os.path.exists("fail"):
            raise ValueError("as asked")
        return frame

    return wait

table = pl.DataFrame({"k": [i % 7 for i in range(4000)], "v": range(4000)})
waited = table.lazy().sort("v").map_batches(waiting(), streamable=True, schema=table.schema)
lazy = waited.group_by("k").agg(pl.col("v").median()).sort("k")
with LocalGang(2) as gang:
    try:
        found = bf.collect(lazy, gang, **OPTIONS)
        assert found.equals(table.lazy().group_by("k").agg(pl.col("v").median()).sort("k").collect())
    finally:
        print("threads", [one.name for one in threading.enumerate() if "bars" in one.name])
        print("the end", file=sys.stderr)
"""


def program(folder: Path, **options: Any) -> list[str]:
    (folder / "plan.py").write_text(PLAN.replace("OPTIONS", repr(options)))
    return [sys.executable, "plan.py"]


def check_ended(terminal: Terminal, told: str) -> None:
    """Checks that bars have gone, and who drew them."""
    assert "threads []" in told
    drawn, _, rest = terminal.written.partition("the end")
    assert drawn.count(CURSOR_HIDDEN) == drawn.count(CURSOR_SHOWN) == 1
    assert CURSOR_HIDDEN not in rest
    lines = drawn.rpartition(CURSOR_SHOWN)[2]
    assert re.fullmatch(r"[\r\n]*(\x1b\[1A\x1b\[2K)+", lines), lines  # each line is taken away


def test_a_bar_for_each_operation_is_drawn_and_goes(tmp_path: Path) -> None:
    with on_terminal(program(tmp_path, show="bar"), tmp_path) as terminal:
        terminal.until(r"MapFunction.* runs on 2 of 2")
        text = terminal.text
        assert re.search(r"table memory-1: k, v +4,000 rows .* skew 1\.00 +idle", text)
        assert re.search(r'Sort col\("v"\) .*sent \d', text)
        assert "GroupBy" not in text  # it has not begun
        assert "spilled" not in text
        (tmp_path / "go").touch()
        told = terminal.rest()
    assert terminal.process.returncode == 0, terminal.text
    check_ended(terminal, told)
    assert "[0] pid" in terminal.text + told  # what ranks print stays
    assert "['braidax-telling']" in told + terminal.text


def test_what_waits_on_disk_is_drawn(tmp_path: Path) -> None:
    script = PLAN.replace("**OPTIONS", "show='bar', memory=bf.Memory(32 << 20)").replace("range(4000)", "range(400000)")
    script = script.replace(
        "waited = table.lazy()", "waited = table.lazy().with_columns(s=pl.lit('x' * 50) + pl.col('v').cast(str))"
    )
    (tmp_path / "plan.py").write_text(script.replace("schema=table.schema", "schema={**table.schema, 's': pl.String}"))
    with on_terminal([sys.executable, "plan.py"], tmp_path) as terminal:
        terminal.until(r"Sort .* spilled \d")
        (tmp_path / "go").touch()
        told = terminal.rest()
    assert terminal.process.returncode == 0, terminal.text
    check_ended(terminal, told)


@pytest.mark.slow
def test_bars_go_when_the_plan_fails(tmp_path: Path) -> None:
    with on_terminal(program(tmp_path, show="bar"), tmp_path) as terminal:
        terminal.until(r" runs on 2 of 2")
        (tmp_path / "fail").touch()
        (tmp_path / "go").touch()
        told = terminal.rest()
    assert terminal.process.returncode == 1
    check_ended(terminal, told)
    assert "CallFailed" in terminal.text.partition("the end")[2]


@pytest.mark.slow  # Ctrl-C in a plan by day in tests/cli/test_frame.py
def test_bars_go_with_ctrl_c(tmp_path: Path) -> None:
    with on_terminal(program(tmp_path, show="bar"), tmp_path) as terminal:
        terminal.until(r" runs on 2 of 2")
        terminal.process.send_signal(signal.SIGINT)
        told = terminal.rest()
    assert terminal.process.returncode == -signal.SIGINT
    check_ended(terminal, told)
    assert terminal.text.rstrip().endswith("KeyboardInterrupt")
    wait_until_gone([int(pid) for pid in re.findall(r"pid (\d+)", told + terminal.text)], seconds=10)


def test_by_default_nothing_is_drawn_on_a_terminal(gang: LocalGang, monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(*arguments: object) -> None:
        raise AssertionError("drawn")

    monkeypatch.setattr(bar, "_Bars", draw)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    table = pl.DataFrame({"a": [3, 1, 2]})
    frame = bf.from_polars(table, gang).sort("a")
    assert frame.collect().equals(frame.persist().collect())
    assert bf.profile(frame.lazy_frame, gang)[0].equals(table.sort("a"))
    for call in (frame.collect, frame.persist, frame.profile):
        with pytest.raises(AssertionError, match="drawn"):
            call(show="bar")


def test_without_a_terminal_nothing_is_drawn_nor_told(tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    done = subprocess.run(
        program(tmp_path, show="bar"), cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stderr) == (0, "the end\n")
    assert len(set(re.findall(r"\[\d\] pid \d+ \[\]", done.stdout))) == 2
    assert "telling" not in done.stdout


@pytest.mark.usefixtures("unchecked")
def test_what_cannot_be_shown_is_refused_before_ranks_are_asked() -> None:
    show: Any = "line"
    for call in (bf.collect, bf.profile):
        with pytest.raises(ArgumentError, match="show='line': expected 'bar' or 'nothing'"):
            call(pl.LazyFrame({"a": [1]}), LocalGang(1), show=show)
