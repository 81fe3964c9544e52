"""How long a run is, how its steps spend their time, and who is told of each."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True)
class RunLength:
    """How long a run is: `num_steps` and `epochs` of all sessions (`None` without end), `batch_size` in samples."""

    num_steps: int | None
    epochs: int | None
    batch_size: int


@dataclass(frozen=True)
class Pace:
    """How steps have spent their time; paces add up.

    `step_seconds` is the time that the devices worked and `stall_seconds` the time in which they had nothing to do
    because the batch was not there yet; `num_samples` is what was trained.
    """

    step_seconds: float = 0.0
    stall_seconds: float = 0.0
    num_samples: int = 0

    def __add__(self, other: "Pace") -> "Pace":
        return Pace(
            self.step_seconds + other.step_seconds,
            self.stall_seconds + other.stall_seconds,
            self.num_samples + other.num_samples,
        )

    @property
    def seconds(self) -> float:
        """Computing and waiting; evaluation between steps does not count."""
        return self.step_seconds + self.stall_seconds

    @property
    def samples_per_second(self) -> float:
        """Samples trained per second, 0 if there were none."""
        return self.num_samples / self.seconds if self.seconds else 0.0

    @property
    def stall_percent(self) -> float:
        """Share of the time in which the devices waited for data, in percent."""
        return 100 * self.stall_seconds / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Done:
    """One finished step: its number from 1, its epoch from 0, its metrics and its pace."""

    step: int
    epoch: int
    metrics: Mapping[str, float]
    pace: Pace


@runtime_checkable
class Sink(Protocol):
    """Who is told of a run: of each step, of values that belong to no single step, and of the end."""

    def step(self, done: Done) -> None:
        """Takes a step that is done."""
        ...

    def note(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        """Takes values that were found after a step."""
        ...

    def say(self, line: str) -> None:
        """Takes a line for people."""
        ...

    def close(self) -> None:
        """Finishes what was begun."""
        ...


@runtime_checkable
class Logger(Protocol):
    """A function that is handed the metrics of a run: the `log` of one of wandb, `mlflow.log_metrics`, or your own."""

    def __call__(self, values: dict[str, float], /, *, step: int) -> object:
        """Takes the values of a step, counted from 1, or of an evaluation after it."""
        ...


def rates(pace: Pace) -> dict[str, float]:
    """Returns what is written of a pace, by name."""
    return {"samples_per_second": pace.samples_per_second, "stall_percent": pace.stall_percent}
