"""Whether steps are faster with one setting than with another: means, and how far they can be trusted."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, variance

_NUM_IN_GROUP = 4  # steps whose times are averaged first: a loop that runs ahead makes one up for another
_OUTLIER = 8.0  # times the median: something else went on
LEAST_GAIN = 0.01
"""The share of a step's time below which a gain is not worth a change."""
ERRORS = 2.0
"""Standard errors that a gain has to be above, to be none of chance."""


@dataclass(frozen=True)
class Comparison:
    """How much faster steps are with another setting.

    **Fields:** `gain`: the share of a step's time that is saved, negative where steps take longer. `error`: the
    standard error of `gain`.
    """

    gain: float
    error: float

    @property
    def is_worth_it(self) -> bool:
        """Whether more than 1 % is saved."""
        return self.gain > LEAST_GAIN

    @property
    def is_beyond_noise(self) -> bool:
        """Whether steps are faster by more than twice the standard error."""
        return self.gain > ERRORS * self.error

    def __str__(self) -> str:
        percent = 100 * abs(self.gain)
        return f"{percent:.1f} % {'faster' if self.gain >= 0 else 'slower'} (± {100 * self.error:.1f} %)"


def compare(before: Sequence[float], after: Sequence[float]) -> Comparison:
    """Compares the seconds of steps with one setting to those with another.

    Steps that took more than eight times the median count as that much. The error is that of means over groups of
    steps, since the times of neighbors depend on each other.

    **Arguments:** `before`, `after`: seconds of steps, at least 8 each, in their order.
    """
    limit = _OUTLIER * median([*before, *after])
    mean, error = _mean([min(seconds, limit) for seconds in before])
    other, other_error = _mean([min(seconds, limit) for seconds in after])
    ratio = other / mean
    return Comparison(1 - ratio, ratio * math.hypot(error / mean, other_error / other))


def _mean(seconds: Sequence[float]) -> tuple[float, float]:
    """Returns the mean, and its standard error."""
    groups = [
        fmean(seconds[at : at + _NUM_IN_GROUP]) for at in range(0, len(seconds) - _NUM_IN_GROUP + 1, _NUM_IN_GROUP)
    ]
    return fmean(seconds), math.sqrt(variance(groups) / len(groups))
