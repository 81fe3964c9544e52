"""The lifeline: whoever holds its end ends with the one who holds the other, in whatever state."""

import os
import platform
import signal
import subprocess
import sys

import pytest

from braidax.errors import GangError
from braidax.gang import LocalGang
from braidax.gang.launch import started
from tests.support.gang.programs import is_gone, wait_until_gone

CHILD = """
import os, signal, subprocess, sys, time
from braidax.lifeline import end_with
end_with(int(sys.argv[1]))
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) if sys.argv[2] == "group" else None
print(child.pid if child else 0, flush=True)
if sys.argv[2] == "busy":
    while True:
        (1 << 3_000_000) % 1_000_003 ** 3
time.sleep(600)
"""


@pytest.mark.parametrize("state", ["idle", "busy", "stopped", "group"])
def test_a_process_ends_with_its_parent(state: str) -> None:
    reading, writing = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(reading), state],
        pass_fds=[reading],
        process_group=0 if state == "group" else None,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        os.close(reading)
        assert process.stdout is not None
        child = int(process.stdout.readline())
        if state == "stopped":
            process.send_signal(signal.SIGSTOP)
        assert process.poll() is None
        os.close(writing)
        assert process.wait(5) == -signal.SIGKILL
        if child:
            wait_until_gone([child], seconds=5)


def test_one_that_does_not_lead_its_group_ends_alone() -> None:
    reading, writing = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(reading), "idle"], pass_fds=[reading], stdout=subprocess.PIPE
    ) as process:
        os.close(reading)
        assert process.stdout is not None
        process.stdout.readline()
        os.close(writing)
        process.wait(5)
    assert not is_gone(os.getpid())  # the group is that of the tests


def test_where_ends_are_not_told_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    said = "runs on Linux only, this is Darwin; run the program in one process, or take a gang on Ray or Dask"
    with pytest.raises(GangError, match=f"^LocalGang {said}$"):
        LocalGang(2)
    with pytest.raises(GangError, match=f"^braidax launch {said}$"), started([], print, stop=print):
        raise AssertionError("it was started")
