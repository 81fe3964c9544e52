"""What a report is told by a clock of its own."""

import threading
import time
from types import SimpleNamespace

import pytest

from braidax.report import Report, RunLength

LENGTH = RunLength(num_steps=4, epochs=2, batch_size=10)  # of 2 steps each


class Clock:
    """Replaces `time.perf_counter` in the report; the loop and the report's thread see a time of their own."""

    def __init__(self) -> None:
        self.seconds = threading.local()

    def set(self, seconds: float) -> None:
        self.seconds.now = seconds

    def perf_counter(self) -> float:
        return getattr(self.seconds, "now", 0.0)


class Metric:
    """A scalar that a device is still computing, until `gate` opens; it is then `done` seconds by the clock."""

    def __init__(self, value: float, clock: Clock, done: float) -> None:
        self.gate = threading.Event()
        self.value, self.clock, self.done = value, clock, done

    def block_until_ready(self) -> None:
        assert self.gate.wait(30)
        self.clock.set(self.done)

    def __float__(self) -> float:
        return self.value


def clock_of_report(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Returns the clock by which the report tells the time from now on."""
    clock = Clock()
    fake = SimpleNamespace(perf_counter=clock.perf_counter, monotonic=time.monotonic, time=lambda: 1e9)
    for module in ("report", "display", "metrics_file"):
        monkeypatch.setattr(f"braidax.report.{module}.time", fake)
    return clock


def told_steps(report: Report, clock: Clock, monkeypatch: pytest.MonkeyPatch, *, before_apply: bool) -> None:
    """Two steps of a loop that tells all; their updates end 2 s behind their gradients, the second's 3 s."""
    ends = [Metric(0.0, clock, 9.0), Metric(0.0, clock, 23.0)]
    monkeypatch.setattr("braidax.report.ends.Ends.of", lambda self, state: (ends[state],))
    metrics = [Metric(4.0, clock, 7.0), Metric(2.0, clock, 20.0)]
    with report.following(LENGTH, 0):
        for number, start in enumerate((0.0, 10.0)):
            clock.set(start)
            with report.waiting():
                clock.set(start + 1)
            with report.updating((lambda at=start: clock.set(at + 4)) if before_apply else None) as dispatched:
                clock.set(start + 2)
                dispatched()
                clock.set(start + 5)
            report.update({"loss": metrics[number]}, epoch=0, state=number)
            with report.saving():
                clock.set(start + 6)
            with report.evaluating():
                clock.set(start + 7)
            for one in (metrics[number], ends[number]):
                one.gate.set()
