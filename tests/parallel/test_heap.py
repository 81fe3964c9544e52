"""Memory of programs on CPUs that the process keeps."""

import os
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import braidax as bx
from braidax.parallel.compute import heap
from tests.support.tree import SRC

# A thread allocates something large, uses it, and frees it, again and again: also when its heap has too little left.
THREAD = """
import ctypes, resource, sys, threading
import jax
from jax.sharding import Mesh
from braidax.parallel.compute.heap import keep_heaps
mesh = Mesh(jax.devices(), "data")
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.memset.argtypes, libc.free.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t], [ctypes.c_void_p]

def used(size):
    place = libc.malloc(size)
    libc.memset(place, 1, size)
    libc.free(place)

def work():
    if sys.argv[1] == "keep":
        keep_heaps(mesh)
    libc.free(libc.malloc(30 << 20))  # from now on glibc takes as much from heaps by itself
    most = 0
    for _ in range(40):
        libc.malloc(5 << 20)
        used(15 << 20)
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        for _ in range(4):
            used(15 << 20)
        most = max(most, resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)
    print(most)

thread = threading.Thread(target=work)
thread.start()
thread.join()
"""
PAGES = 4 * (15 << 20) // 4096


@pytest.mark.parametrize(
    ("keep", "variables", "cleared"),
    [
        ("keep", {}, False),
        ("leave", {}, True),
        ("keep", {"MALLOC_TOP_PAD_": "0"}, True),
        ("keep", {"GLIBC_TUNABLES": "glibc.malloc.top_pad=0"}, True),
    ],
)
def test_pages_of_a_heap_are_cleared_once_unless_the_user_said_otherwise(
    keep: str, variables: dict[str, str], cleared: bool
) -> None:
    environment = {name: value for name, value in os.environ.items() if "MALLOC" not in name}
    environment |= {"PYTHONPATH": str(SRC), "JAX_PLATFORMS": "cpu", **variables}
    command = [sys.executable, "-c", THREAD, keep]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110, check=True).stdout
    assert (int(told) > PAGES // 2) == cleared
    assert cleared or int(told) < PAGES // 100


def test_only_for_cpus_and_by_whoever_computes_there(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[None] = []
    monkeypatch.setattr(heap, "_keep", lambda: kept.append(None))

    def devices_of(platform: str) -> Any:
        """A mesh, as far as it is looked at."""
        device = type("Device", (), {"platform": platform})()
        return type("Devices", (Mesh,), {"__new__": object.__new__, "devices": np.array([device])})()

    heap.keep_heaps(devices_of("gpu"))
    assert kept == []
    heap.keep_heaps(devices_of("cpu"))
    assert len(kept) == 1
    mesh = Mesh(np.array(jax.devices()[:1]), "data")
    strategies: Any = {"data": bx.DataParallel()}
    bx.parallelize(mesh, strategies)
    assert len(kept) == 2
    spec = {"x": jax.ShapeDtypeStruct((4,), np.float32)}
    init = {"init": lambda _: {"w": jax.numpy.ones(())}, "batch": spec}
    bx.parallelize(lambda params, batch: (params["w"] * batch["x"]).sum(), optax.sgd(0.1), mesh, strategies, **init)
    assert len(kept) == 3


def test_without_glibc_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap.platform, "libc_ver", lambda: ("", ""))
    monkeypatch.setattr(heap.ctypes, "CDLL", lambda name: pytest.fail("nobody may be asked"))
    heap._keep.__wrapped__()
