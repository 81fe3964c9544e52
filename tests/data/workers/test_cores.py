"""Which cores are near the devices, on machines made of files: two sockets of four cores, GPUs at either."""

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from braidax.data.workers.cores import cores_near

FIRST, SECOND = frozenset({0, 1, 8, 9}), frozenset({2, 3, 10, 11})
MODEL = "NVIDIA H100 80GB HBM3"
UUIDS = [f"GPU-{letter}932f937-d72c-4106-c12f-20bd9faed9f6" for letter in "abcd"]


def gpu(number: int, kind: str = MODEL) -> Any:
    """Returns a GPU as JAX describes it, by the number that CUDA gives it."""
    return SimpleNamespace(platform="gpu", device_kind=kind, local_hardware_id=number)


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def add_gpu(root: Path, bus: str, *, uuid: str, minor: int, node: int, model: str = MODEL) -> None:
    facts = (
        f"Model: \t\t {model}\nIRQ:   \t\t 0\nGPU UUID: \t {uuid}\nBus Location: \t {bus}\nDevice Minor: \t {minor}\n"
    )
    write(root, f"proc/driver/nvidia/gpus/{bus}/information", facts)
    write(root, f"sys/bus/pci/devices/{bus}/numa_node", f"{node}\n")
    write(root, f"dev/nvidia{minor}", "")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two nodes and four GPUs, whose places on the bus do not go by nodes, minor numbers or letters."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: FIRST | SECOND)
    write(tmp_path, "sys/devices/system/node/node0/cpulist", "0-1,8-9\n")
    write(tmp_path, "sys/devices/system/node/node1/cpulist", "2-3,10-11\n")
    write(tmp_path, "sys/devices/system/node/node2/cpulist", "\n")  # memory alone
    add_gpu(tmp_path, "2000:e1:00.0", uuid=UUIDS[2], minor=0, node=1)
    add_gpu(tmp_path, "0000:0a:00.0", uuid=UUIDS[0], minor=3, node=0)
    add_gpu(tmp_path, "10000:01:00.0", uuid=UUIDS[3], minor=1, node=0)  # numbers, not texts, are in order
    add_gpu(tmp_path, "0000:4b:00.0", uuid=UUIDS[1], minor=2, node=1)
    return tmp_path


@pytest.mark.parametrize(("number", "cores"), [(0, FIRST), (1, SECOND), (2, SECOND), (3, FIRST)])
def test_a_gpu_is_found_by_its_place_on_the_bus(machine: Path, number: int, cores: frozenset[int]) -> None:
    assert cores_near([gpu(number)], root=machine) == cores


def test_several_gpus_have_the_cores_of_all_their_nodes(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: frozenset(range(12)))  # a third node has some of them
    assert cores_near([gpu(1), gpu(2)], root=machine) == SECOND
    assert cores_near([gpu(0), gpu(1)], root=machine) == FIRST | SECOND


def test_only_cores_that_may_be_used_are_near(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: frozenset({1, 2, 9}))
    assert cores_near([gpu(0)], root=machine) == {1, 9}
    assert cores_near([gpu(1)], root=machine) == {2}


