"""A loop may run ahead of CPU devices by some updates, not by hundreds: XLA would end the process."""

import io
import os
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from braidax.gang.launch import launch_here
from braidax.gang.program import Program
from braidax.parallel.compute.in_flight import MAX_IN_FLIGHT, InFlight
from tests.support.parallel.many_updates import NUM_UPDATES, RATE, first, loss, samples
from tests.support.tree import ROOT

LIMIT = "--xla_cpu_collective_call_terminate_timeout_seconds=20"  # in place of 40, after which XLA ends the process


class Output:
    """A result that notes when it is waited for."""

    def __init__(self, number: int, waited: list[int], *, deleted: bool = False) -> None:
        self.number, self.waited, self.deleted = number, waited, deleted

    def is_deleted(self) -> bool:
        return self.deleted

    def block_until_ready(self) -> None:
        assert not self.deleted
        self.waited.append(self.number)


def waited_for(platform: str, *, deleted: int = -1) -> list[int]:
    """The calls that have been waited for when ten are dispatched."""
    devices: Any = SimpleNamespace(devices=np.array([SimpleNamespace(platform=platform)] * 2))
    in_flight, waited = InFlight(devices), list[int]()
    for number in range(10):
        in_flight.make_room()
        output: Any = Output(number, waited, deleted=number == deleted)
        in_flight.add(output)
    return waited


@pytest.mark.usefixtures("unchecked")
def test_a_call_waits_for_the_one_so_many_before_it_on_cpu_alone() -> None:
    assert waited_for("cpu") == [*range(10 - MAX_IN_FLIGHT)]
    assert waited_for("cpu", deleted=2) == [at for at in range(10 - MAX_IN_FLIGHT) if at != 2]
    assert waited_for("gpu") == []


def test_loops_that_read_nothing_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all forms, in a process that XLA would end."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XLA_FLAGS", f"{LIMIT} {os.environ.get('XLA_FLAGS', '')}")
    log, forms = io.StringIO(), ("evaluations", "whole", "decorated")
    program = Program("tests.support.parallel.many_updates", forms, "module", "nothing")
    assert launch_here(program, 1, log=log) == 0, log.getvalue()[-2000:]
    params, moved = first(), jax.jit(jax.value_and_grad(loss))
    value, gradient = moved(params, samples())
    evaluated = float(value)
    for _ in range(NUM_UPDATES - 1):
        params = params - RATE * gradient
        value, gradient = moved(params, samples())
    found = [float(line.removeprefix("[0] ")) for line in log.getvalue().splitlines()]
    np.testing.assert_allclose(found, [evaluated, value, value], rtol=1e-3)
