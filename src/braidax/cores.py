"""The cores of this machine that this process may use."""

import os


def usable_cores() -> int:
    """Returns how many cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # on Linux, where a process may be bound to some cores
    return len(affinity(0)) if affinity else os.cpu_count() or 1
