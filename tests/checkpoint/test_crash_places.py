"""What is left in three places when a run that saves in all of them is killed."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.checkpoint.crashing_places import opened, state_at
from tests.support.tree import ROOT

LIMIT = 60


def crash(folder: Path, countdowns: range) -> None:
    """Kills a run in each of these calls, and goes on from what is left."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.checkpoint.crashing_places", str(folder)]
    durable, seen = 0, set[str]()
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as nursery:
        assert nursery.stdin is not None
        assert nursery.stdout is not None
        for countdown in countdowns:
            nursery.stdin.write(f"{countdown}\n")
            nursery.stdin.flush()
            found = json.loads(nursery.stdout.readline())
            assert found["status"] == -signal.SIGKILL, (countdown, found)
            seen |= {path.parent.name for path in folder.rglob(".step*.unfinished")}
            with opened(folder) as saver:
                assert list(folder.rglob(".step*")) == []
                got = saver.restore(state_at(0))
                assert saver.skipped == [], countdown
            # The update before the last one was durable everywhere before the last one returned.
            assert got["step"] >= max(durable, found["last"] - 1), (countdown, found)
            durable = got["step"]
            np.testing.assert_array_equal(got["x"], state_at(durable)["x"])
        nursery.stdin.close()
        assert nursery.wait(LIMIT) == 0
    assert durable > 1
    assert seen == {"slot-0", "quick", "lasting"}


def test_kill_in_a_call_of_any_place_loses_no_finished_checkpoint(tmp_path: Path) -> None:
    crash(tmp_path, range(2, 38, 6))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kill_in_each_call_of_all_places_loses_no_finished_checkpoint(tmp_path: Path) -> None:
    crash(tmp_path, range(100))
