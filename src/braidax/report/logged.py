"""Metrics for functions that hand them on, such as the `log` of a run of wandb."""

from collections.abc import Mapping, Sequence
from typing import final

from braidax.report.pace import Done, Logger, rates


@final
class Logged:
    """Calls each function for each step that is done, and for each evaluation, on the thread of the report."""

    def __init__(self, loggers: Sequence[Logger]) -> None:
        self._loggers = loggers

    def step(self, done: Done) -> None:
        """Logs the metrics of a step."""
        self.note(done.step, done.epoch, {**done.metrics, **rates(done.pace)})

    def note(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        """Logs values."""
        for log in self._loggers:
            log(dict(values), step=step)

    def say(self, line: str) -> None:
        """Logs nothing: it is for people."""

    def close(self) -> None:
        """Ends nothing: who made a logger ends it."""
