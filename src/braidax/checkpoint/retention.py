"""Which checkpoints stay."""

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from braidax.checkpoint import folders
from braidax.checkpoint.reading import read_manifest
from braidax.errors import CheckpointError


@dataclass(frozen=True)
class Retention:
    """Decides which checkpoints of a run stay.

    **Arguments:** `newest`: how many of the newest, at least 1. `every`: those of steps that are multiples of it stay
    as well. `best`: how many of those with the lowest metrics.
    """

    newest: int
    every: int | None
    best: int
    _metrics: dict[Path, float] = field(default_factory=dict[Path, float], init=False)

    def apply(self, root: Path, obsolete: Collection[Path]) -> None:
        """Removes what does not stay; only to be called once the newest is durable.

        Of each step the newest revision counts.

        **Arguments:** `root`: the folder of all checkpoints. `obsolete`: those that are removed in any case.

        **Raises:** `CheckpointError` naming what cannot be removed.
        """
        counted: dict[int, folders.Found] = {}
        for found in folders.checkpoints(root):
            if found.path not in obsolete:
                counted.setdefault(found.step, found)
        staying = set(list(counted.values())[: self.newest])
        staying |= {found for found in counted.values() if self.every is not None and found.step % self.every == 0}
        if self.best:
            rated = [(self._metric(found.path), -found.step, found) for found in counted.values()]
            staying |= {found for metric, _, found in sorted(rated)[: self.best] if metric < math.inf}
        for found in folders.checkpoints(root):
            if found not in staying:
                folders.remove(found)

    def _metric(self, path: Path) -> float:
        """Returns the metric of a checkpoint; infinity where it has none, or none that can be compared."""
        if path not in self._metrics:
            try:
                metric = read_manifest(path).about.metric
            except CheckpointError:
                metric = None
            self._metrics[path] = math.inf if metric is None or math.isnan(metric) else metric
        return self._metrics[path]
