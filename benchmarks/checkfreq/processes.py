"""What only a process of its own can show: memory at its peak, and work that is lost when it is killed."""

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.checkfreq.child import NONE
from benchmarks.checkfreq.systems import SYSTEMS
from benchmarks.checkfreq.training import Trainer
from benchmarks.harness import Report

EXTRA, LOST = "peak RSS, more than without, of the state", "lost when killed, at its distance"
_LIMIT_SECONDS = 120.0
# What is freed goes back at once: otherwise the gaps that malloc keeps differ by half the state from run to run.
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "131072"}
_CHECKPOINT = re.compile(r"(?:step-)?\d+")


def measure_memory(
    report: Report, names: Sequence[str], folder: Path, case: str, num_bytes: int, size: str, *, num_checkpoints: int
) -> dict[str, float]:
    """Lets processes train, one that saves nothing and one with each system.

    **Returns:** what each system needs more at the peak, as a share of the state.
    """
    peaks: dict[str, int] = {}
    for name in (NONE, *names):
        command = _command("memory", name, folder / f"memory-{_plain(name)}", num_checkpoints, size)
        done = subprocess.run(command, capture_output=True, timeout=_LIMIT_SECONDS, env=os.environ | _MALLOC)
        if done.returncode:
            raise RuntimeError(f"{name}: a process ended with {done.returncode}: {done.stderr.decode()[-2000:]}")
        peaks[name] = int(done.stdout.splitlines()[-1])
    report.add(case, "no checkpoints", "peak RSS", "MB", [peaks[NONE] / 1e6])
    shares: dict[str, float] = {}
    for name in names:
        shares[name] = (peaks[name] - peaks[NONE]) / num_bytes
        report.add(case, name, "peak RSS", "MB", [peaks[name] / 1e6])
        report.add(case, name, EXTRA, "x", [shares[name]])
    return shares


def measure_lost(
    report: Report,
    trainer: Trainer,
    distances: Mapping[str, int],
    folder: Path,
    case: str,
    size: str,
    moments: Sequence[float],
) -> None:
    """Kills processes that train and save at their distances, at the same moments, and counts the updates lost.

    **Arguments:** `trainer`: of the same size, to restore into. `moments`: seconds after the first update; the first
    checkpoint is taken before that.
    """
    for name, distance in distances.items():
        lost: list[float] = []
        for number, moment in enumerate(moments):
            run = folder / f"killed-{_plain(name)}-{number}"
            reached = _killed(name, run, distance, size, moment)
            lost.append(reached - _restored(name, run, trainer))
        report.add(case, name, LOST, "updates", lost)


def kill_moments(num: int, longest_seconds: float) -> list[float]:
    """Returns random moments, the same in all runs."""
    return list(np.random.default_rng(0).uniform(0.25 * longest_seconds, longest_seconds, num))


def _killed(name: str, run: Path, distance: int, size: str, moment: float) -> int:
    """Returns how many updates a process had made when it was killed."""
    with subprocess.Popen(
        _command("train", name, run, distance, size), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        late = threading.Timer(_LIMIT_SECONDS, process.kill)
        late.start()
        try:
            first = process.stdout.readline()
            time.sleep(moment)
        finally:
            late.cancel()
            process.kill()
        said = [first, *process.stdout.read().splitlines(keepends=True)]
    whole = [int(line) for line in said if line.endswith(b"\n")]
    if len(whole) < 2:
        raise RuntimeError(f"{name}: a process ended by itself after {whole} updates")
    return whole[-1]


def _restored(name: str, run: Path, trainer: Trainer) -> int:
    """Returns how many updates the newest checkpoint has seen, 0 where there is none."""
    if not any(_CHECKPOINT.fullmatch(path.name) for path in run.iterdir()):
        return 0
    system = SYSTEMS[name](run)
    try:
        return int(system.restore(trainer.tree)["step"])
    finally:
        system.close()


def _command(act: str, name: str, folder: Path, number: int, size: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.checkfreq.child", act, name, str(folder), str(number), size]


def _plain(name: str) -> str:
    return re.sub(r"\W+", "-", name)
