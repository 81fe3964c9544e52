"""Two processes with four devices each compute what one with eight does."""

import io
import json
from collections.abc import Callable

import numpy as np
import pytest

from braidax.gang import LocalGang
from braidax.gang.launch import launch_here
from braidax.gang.program import Program
from tests.support.parallel.hybrid_of_two import numbers
from tests.support.parallel.one_of_two import losses
from tests.support.parallel.served_of_two import numbers as served_numbers
from tests.support.tree import ROOT


@pytest.mark.parametrize(
    ("module", "arguments", "expected"),
    [
        ("one_of_two", (), losses),
        ("hybrid_of_two", ("two axes",), numbers),
        ("served_of_two", ("clipped",), served_numbers),
        pytest.param("served_of_two", ("growing",), served_numbers, marks=pytest.mark.slow),
        pytest.param("served_of_two", ("adam",), served_numbers, marks=pytest.mark.slow),
        pytest.param("hybrid_of_two", ("one axis",), numbers, marks=pytest.mark.slow),
        pytest.param("hybrid_of_two", ("two axes, several widths",), numbers, marks=pytest.mark.slow),
    ],
)
def test_two_processes_equal_one(
    module: str,
    arguments: tuple[str, ...],
    expected: Callable[..., list[float]],
    gangs: dict[int, LocalGang],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = expected(*arguments, *([gangs[3]] if module == "served_of_two" else []))
    for told in told_by_two(module, arguments, monkeypatch):
        np.testing.assert_allclose(told, wanted, rtol=1e-5)


@pytest.mark.slow
def test_two_processes_measure_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they choose by it is one plan."""
    one, other = told_by_two("measured_of_two", (), monkeypatch)
    assert one == other
    assert len(one) == 13
    assert min(one[0], *one[1::3]) > 0  # flops and bytes a second


def told_by_two(module: str, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> list[list[float]]:
    """Runs a module in two processes, and returns what each prints."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    log = io.StringIO()
    program = Program(f"tests.support.parallel.{module}", arguments, kind="module", devices_per_process=4)
    assert launch_here(program, 2, log=log) == 0, log.getvalue()
    found = dict(line.split(" ", 1) for line in log.getvalue().splitlines() if line.endswith("]"))
    assert set(found) == {"[0]", "[1]"}
    return [json.loads(told) for told in found.values()]
