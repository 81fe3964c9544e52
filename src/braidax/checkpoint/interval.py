"""When a checkpoint is due."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from braidax.errors import ArgumentError


@runtime_checkable
class Interval(Protocol):
    """Decides after which updates a checkpoint is taken."""

    def due(self, num_updates: int) -> bool:
        """Returns whether a checkpoint is due.

        **Arguments:** `num_updates`: how many updates the state has seen in all, those before a restart included.
        """
        ...


@dataclass(frozen=True)
class Every:
    """A checkpoint after every `num_updates` updates.

    **Arguments:** `num_updates`: at least 1.
    """

    num_updates: int

    def __post_init__(self) -> None:
        if self.num_updates < 1:
            raise ArgumentError(f"num_updates={self.num_updates!r}: expected a whole number >= 1, such as Every(100)")

    def due(self, num_updates: int) -> bool:
        """Returns whether `num_updates` is a multiple of the interval."""
        return num_updates % self.num_updates == 0
