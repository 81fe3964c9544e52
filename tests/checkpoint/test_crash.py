"""What is left on disk, and what a program's end looks like, when nobody closes anything."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from braidax.checkpoint import Checkpointer, Every, restore
from tests.support.checkpoint.crashing import PHASES, SHAPES, advance, begin
from tests.support.gang.forks import LOAD_AND_SAVE, fork_children
from tests.support.tree import ROOT

LIMIT = 60

DIE = """
import os, signal, sys
from pathlib import Path
import jax.numpy as jnp
from braidax.checkpoint import Checkpointer, Every

def die(folder, name, countdown):
    owner = Path if name == "rename" else os
    original = getattr(owner, name)

    def deadly(*arguments, **keywords):
        nonlocal countdown
        countdown -= 1
        if countdown < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **keywords)

    saver = Checkpointer(folder, Every(1), keep=1)
    state = saver.restore({"step": 0, "x": jnp.zeros(1000)})
    setattr(owner, name, deadly)
    saver.save({"step": state["step"] + 1, "x": jnp.full(1000, state["step"] + 1, jnp.float32)})

# Each dies in a process of its own, a fork from before JAX begins: it is imported once.
for line in sys.stdin:
    folder, name, countdown = line.rstrip("\\n").split("\\t")
    child = os.fork()
    if child == 0:
        die(folder, name, int(countdown))
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""

END = """
import sys
import jax.numpy as jnp
from braidax.checkpoint import Checkpointer, Every

saver = Checkpointer(sys.argv[1], Every(1))
saver.update({"x": jnp.arange(4_000_000)})
{end}
"""


def crash(folder: Path, seeds: range, log: Path) -> None:
    """Kills a run at a moment that each seed decides, and compares what is left with a run that nobody kills."""
    like = (0, {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()})
    expected, reached, durable = begin(), 0, 0
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.checkpoint.crashing", str(folder)]
    with (
        subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as nursery,
        log.open("w") as lines,
    ):
        assert nursery.stdin is not None
        assert nursery.stdout is not None
        for seed in seeds:
            nursery.stdin.write(json.dumps({"seed": seed, "num_processes": 1 + seed % 2}) + "\n")
            nursery.stdin.flush()
            found = json.loads(nursery.stdout.readline())
            assert {found["statuses"][process] for process in found["killed"]} == {-signal.SIGKILL}, found
            with Checkpointer(folder, Every(1)) as saver:
                assert not list(folder.glob(".step*"))
                step, state = saver.restore(like)
                assert saver.skipped == [], found
            lines.write(json.dumps(found | {"restored": step}) + "\n")
            # The update before the last one was durable before the last one returned.
            assert step >= max(durable, found["last"] - 1), found
            durable = step
            while reached < step:
                reached += 1
                expected = {name: advance(array, reached) for name, array in expected.items()}
            for name, array in state.items():
                assert array.tobytes() == expected[name].tobytes(), (found, name)
        nursery.stdin.close()
        assert nursery.wait(LIMIT) == 0


def test_kill_at_any_moment_loses_no_finished_checkpoint(tmp_path: Path) -> None:
    crash(tmp_path / "run", range(6), tmp_path / "log.jsonl")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_kill_at_many_moments_loses_no_finished_checkpoint(tmp_path: Path) -> None:
    log = Path(os.environ.get("BRAIDAX_CRASH_LOG", tmp_path / "log.jsonl"))
    crash(tmp_path / "run", range(1000, 1320), log)
    found = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(found) == 320
    assert {(line["num_processes"], *line["killed"]) for line in found} == {(1, 0), (2, 0), (2, 1), (2, 0, 1)}
    hit = Counter(line["phases"][process] for line in found for process in line["killed"])
    assert all(hit[phase] >= 10 for phase in PHASES[1:]), hit


@pytest.fixture(scope="module")
def dying() -> Iterator[Callable[[Path, str, int], int]]:
    """Saves in a process that is killed at a call of a function; returns how it ended."""
    command = [sys.executable, "-W", "ignore", "-c", DIE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as nursery:
        stdin, stdout = nursery.stdin, nursery.stdout
        assert stdin is not None
        assert stdout is not None

        def die(folder: Path, name: str, count: int) -> int:
            stdin.write(f"{folder}\t{name}\t{count}\n")
            stdin.flush()
            return int(stdout.readline())

        yield die
        stdin.close()
        assert nursery.wait(LIMIT) == 0


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
def test_death_at_each_point_of_a_commit(
    dying: Callable[[Path, str, int], int], tmp_path: Path, name: str, count: int, step: int
) -> None:
    like = {"step": 0, "x": jnp.zeros(1000)}
    with Checkpointer(tmp_path, Every(1)) as saver:
        saver.update({"step": 1, "x": jnp.ones(1000)})
    assert dying(tmp_path, name, count) == -signal.SIGKILL
    with Checkpointer(tmp_path, Every(1)) as saver:
        assert not list(tmp_path.glob(".step*"))
        got = saver.restore(like)
        assert saver.skipped == []
    assert got["step"] == step
    np.testing.assert_array_equal(got["x"], np.full(1000, step))


@pytest.mark.parametrize(
    ("end", "status"),
    [("", 0), pytest.param("raise SystemExit(3)", 3, marks=pytest.mark.slow), ("raise ValueError('mine')", 1)],
)
def test_a_program_that_just_ends_finishes_its_checkpoint(
    tmp_path: Path, end: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_children(monkeypatch, *LOAD_AND_SAVE, codes=(END.partition("{")[0],))
    ended = subprocess.run(
        [sys.executable, "-c", END.replace("{end}", end), tmp_path], capture_output=True, text=True, timeout=LIMIT
    )
    assert ended.returncode == status, ended.stderr
    assert ("mine" in ended.stderr) if status == 1 else (ended.stderr == "")
    got = restore(tmp_path, {"x": jnp.zeros(4_000_000, jnp.int32)}).tree
    np.testing.assert_array_equal(got["x"], np.arange(4_000_000))
