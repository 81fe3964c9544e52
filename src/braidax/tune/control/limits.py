"""What a run is tuned for: how much checkpoints may cost, how much work may be lost, how much memory batches take."""

import math
from dataclasses import dataclass
from typing import Literal

from braidax.checkpoint import Adaptive
from braidax.errors import ArgumentError

Priority = Literal["speed", "balanced", "safe"]
"""A word for limits: what a run would rather give up. `PRIORITIES` says which limits it stands for."""


@dataclass(frozen=True)
class Limits:
    """Limits within which a run is made as fast as it can be.

    **Arguments:** `overhead`: of checkpoints, as a share of the time of a step. `max_lost_seconds`: the work that a
    failure may cost at worst, which prevails over `overhead`. `mtbf_seconds`: the mean time between failures of the
    whole job. `memory_bytes`: of the host, for batches in flight.

    **Raises:** `ArgumentError` for what is no such number.
    """

    overhead: float = 0.035
    max_lost_seconds: float | None = None
    mtbf_seconds: float | None = None
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.memory_bytes is not None and not 0 < self.memory_bytes < math.inf:
            raise ArgumentError(f"memory_bytes={self.memory_bytes!r}: expected a positive number of bytes, or None")
        _ = self.interval

    @property
    def interval(self) -> Adaptive:
        """When checkpoints are due within these limits."""
        return Adaptive(self.overhead, self.max_lost_seconds, self.mtbf_seconds)


PRIORITIES: dict[Priority, Limits] = {
    "speed": Limits(overhead=0.01),
    "balanced": Limits(),
    "safe": Limits(overhead=0.1, max_lost_seconds=60.0),
}
"""What the three words stand for: checkpoints cost 1 %, 3.5 %, or up to 10 % and a minute of work is lost at most."""


def limits_of(priority: Priority | Limits) -> Limits:
    """Returns the limits that a word stands for. **Raises:** `ArgumentError` for another word."""
    if isinstance(priority, Limits):
        return priority
    if priority not in PRIORITIES:
        raise ArgumentError(
            f"priority={priority!r}: expected {', '.join(repr(word) for word in PRIORITIES)}, or Limits(…) of your own"
        )
    return PRIORITIES[priority]
