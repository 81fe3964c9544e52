"""What is left on disk, and what a program's end looks like, when nobody closes anything."""

import random
import signal
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from braidax.checkpoint import Checkpointer, Every

LIMIT = 60

LOOP = """
import sys
import jax.numpy as jnp
from braidax.checkpoint import Checkpointer, Every

like = {"step": 0, "leaves": [jnp.zeros((64, 1024)) for _ in range(4)]}
saver = Checkpointer(sys.argv[1], Every(1), keep=2)
state = saver.restore(like)
print("restored", state["step"], saver.skipped, flush=True)
while True:
    step = state["step"] + 1
    state = {"step": step, "leaves": [jnp.full((64, 1024), step, jnp.float32) for _ in range(4)]}
    saver.update(state)
    print(step, flush=True)
"""

DIE = """
import os, signal, sys
from pathlib import Path
import jax.numpy as jnp
from braidax.checkpoint import Checkpointer, Every

name, countdown = sys.argv[2], int(sys.argv[3])
owner = Path if name in ("rename", "unlink", "rmdir") else os
original = getattr(owner, name)

def deadly(*arguments, **keywords):
    global countdown
    countdown -= 1
    if countdown < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*arguments, **keywords)

saver = Checkpointer(sys.argv[1], Every(1), keep=1)
state = saver.restore({"step": 0, "x": jnp.zeros(1000)})
setattr(owner, name, deadly)
saver.save({"step": state["step"] + 1, "x": jnp.full(1000, state["step"] + 1, jnp.float32)})
"""

END = """
import sys
import jax.numpy as jnp
from braidax.checkpoint import Checkpointer, Every

saver = Checkpointer(sys.argv[1], Every(1))
saver.update({"x": jnp.arange(4_000_000)})
{end}
"""


def test_kill_at_any_moment_loses_no_finished_checkpoint(tmp_path: Path) -> None:
    like = {"step": 0, "leaves": [jnp.zeros((64, 1024)) for _ in range(4)]}
    moments = random.Random(0)
    durable = 0
    for _ in range(5):
        with subprocess.Popen([sys.executable, "-c", LOOP, tmp_path], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("restored ")
            assert line.endswith("[]\n"), line
            assert int(line.split()[1]) >= durable
            printed = 0
            # The moment: after some updates, plus a part of one.
            for _ in range(moments.randrange(2, 12)):
                printed = int(process.stdout.readline())
            sum(range(moments.randrange(500_000)))
            process.send_signal(signal.SIGKILL)
            process.wait(LIMIT)
        with Checkpointer(tmp_path, Every(1)) as saver:
            assert not list(tmp_path.glob(".*"))
            got = saver.restore(like)
            assert saver.skipped == []
        # The update before the last one was durable before the last one returned.
        durable = got["step"]
        assert durable >= printed - 1
        for leaf in got["leaves"]:
            np.testing.assert_array_equal(leaf, np.full((64, 1024), durable, np.float32))


@pytest.mark.parametrize(
    ("name", "count", "step"),
    [
        ("fsync", 0, 1),  # before the arrays are durable
        ("fsync", 1, 1),  # before the manifest is
        ("rename", 0, 1),  # complete, but without its name
        ("fsync", 3, 2),  # named
        ("rename", 1, 2),  # before the old one is taken away
        ("unlink", 1, 2),  # while the old one is removed
        ("rmdir", 0, 2),
    ],
)
def test_death_at_each_point_of_a_commit(tmp_path: Path, name: str, count: int, step: int) -> None:
    like = {"step": 0, "x": jnp.zeros(1000)}
    with Checkpointer(tmp_path, Every(1)) as saver:
        saver.update({"step": 1, "x": jnp.ones(1000)})
    died = subprocess.run([sys.executable, "-c", DIE, tmp_path, name, str(count)], timeout=LIMIT)
    assert died.returncode == -signal.SIGKILL
    with Checkpointer(tmp_path, Every(1)) as saver:
        assert not list(tmp_path.glob(".*"))
        got = saver.restore(like)
        assert saver.skipped == []
    assert got["step"] == step
    np.testing.assert_array_equal(got["x"], np.full(1000, step))


@pytest.mark.parametrize(("end", "status"), [("", 0), ("raise SystemExit(3)", 3), ("raise ValueError('mine')", 1)])
def test_a_program_that_just_ends_finishes_its_checkpoint(tmp_path: Path, end: str, status: int) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", END.replace("{end}", end), tmp_path], capture_output=True, text=True, timeout=LIMIT
    )
    assert ended.returncode == status, ended.stderr
    assert ("mine" in ended.stderr) if status == 1 else (ended.stderr == "")
    got = Checkpointer(tmp_path, Every(1)).restore({"x": jnp.zeros(4_000_000, jnp.int32)})
    np.testing.assert_array_equal(got["x"], np.arange(4_000_000))
