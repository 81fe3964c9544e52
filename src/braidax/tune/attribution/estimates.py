"""What cannot be seen of a step and is estimated: how much a checkpoint slows it, and the bubbles of stages."""

import statistics
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .intervals import length, within
from .recorded import Pipelined, Recorded
from .step_time import Lane

_LEAST_UNDISTURBED = 3
_UNDISTURBED = 0.01  # at most such a share of a step is beside a checkpoint


@dataclass(frozen=True)
class Measured:
    """What was seen of a step.

    **Fields:** `number`, `start`, `end`, `compiles`; `lanes`: seconds without a program on the devices, by lane.
    `busy_seconds`: with one; of these `applying_seconds` of the optimizer, and `beside_seconds` beside a checkpoint.
    """

    number: int
    start: float
    end: float
    compiles: bool
    lanes: Mapping[Lane, float]
    busy_seconds: float
    applying_seconds: float
    beside_seconds: float


def interference_of(steps: Sequence[Measured]) -> list[float]:
    """Returns by how many seconds a checkpoint made each step longer, as `attribute` says."""
    counted = [step for step in steps if not step.compiles]
    quiet = [step.busy_seconds for step in counted if step.beside_seconds <= _UNDISTURBED * step.busy_seconds]
    beside = [step for step in counted if step.beside_seconds > _UNDISTURBED * step.busy_seconds]
    if len(quiet) < _LEAST_UNDISTURBED or not beside:
        return [0.0] * len(steps)
    alone = statistics.median(quiet)
    rates = sorted(((step.busy_seconds - alone) / step.beside_seconds, step.beside_seconds) for step in beside)
    rate = min(1.0, max(0.0, _weighted_median(rates)))
    return [0.0 if step.compiles else rate * step.beside_seconds for step in steps]


def _weighted_median(pairs: Sequence[tuple[float, float]]) -> float:
    """Returns the value at which half of the weight is reached. **Arguments:** `pairs`: values in order, weights."""
    half, reached = sum(weight for _, weight in pairs) / 2, 0.0
    for value, weight in pairs:
        reached += weight
        if reached >= half:
            return value
    raise AssertionError("there is some weight")


def bubbles_of(steps: Sequence[Measured], processes: Sequence[Recorded]) -> list[float]:
    """Returns the share of each step's gradients in which devices of stages compute nothing, 0 without stages.

    It is that of the latest measured update up to the step, or else of the first one.
    """
    updates = sorted(one for process in processes for one in process.pipelined)
    shares: list[tuple[float, float]] = []
    while updates:
        first = updates[0]
        shares.append((first.start, _bubble([one for one in updates if one.start < first.end], steps)))
        updates = [one for one in updates if one.start >= first.end]
    if not shares:
        return [0.0] * len(steps)
    return [shares[max(0, bisect_left(shares, (step.end, 0.0)) - 1)][1] for step in steps]


def _bubble(updates: Sequence[Pipelined], steps: Sequence[Measured]) -> float:
    """Returns the share of one update, which all processes have measured.

    It begins when it was dispatched; devices may still be at the step before then.
    """
    devices = [device for one in updates for device in one.operations if device]
    if not devices:
        return 0.0
    start, end = min(device[0][0] for device in devices), max(device[-1][1] for device in devices)
    own = bisect_left(steps, end, key=lambda step: step.end)
    if own < len(steps):
        start = max(start, steps[own].start)
    if end <= start:
        return 0.0
    busy = sum(length(within(device, start, end)) for device in devices)
    return max(0.0, 1 - busy / (len(devices) * (end - start)))
