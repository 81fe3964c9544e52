"""Whether anything else ran on this machine while something was measured."""

import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.harness import Report
from benchmarks.harness.machine import num_cores

_MOST = 0.05  # of the cores
_BUSY = (0, 1, 2, 5, 6, 7)  # user, nice, system, irq, softirq, steal in /proc/stat


@contextmanager
def undisturbed(report: Report, case: str) -> Generator[None]:
    """Reports which share of the cores other processes took meanwhile, and notes it where it is much.

    What this process starts must have ended within the block.
    """
    start, busy, own = time.perf_counter(), _busy_seconds(), _own_seconds()
    yield
    room = (time.perf_counter() - start) * num_cores()
    share = max(0.0, (_busy_seconds() - busy) - (_own_seconds() - own)) / max(room, 1e-9)
    report.add("beside the measurements", "other processes", "share of the cores", "%", [100 * share], at=case)
    if share > _MOST:
        report.note(f"{case} was disturbed: other processes took {100 * share:.0f} % of the cores; measure it alone")


def _busy_seconds() -> float:
    path = Path("/proc/stat")
    if not path.exists():
        return _own_seconds()
    columns = path.read_text().splitlines()[0].split()[1:]
    return sum(int(columns[number]) for number in _BUSY) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
