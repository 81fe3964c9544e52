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