@pytest.mark.parametrize(
    ("chosen", "near"),
    [
        ("1,0", [SECOND, FIRST, None]),
        (" 3 ,1", [FIRST, SECOND, None]),
        (f"{UUIDS[1]},{UUIDS[3]}", [SECOND, FIRST, None]),
        ("GPU-c,GPU-a932", [SECOND, FIRST, None]),
        (f"2,{UUIDS[0]}", [SECOND, FIRST, None]),
        ("0,2,-1,1", [FIRST, SECOND, None]),
        ("1,4,0", [SECOND, None, None]),
        ("1,GPU-,0", [SECOND, None, None]),  # more than one
        ("1,GPU-e,0", [SECOND, None, None]),
        ("MIG-a932f937-d72c-4106-c12f-20bd9faed9f6", [None, None]),
        ("", [None, None]),
    ],
)
def test_cuda_visible_devices_says_which_gpus_and_in_which_order(
    machine: Path, monkeypatch: pytest.MonkeyPatch, chosen: str, near: Iterable[frozenset[int] | None]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    for number, cores in enumerate(near):
        assert cores_near([gpu(number)], root=machine) == cores


def test_gpus_of_several_models_have_an_order_only_when_it_is_said(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_gpu(machine, "0000:4b:00.0", uuid=UUIDS[1], minor=2, node=1, model="NVIDIA L4")
    assert cores_near([gpu(1)], root=machine) is None  # CUDA guesses which is faster
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert cores_near([gpu(0)], root=machine) is None
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert cores_near([gpu(0)], root=machine) == SECOND
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", UUIDS[1])
    assert cores_near([gpu(0)], root=machine) == SECOND


def test_a_gpu_that_the_process_may_not_open_has_no_number(machine: Path) -> None:
    (machine / "dev/nvidia3").unlink()  # the first one on the bus
    assert [cores_near([gpu(number)], root=machine) for number in range(4)] == [SECOND, SECOND, FIRST, None]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("sys/bus/pci/devices/0000:0a:00.0/numa_node", "-1\n"),  # the firmware does not say
        ("sys/bus/pci/devices/0000:0a:00.0/numa_node", "2\n"),  # a node without cores
        ("sys/bus/pci/devices/0000:0a:00.0/numa_node", "7\n"),
        ("sys/bus/pci/devices/0000:0a:00.0/numa_node", ""),
    ],
)
def test_without_a_node_that_has_cores_nothing_is_said(machine: Path, path: str, text: str) -> None:
    write(machine, path, text)
    assert cores_near([gpu(0)], root=machine) is None
    assert cores_near([gpu(1), gpu(0)], root=machine) is None
    assert cores_near([gpu(1)], root=machine) == SECOND


def test_where_all_cores_are_near_or_none_nothing_is_said(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cores_near([], root=machine) is None
    assert cores_near([gpu(0), gpu(1)], root=machine) is None
    cpu = jax.local_devices()[0]  # computes on all cores
    assert cores_near([cpu], root=machine) is None
    assert cores_near([gpu(1), cpu], root=machine) is None
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: FIRST)
    assert cores_near([gpu(0)], root=machine) is None
    assert cores_near([gpu(1)], root=machine) is None


def test_other_devices_have_no_known_place(machine: Path) -> None:
    assert cores_near([gpu(0, f"{MODEL} MIG 1g.10gb")], root=machine) is None
    assert cores_near([gpu(-1)], root=machine) is None
    unknown = SimpleNamespace(platform="tpu", device_kind="TPU v5e", local_hardware_id=None)
    assert cores_near([unknown], root=machine) is None


def test_a_machine_of_one_node_and_one_without_sysfs_have_nothing_to_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert cores_near([gpu(0)], root=tmp_path) is None
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: frozenset(range(4)))
    add_gpu(tmp_path, "0000:0a:00.0", uuid=UUIDS[0], minor=0, node=0)
    assert cores_near([gpu(0)], root=tmp_path) is None
    write(tmp_path, "sys/devices/system/node/node0/cpulist", "0-3\n")
    assert cores_near([gpu(0)], root=tmp_path) is None
    write(tmp_path, "sys/devices/system/node/node0/cpulist", "0-2\n")  # the fourth is elsewhere
    assert cores_near([gpu(0)], root=tmp_path) == {0, 1, 2}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert cores_near([gpu(0)], root=tmp_path) is None


def test_other_systems_have_nothing_to_say(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delattr(os, "sched_getaffinity")
    assert cores_near([gpu(0)], root=machine) is None


def test_this_machine_is_read_without_an_error() -> None:
    assert cores_near(jax.local_devices()) is None  # the tests' devices are virtual ones on all cores
