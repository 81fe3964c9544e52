"""Windows of steps: how long each took, and which of them had a checkpoint under way."""

import math
from dataclasses import dataclass, field
from typing import final

_SECONDS = 0.25  # that a window takes at least
_MIN_STEPS = 8
_MAX_STEPS = 64
_LONGEST = 4  # times as many steps until enough of them were in peace


@dataclass(frozen=True)
class Window:
    """Steps that went by with one setting.

    **Fields:** `seconds`: of each step. `disturbed`: whether a checkpoint was under way in it. `wait_seconds`: for
    data, of all.
    """

    seconds: tuple[float, ...] = ()
    disturbed: tuple[bool, ...] = ()
    wait_seconds: float = 0.0

    def __add__(self, other: "Window") -> "Window":
        return Window(
            self.seconds + other.seconds,
            self.disturbed + other.disturbed,
            self.wait_seconds + other.wait_seconds,
        )

    @property
    def calm(self) -> tuple[float, ...]:
        """The seconds of those in which no checkpoint was under way."""
        return tuple(one for one, disturbed in zip(self.seconds, self.disturbed, strict=True) if not disturbed)

    @property
    def wait(self) -> float:
        """Share of the time that was waited for data."""
        total = sum(self.seconds)
        return self.wait_seconds / total if total else 0.0


@final
@dataclass
class Measuring:
    """A window that is being measured, behind the steps that a change needs until it shows.

    **Fields:** `settling_steps`: that still count for nothing.
    """

    settling_steps: int
    _seconds: list[float] = field(default_factory=list[float])
    _disturbed: list[bool] = field(default_factory=list[bool])

    def add(self, seconds: float, *, disturbed: bool) -> bool:
        """Adds a step. **Returns:** whether it counts."""
        if self.settling_steps:
            self.settling_steps -= 1
            return False
        self._seconds.append(seconds)
        self._disturbed.append(disturbed)
        return True

    @property
    def is_full(self) -> bool:
        """Whether it has enough steps, and enough of them in peace unless checkpoints leave no such steps."""
        num_steps = len(self._seconds)
        if num_steps < _MIN_STEPS:
            return False
        wanted = min(_MAX_STEPS, max(_MIN_STEPS, math.ceil(_SECONDS * num_steps / sum(self._seconds))))
        num_calm = num_steps - sum(self._disturbed)
        return num_steps >= _LONGEST * wanted or (num_steps >= wanted and num_calm >= min(wanted, _MIN_STEPS))

    def window(self, wait_seconds: float) -> Window:
        """Returns what was measured. **Arguments:** `wait_seconds`: for data, since it began to count."""
        return Window(tuple(self._seconds), tuple(self._disturbed), wait_seconds)


def comparable(before: Window, after: Window) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns the seconds to compare: of steps in peace where both have enough of them, else of all."""
    has_few = [len(one.calm) < max(_MIN_STEPS, len(one.seconds) // 2) for one in (before, after)]
    return (before.seconds, after.seconds) if any(has_few) else (before.calm, after.calm)
