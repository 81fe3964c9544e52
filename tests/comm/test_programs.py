"""Drawn programs of messages, over every transport: as NumPy says, or an exact error on all ranks, in time."""

import subprocess
import sys

import pytest

from tests.support.comm.ranks import by_day
from tests.support.tree import ROOT

TRANSPORTS = ["in-process", "tcp", "ucx"]


def run(transport: str, first: int, count: int) -> str:
    """Runs the programs of some seeds in a process of their own, which ends itself when they hang."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.comm.programs", transport, str(first), str(count)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120 + 4 * count,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("transport", by_day(TRANSPORTS, "tcp", "ucx"))
def test_programs_of_messages(transport: str) -> None:
    assert ": 6 programs" in run(transport, 0, 6)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_many_programs_of_messages(transport: str) -> None:
    assert "120 programs" in run(transport, 1000, 120)
