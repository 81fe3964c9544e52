"""Stages that lie with two processes train as one device does."""

import io
import json

import numpy as np
import pytest

from braidax.gang.launch import launch_here
from braidax.gang.program import Program
from tests.laws.tree import ROOT
from tests.parallel.stages.running.of_two import numbers


@pytest.mark.parametrize(
    ("mesh", "schedule"),
    [
        ("stages", "1F1B"),
        ("samples apart", "ZB-V"),
        pytest.param("stages", "ZB-V", marks=pytest.mark.slow),
        pytest.param("stages", "Interleaved1F1B", marks=pytest.mark.slow),
        pytest.param("stages apart", "ZB-H1", marks=pytest.mark.slow),
        pytest.param("samples apart", "1F1B", marks=pytest.mark.slow),
    ],
)
def test_two_processes_equal_one_device(mesh: str, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    log = io.StringIO()
    module = "tests.parallel.stages.running.of_two"
    program = Program(module, (mesh, schedule), kind="module", devices_per_process=2)
    assert launch_here(program, 2, log=log) == 0, log.getvalue()
    found = dict(line.split(" ", 1) for line in log.getvalue().splitlines() if line.endswith("]"))
    assert set(found) == {"[0]", "[1]"}
    wanted = numbers("none", "")
    for told in found.values():
        np.testing.assert_allclose(json.loads(told), wanted, rtol=2e-5)


def test_a_process_that_is_killed_is_named_on_the_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one: JAX itself ends all when the first, which serves the others, is gone."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    log = io.StringIO()
    program = Program("tests.parallel.stages.running.killed_of_two", ("1",), kind="module", devices_per_process=1)
    assert launch_here(program, 2, log=log) != 0
    told = [line.split(" ", 1)[1] for line in log.getvalue().splitlines() if line.startswith("[0] [")]
    assert len(told) == 1, log.getvalue()
    seconds, process, words = json.loads(told[0])
    assert seconds < 30
    assert process == 1
    assert words == (
        "process 1, which has stages [1], has ended: start all processes again, and restore the last checkpoint"
    )
