"""Two processes with four devices each compute what one with eight does."""

import io
import json

import numpy as np
import pytest

from braidax.gang.launch import launch_here
from braidax.gang.program import Program
from tests.laws.tree import ROOT
from tests.parallel.one_of_two import losses


def test_two_processes_equal_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    log = io.StringIO()
    program = Program("tests.parallel.one_of_two", kind="module", devices_per_process=4)
    assert launch_here(program, 2, log=log) == 0, log.getvalue()
    expected = losses()
    found = dict(line.split(" ", 1) for line in log.getvalue().splitlines() if line.endswith("]"))
    assert set(found) == {"[0]", "[1]"}
    for told in found.values():
        np.testing.assert_allclose(json.loads(told), expected, rtol=1e-5)
