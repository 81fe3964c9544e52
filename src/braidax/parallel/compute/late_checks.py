"""Metrics that say whether something was wrong, looked at without waiting for the devices at each step."""

from collections import deque
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from braidax.errors import DataError

from .feed import Check

LATE_UPDATES = 4
"""So many updates later metrics are looked at: the devices have passed that update long ago."""


class LateChecks:
    """Looks at some metrics a few updates after they were dispatched.

    All processes look at the same update's metrics at the same call, so that all raise or none does.

    **Arguments:** `checks`: by the metric's name, what is wrong with a value.
    """

    def __init__(self, checks: Mapping[str, Check]) -> None:
        self._checks = checks
        self._coming: deque[tuple[str, dict[str, jax.Array]]] = deque()

    def take(self, metrics: dict[str, Any], what: str) -> dict[str, Any]:
        """Takes what is checked out of the metrics of a batch. **Arguments:** `what`: the batch, in words."""
        found = {name: metrics.pop(name) for name in self._checks if name in metrics}
        if found:
            self._coming.append((what, found))
        return metrics

    def check(self, *, late: int = LATE_UPDATES) -> None:
        """Looks at the metrics that so many others have followed. **Raises:** `DataError` naming the batch."""
        while len(self._coming) > late - 1:
            what, found = self._coming.popleft()
            for name, value in found.items():
                if told := self._checks[name](np.asarray(value)):
                    self._coming.clear()
                    raise DataError(f"{what} {told}")
