"""How often checkpoints are taken: what the user asks for, and what spaces them while a run goes on."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, Protocol, final, runtime_checkable

from braidax.checkpoint.interval.adaptive_messages import Announcing
from braidax.errors import ArgumentError

Bound = Literal["probe", "persist", "lost work", "overhead", "failures", "set"]


@dataclass(frozen=True)
class Verdict:
    """How far apart checkpoints are, and why.

    **Fields:** `num_updates`: between two. `bound`: what asks for that: `"probe"` as long as nothing has been measured;
    `"persist"`, `"lost work"`, `"overhead"` or `"failures"`, as of `Adaptive`; `"set"` by the user or the tuner.
    `step_seconds`: of a step without a checkpoint under way, 0 if not measured, as all that follow. `cost_seconds`: by
    which a checkpoint makes the run longer. `persist_seconds`: until it is durable. `conflict`: which bounds cannot be
    kept, in words, and empty where all are.
    """

    num_updates: int
    bound: Bound
    step_seconds: float = 0.0
    cost_seconds: float = 0.0
    persist_seconds: float = 0.0
    conflict: str = ""

    @property
    def overhead(self) -> float:
        """The cost as a share of the time of the steps between two checkpoints."""
        seconds = self.num_updates * self.step_seconds
        return self.cost_seconds / seconds if seconds else 0.0

    @property
    def lost_seconds(self) -> float:
        """The work that a failure costs at worst: that from one checkpoint until the next is durable."""
        return self.num_updates * self.step_seconds + self.cost_seconds + self.persist_seconds

    def set_to(self, num_updates: int) -> "Verdict":
        """Returns what it is once somebody has set the distance. **Raises:** `ArgumentError` below 1."""
        return replace(self, num_updates=_checked(num_updates), bound="set", conflict="")

    def __str__(self) -> str:
        told = f"a checkpoint every {self.num_updates} updates ({self.bound})"
        if self.step_seconds:
            told += f": {100 * self.overhead:.1f} % of the time, at most {self.lost_seconds:.3g} s of work lost"
        return f"{told}; {self.conflict}" if self.conflict else told


@runtime_checkable
class Spacing(Protocol):
    """Spaces the checkpoints of a run. A `Checkpointer` tells it what happens; all calls are from the loop's thread."""

    @property
    def num_updates(self) -> int:
        """Updates between two checkpoints at present; it may be set."""
        ...

    @num_updates.setter
    def num_updates(self, number: int) -> None: ...

    @property
    def paused(self) -> bool:
        """Whether that number stays as it is, whatever is measured; it may be set."""
        ...

    @paused.setter
    def paused(self, paused: bool) -> None: ...

    @property
    def verdict(self) -> Verdict:
        """The distance, and why it is that."""
        ...

    def due(self, num_updates: int) -> bool:
        """Returns whether a checkpoint is due, the same on all processes; called once after every update.

        **Arguments:** `num_updates`: how many updates the state has seen in all, those before a restart included.
        """
        ...

    def stalled(self, seconds: float) -> None:
        """Takes note that the loop was held up by a checkpoint, since the last update."""
        ...

    def began(self) -> None:
        """Takes note that the checkpoint that was due is under way."""
        ...

    def ended(self) -> None:
        """Takes note that it is durable, or has failed."""
        ...


@runtime_checkable
class Interval(Protocol):
    """How often checkpoints are taken; has no state of its own."""

    def start(
        self,
        num_updates: int,
        *,
        announcements: Announcing | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> Spacing:
        """Returns what spaces the checkpoints of one run.

        **Arguments:** `num_updates`: those of the state so far. `announcements`: where processes save one state
        together. `clock`: returns seconds.
        """
        ...


@dataclass(frozen=True)
class Every:
    """A checkpoint after every `num_updates` updates.

    **Arguments:** `num_updates`: at least 1.
    """

    num_updates: int

    def __post_init__(self) -> None:
        _checked(self.num_updates)

    def due(self, num_updates: int) -> bool:
        """Returns whether `num_updates` is a multiple of the interval."""
        return num_updates % self.num_updates == 0

    def start(
        self,
        num_updates: int,
        *,
        announcements: Announcing | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> Spacing:
        """Returns what spaces the checkpoints of one run, as of `Interval.start`."""
        return Regular(self)


@final
class Regular:
    """The running side of `Every`: a checkpoint at each multiple of a number that nothing changes but who sets it.

    Where processes save one state together, all of them set it, between the same two updates.

    **Arguments:** `every`: the number to begin with. **Fields:** as of `Spacing`.
    """

    def __init__(self, every: Every) -> None:
        self.paused = False
        self._every = every

    @property
    def num_updates(self) -> int:
        """Updates between two checkpoints at present."""
        return self._every.num_updates

    @num_updates.setter
    def num_updates(self, number: int) -> None:
        self._every = Every(number)

    @property
    def verdict(self) -> Verdict:
        """The number, which was set."""
        return Verdict(self.num_updates, "set")

    def due(self, num_updates: int) -> bool:
        """As of `Spacing.due`."""
        return self._every.due(num_updates)

    def stalled(self, seconds: float) -> None:
        """Changes nothing."""

    def began(self) -> None:
        """Changes nothing."""

    def ended(self) -> None:
        """Changes nothing."""


def check_interval(interval: object) -> None:
    """Raises `ArgumentError` when something is no interval, such as a number of updates."""
    if not isinstance(interval, Interval) or isinstance(interval, type):
        such = f"Every({interval})" if isinstance(interval, int) and interval > 0 else "Every(100)"
        raise ArgumentError(f"interval={interval!r}: expected what says when one is due, such as {such} or Adaptive()")


def _checked(num_updates: int) -> int:
    if num_updates < 1:
        raise ArgumentError(f"num_updates={num_updates!r}: expected a whole number >= 1, such as Every(100)")
    return num_updates
