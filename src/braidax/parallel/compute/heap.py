"""Memory of programs on CPUs, which the process keeps from one run of a program to the next."""

import ctypes
import os
import platform
from functools import cache

from jax.sharding import Mesh

_TOP_PAD, _MMAP_THRESHOLD = -2, -3  # as of mallopt(3)
_HEAP_BYTES = 64 << 20  # of a heap of glibc, of which a thread that is not the first one has several
_OWN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_")


def keep_heaps(mesh: Mesh) -> None:
    """Lets glibc keep the memory that programs on CPUs use, if any device of a mesh is one.

    XLA allocates what a program needs meanwhile at each run, on a thread of its own. Where that does not fit into what
    is left of the thread's last heap glibc maps another one, and unmaps it when the program is done: the kernel clears
    all pages anew each time. Steps of a pipeline took a sixth longer where that happened. A process keeps up to 64 MiB
    more for each thread that computes. Whoever has set one of these in the environment
    (`MALLOC_TOP_PAD_` and its like, `GLIBC_TUNABLES`) is not overruled; without glibc nothing is done.
    """
    if any(device.platform == "cpu" for device in mesh.devices.flat):
        _keep()


@cache
def _keep() -> None:
    is_set = any(name in os.environ for name in _OWN) or "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "")
    if platform.libc_ver()[0] != "glibc" or is_set:
        return
    mallopt = ctypes.CDLL(None).mallopt
    # A heap is unmapped, or made smaller, where more than this is free at its end, which is never. What is below half a
    # heap comes from heaps, as it does by itself once something as large was freed: setting either ends that.
    mallopt(_TOP_PAD, _HEAP_BYTES)
    mallopt(_MMAP_THRESHOLD, _HEAP_BYTES // 2)
