"""What one index of a global shuffle costs, and how its memory grows with the number of samples."""

import time
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from benchmarks.harness import Report, take_turns
from benchmarks.naive.scale import Scale
from benchmarks.naive.systems import OURS
from braidax.data import Permutation

_CASE, _METRIC, _NUMPY = "permutation", "an index", "numpy, all in memory"


def permute(report: Report, scale: Scale, _: Mapping[str, Path]) -> None:
    """Ours at 10^6, 10^9 and 10^12 samples, NumPy's where it fits into memory."""
    positions = np.arange(200_000, dtype=np.int64)
    peaks: dict[int, int] = {}
    medians: list[float] = []
    for exponent in (6, 9, 12):
        number, at = 10**exponent, f"10^{exponent} samples"
        turns: dict[str, Callable[[], float]] = {OURS: lambda number=number: _ours_seconds(number, positions)}
        if exponent == 6:
            turns[_NUMPY] = lambda number=number: _numpy_seconds(number)
        else:
            report.missing(_CASE, _NUMPY, "would take 8 bytes a sample", at=at)
        for system, seconds in take_turns(turns, rounds=max(3, scale.rounds)).items():
            median = report.add(_CASE, system, _METRIC, "us", [1e6 * value for value in seconds], at=at)
            medians += [median] if system == OURS else []
        tracemalloc.start()
        Permutation(number, seed=0, epoch=0)(positions[:512])
        peaks[exponent] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        report.add(_CASE, OURS, "peak memory, 512 indices", "KiB", [peaks[exponent] / 1024], at=at)
    report.against("permute_numpy", _CASE, _METRIC, ours=OURS, peers=[_NUMPY], at=["10^6 samples"])
    report.at_most("permute", max(medians), 1.0)
    report.at_most("permute_memory", max(peaks.values()) / min(peaks.values()), 1.5)


def _ours_seconds(number: int, positions: np.ndarray[tuple[int], np.dtype[np.int64]]) -> float:
    permutation = Permutation(number, seed=0, epoch=0)
    start = time.perf_counter()
    permutation(positions)
    return (time.perf_counter() - start) / len(positions)


def _numpy_seconds(number: int) -> float:
    start = time.perf_counter()
    np.random.default_rng(0).permutation(number)
    return (time.perf_counter() - start) / number
