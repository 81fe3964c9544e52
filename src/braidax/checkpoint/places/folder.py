"""`Folder`: checkpoints in a folder that all processes see."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from braidax.checkpoint.background_job import BackgroundJob
from braidax.checkpoint.places import persist
from braidax.checkpoint.places.place import OpenPlace, Order, Part, Returned, Skipped, check_every
from braidax.checkpoint.places.retention import Retention
from braidax.checkpoint.processes import Processes
from braidax.errors import ArgumentError


@dataclass(frozen=True)
class Folder:
    """A folder, on a disk or in memory, which all processes see and which is one run's at a time.

    **Arguments:** `path`: made if missing and locked until the checkpointer is closed. `every`: of the checkpoints that
    are due it takes one in so many. `keep`: how many of the newest stay, at least 1; an older one goes when a newer one
    is durable. `keep_every`: those of steps that are multiples of it stay as well. `keep_best`: how many of those with
    the lowest `metric` stay as well.
    """

    path: str | os.PathLike[str]
    every: int = 1
    keep: int = 3
    keep_every: int | None = None
    keep_best: int = 0

    def __post_init__(self) -> None:
        check_every(self.every)
        if self.keep < 1:
            raise ArgumentError(
                f"keep={self.keep!r}: expected a whole number >= 1; the newest checkpoint is always kept"
            )
        if self.keep_every is not None and self.keep_every < 1:
            raise ArgumentError(f"keep_every={self.keep_every!r}: expected a whole number >= 1, or None")
        if self.keep_best < 0:
            raise ArgumentError(f"keep_best={self.keep_best!r}: expected a whole number >= 0")

    def open(self, processes: Processes, before: Sequence[OpenPlace]) -> "OpenFolder":
        """As of `Place`. **Raises:** `CheckpointError` when `path` is no folder to write to, or another run's."""
        return OpenFolder(self, processes)


@final
class OpenFolder:
    """The running side of `Folder`.

    **Arguments:** as of `Place.open`; `given`: the options. **Fields:** as of `OpenPlace`; `path`: of the folder.
    `every`: as given. `saved`: by the name of its order the checkpoint that was last made durable.
    """

    def __init__(self, given: Folder, processes: Processes) -> None:
        self.path = Path(given.path).absolute()
        self.where = str(self.path)
        self.every = given.every
        self.skipped: list[Skipped] = []
        self.job: BackgroundJob | None = None
        self.saved: dict[str, Path] = {}
        self._processes = processes
        self._retention = Retention(given.keep, given.keep_every, given.keep_best)
        self._num_met = 0
        self._lock, self._earlier = persist.occupy(self.path, processes)

    @property
    def earlier(self) -> str:
        """As of `OpenPlace`."""
        return self._earlier

    def begin(self, order: Order) -> None:
        """Does nothing."""

    def persist(self, part: Part, order: Order) -> Path:
        """As of `OpenPlace`; process 0 then removes what does not stay."""
        self.saved.clear()
        path = persist.commit(self.path, order, part, self._processes)
        self.saved[order.name] = path
        if self._processes.index == 0:
            self._retention.apply(self.path, [skipped.path for skipped in self.skipped])
        return path

    def withdraw(self, name: str, step: int, reason: str) -> None:
        """As of `OpenPlace`."""
        self._processes.withdraw(name, reason)

    def newest(self) -> int | None:
        """As of `OpenPlace`."""
        from braidax.checkpoint.places import restoring  # which most runs need once, at their start

        return restoring.newest_step(self.path, self._processes, self._met("newest"))

    def restore(self, like: Any, only: Sequence[str] | None, above: int) -> Returned | None:
        """As of `OpenPlace`. Those that do not verify go with the next durable one."""
        from braidax.checkpoint.places import restoring

        found, self.skipped = restoring.newest(self.path, like, only, self._processes, self._met("restore"), above)
        if found is None:
            if self.skipped and above < 0:
                raise restoring.nothing_valid(self.path, [skipped.reason for skipped in self.skipped])
            return None
        return Returned(found.tree, found.step, found.path)

    def go_on(self, num_updates: int) -> None:
        """As of `OpenPlace`."""
        from braidax.checkpoint.places import restoring

        known = {skipped.path for skipped in self.skipped}
        newer = [found.path for found in restoring.listed_in(self.path) if found.step > num_updates]
        self.skipped += [Skipped(path, "a state from elsewhere was newer") for path in newer if path not in known]
        self._earlier = ""

    def limit(self, timeout_seconds: float) -> None:
        """As of `OpenPlace`."""
        self._processes.timeout_seconds = timeout_seconds

    def close(self) -> None:
        """As of `OpenPlace`."""
        if self._lock is not None:
            self._lock.close()

    def _met(self, what: str) -> str:
        """Returns a name for messages, the same on all processes and used once."""
        self._num_met += 1
        return f"{what}-{self._num_met}"
