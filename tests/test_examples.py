"""The examples of loading: each trains under its framework on 4 devices, and alike in two processes; and of frames."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.laws.tree import ROOT

LAUNCH = ["-m", "braidax.cli", "launch", "--processes", "2", "--devices-per-process", "2"]
LAST_LINE = re.compile(r"^(?:\[\d\] )?(\d+) steps on (\d+) devices: loss (\S+) -> (\S+)$", re.MULTILINE)


class Trained(NamedTuple):
    """What an example says in its last line."""

    num_steps: int
    num_devices: int
    first_loss: float
    last_loss: float


EXPECTED = {
    "load_jit": Trained(96, 4, 0.9215, 0.3190),  # guessing gives log(2), 0.69
    "load_set_mesh": Trained(64, 4, 4.2344, 0.7073),  # log(32), 3.47; the best there is: log(2), 0.69
    "load_explicit": Trained(192, 4, 2.7963, 0.1059),  # log(16), 2.77
    "load_nnx": Trained(96, 4, 1.0796, 0.0795),  # the variance, 0.4
    "load_equinox": Trained(96, 4, 0.4627, 0.0078),  # likewise
}

TOLD_TWICE = "load_explicit"  # by one process, and by two

Run = Callable[..., Trained]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs an example with 4 devices in all, and says what it said; it leaves nothing behind."""

    def run(name: str, *before: str) -> Trained:
        ended = subprocess.run(
            [sys.executable, *before, str(ROOT / "examples" / f"{name}.py")],
            cwd=tmp_path,
            env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        assert list(tmp_path.iterdir()) == []
        assert "Gloo" not in ended.stdout
        said = LAST_LINE.findall(ended.stdout)
        assert len(said) == 1, ended.stdout
        steps, devices, first, last = said[0]
        return Trained(int(steps), int(devices), float(first), float(last))

    return run


@pytest.mark.parametrize("name", [name for name in EXPECTED if name != TOLD_TWICE])
def test_an_example_learns(name: str, run: Run) -> None:
    assert_learnt(run(name), name)


def test_two_processes_learn_what_one_does(run: Run) -> None:
    found, expected = run(TOLD_TWICE, *LAUNCH), run(TOLD_TWICE)
    assert_learnt(expected, TOLD_TWICE)
    assert found[:2] == expected[:2]
    assert found[2:] == pytest.approx(expected[2:], rel=2e-3)


def assert_learnt(found: Trained, name: str) -> None:
    """Checks what an example says."""
    assert found[:2] == EXPECTED[name][:2]
    assert found[2:] == pytest.approx(EXPECTED[name][2:], rel=0.02)


def test_raw_text_is_prepared_and_trained_on(run: Run, tmp_path_factory: pytest.TempPathFactory) -> None:
    found, expected = run("prepare_text"), Trained(140, 4, 6.0118, 0.7100)
    assert found[:2] == expected[:2]
    assert found[2:] == pytest.approx(expected[2:], rel=0.02)
    assert list((tmp_path_factory.getbasetemp() / "cache/braidax/tables").iterdir()) == []  # the frame is gone


def test_all_examples_of_loading_are_tested_and_short() -> None:
    examples = {path.stem: path for path in (ROOT / "examples").glob("load_*.py")}
    assert set(examples) == set(EXPECTED)
    assert max(len(path.read_text().splitlines()) for path in examples.values()) < 60
