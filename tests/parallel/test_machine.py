"""A machine's figures: measured on devices, given by hand, and kept as JSON."""

import math
from dataclasses import astuple
from typing import Any

import jax
import pytest

import braidax.parallel as bx
from braidax.errors import ArgumentError, WaitTimeout
from braidax.parallel.plan.costs.measure import measure_machine
from tests.support.parallel.models import make_mesh

LINK = bx.Link(bytes_per_second=50e9, latency_seconds=5e-6, hidden=0.9)
MACHINE = bx.Machine(400e12, {"data": LINK, "model": bx.Link(2e9)}, {"data": bx.Link(100e9)}, 80 << 30, "8 × a device")


@pytest.mark.slow  # tests/tune/calibration measures two
def test_devices_are_measured() -> None:
    """Nothing is said of how fast they are: only that they compute and send."""
    found = measure_machine(jax.make_mesh((8, 1), ("data", "alone")), num_runs=1)
    assert [*found.permutes] == [*found.collectives] == ["data"]
    assert 0 < found.flops_per_second < math.inf
    for link in (*found.permutes.values(), *found.collectives.values()):
        assert 0 < link.bytes_per_second < math.inf
        assert 0 <= link.latency_seconds < math.inf
        assert 0 <= link.hidden <= 1
    assert found.name == "8 × cpu"
    assert bx.Machine.from_json(found.to_json()) == found


def test_devices_that_do_not_answer_are_waited_for_no_longer_than_told() -> None:
    with pytest.raises(WaitTimeout, match=r"wait_seconds=1e-09: a run of \d+ turns on 8 devices was not done by then"):
        measure_machine(make_mesh("8 explicit"), wait_seconds=1e-9)


def test_a_message_takes_its_latency_and_its_bytes() -> None:
    assert LINK.seconds(100e9) == pytest.approx(2 + 5e-6)
    assert LINK.seconds(100e9, 3) == pytest.approx(2 + 15e-6)
    assert LINK.exposed(2.0, 1.0) == pytest.approx(2 - 0.9)
    assert LINK.exposed(2.0, 4.0) == pytest.approx(0.2)


def test_it_prints_and_survives_json() -> None:
    assert str(MACHINE).splitlines() == [
        "machine       8 × a device",
        "a device      computes 400 TFLOP/s, and has 85.9 GB",
        "along data    to the next 50 GB/s + 5 µs, 90 % hidden under products",
        "              gathers     100 GB/s + 0 µs, 100 % hidden under products",
        "along model   to the next 2 GB/s + 0 µs, 100 % hidden under products",
    ]
    assert repr(MACHINE) == "Machine(8 × a device: 400 TFLOP/s; data 50 GB/s, model 2 GB/s)"
    assert bx.Machine.from_json(MACHINE.to_json()) == MACHINE
    assert bx.Machine.from_json('{"flops_per_second": 1.0, "permutes": {}}') == bx.Machine(1.0, {})
    assert astuple(MACHINE.collective("data")) == (100e9, 0.0, 1.0)
    assert MACHINE.collective("model") == MACHINE.permute("model") == bx.Link(2e9)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"flops_per_second": 1, "permutes": {"data": {"rate": 1}}}'])
def test_other_json_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match=r"text is no machine .*expected what Machine\.to_json returns"):
        bx.Machine.from_json(text)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: bx.Link(0.0), r"^bytes_per_second=0.0: expected a positive number, such as 50e9$"),
        (lambda: bx.Link(-1.0), r"^bytes_per_second=-1.0: expected a positive number"),
        (lambda: bx.Link(math.inf), r"^bytes_per_second=inf: expected a positive number"),
        (lambda: bx.Link(math.nan), r"^bytes_per_second=nan: expected a positive number"),
        (lambda: bx.Link(1.0, -1e-6), r"^latency_seconds=-1e-06: expected 0 or more, such as 5e-6$"),
        (lambda: bx.Link(1.0, hidden=1.5), r"^hidden=1.5: expected a part of the time, 0 to 1$"),
        (lambda: bx.Machine(0.0, {}), r"^flops_per_second=0.0: expected a positive number, such as 400e12$"),
        (lambda: bx.Machine(1.0, {}, memory_bytes=0), r"^memory_bytes=0: expected a positive number, such as 80"),
        (lambda: MACHINE.permute("stage"), r"^machine has permutes along \['data', 'model'\], and none along the axis"),
        (lambda: bx.Machine.from_json('{"flops_per_second": 0, "permutes": {}}'), r"^flops_per_second=0: expected"),
        (lambda: measure_machine(make_mesh(), num_runs=0), r"^num_runs=0, wait_seconds=60.0: expected one run"),
        (lambda: measure_machine(make_mesh(), wait_seconds=0.0), r"wait_seconds=0.0: expected one run, and time"),
    ],
)  # fmt: skip
def test_what_is_no_figure_is_refused(made: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        made()
