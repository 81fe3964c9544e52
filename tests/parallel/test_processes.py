"""Two processes with four devices each compute what one with eight does."""

import functools
import io
import json

import numpy as np
import pytest

from braidax.gang import LocalGang
from braidax.gang.launch import launch_here
from braidax.gang.program import Program
from tests.support.parallel.served_of_two import numbers as served_numbers
from tests.support.parallel.several_of_two import numbers
from tests.support.tree import ROOT

DAILY = ("one_of_two", "hybrid_of_two: two axes", "served_of_two: clipped")
NIGHTLY = (
    "served_of_two: growing",
    "served_of_two: adam",
    "hybrid_of_two: one axis",
    "hybrid_of_two: two axes, several widths",
)


@pytest.mark.timeout(300)  # the first one waits for all that the two processes train
@pytest.mark.parametrize("case", [*DAILY, *(pytest.param(case, marks=pytest.mark.slow) for case in NIGHTLY)])
def test_two_processes_equal_one(case: str, gangs: dict[int, LocalGang]) -> None:
    module, *names = case.split(": ")
    wanted = served_numbers(*names, gangs[3]) if module == "served_of_two" else numbers(case)
    cases = DAILY if case in DAILY else NIGHTLY
    for told in told_by_two("several_of_two", cases):
        np.testing.assert_allclose(told[cases.index(case)], wanted, rtol=1e-5)


@pytest.mark.slow
def test_two_processes_measure_the_same() -> None:
    """What they choose by it is one plan."""
    (one,), (other,) = told_by_two("measured_of_two")
    assert one == other
    assert len(one) == 13
    assert min(one[0], *one[1::3]) > 0  # flops and bytes a second


@functools.cache
def told_by_two(module: str, arguments: tuple[str, ...] = ()) -> list[list[list[float]]]:
    """Runs a module in two processes, once. **Returns:** of each process the lines that it prints."""
    log = io.StringIO()
    program = Program(f"tests.support.parallel.{module}", arguments, kind="module", devices_per_process=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setenv("JAX_PLATFORMS", "cpu")
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        assert launch_here(program, 2, log=log) == 0, log.getvalue()
    lines = [line.split(" ", 1) for line in log.getvalue().splitlines() if line.endswith("]")]
    assert {rank for rank, _ in lines} == {"[0]", "[1]"}
    return [[json.loads(told) for rank, told in lines if rank == own] for own in ("[0]", "[1]")]
