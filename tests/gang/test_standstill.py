"""A program that stands still says so once, with its place; one that gets on, however slowly, does not."""

import io
import re
import sys
import threading
import time
from contextlib import redirect_stderr
from pathlib import Path

import pytest

from braidax.gang import runner, standstill
from braidax.gang.program import Program
from braidax.gang.standstill import naming_standstill

SCRIPT = """
import sys
lock = sys.stdout.held
lock.acquire()
"""


class Output(io.StringIO):
    """A stream that tells when something was written, and lends a lock to a script."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()
        self.held = threading.Lock()

    def write(self, text: str) -> int:
        """Takes a text."""
        count = super().write(text)
        self.written.set()
        return count


def test_the_place_is_named() -> None:
    output = Output()
    begun = time.monotonic()
    with redirect_stderr(output), naming_standstill("rank 3", seconds=0.6):
        assert output.written.wait(30)  # where it stands until it is named
    assert time.monotonic() - begun >= 0.6
    assert output.getvalue().startswith("braidax: rank 3 has stood still for 0.6 s, and goes on waiting here:\n")
    assert "assert output.written.wait(30)" in output.getvalue()
    assert output.getvalue().endswith("see where these are: all must take the same steps in the same order.\n")


def test_it_is_said_once() -> None:
    output = Output()
    with redirect_stderr(output), naming_standstill("rank 3", seconds=0.5):
        assert output.written.wait(30)
        time.sleep(0.4)  # too short for a second time, were it broken off
    assert output.getvalue().count("has stood still") == 1


def test_slow_steps_at_one_place_are_no_standstill() -> None:
    output = Output()
    with redirect_stderr(output), naming_standstill("rank 3", seconds=0.5):
        for _ in range(60):
            sum(range(10_000))
            time.sleep(0.02)
    assert output.getvalue() == ""


def test_a_compiler_at_work_is_no_standstill() -> None:
    output = Output()
    over = time.monotonic() + 1.5
    other = threading.Thread(target=lambda: [sum(range(1000)) for _ in iter(lambda: time.monotonic() < over, False)])
    with redirect_stderr(output), naming_standstill("rank 3", seconds=0.5):
        other.start()
        other.join()
    assert output.getvalue() == ""


def test_a_rank_with_jax_is_watched_from_the_first_line_of_its_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = Output()
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(standstill, "STANDSTILL_SECONDS", 0.3)
    monkeypatch.setenv("BRAIDAX_RANK", "5")
    output.held.acquire()
    threading.Thread(target=lambda: output.written.wait(30) and output.held.release()).start()
    with redirect_stderr(output):
        runner.run(Program(str(script)))
    assert re.fullmatch(
        rf'braidax: rank 5 has stood still for 0\.3 s, and goes on waiting here:\n  File "{script}", line 4, in '
        r"<module>\n(    lock\.acquire\(\)\n)?If it waits for other ranks.*\n",
        output.getvalue(),
    )
    assert not [thread for thread in threading.enumerate() if thread.name == "braidax-standstill"]
