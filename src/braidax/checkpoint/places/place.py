"""What a place for checkpoints is: what a user gives, and what is done there while a run goes on."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from braidax.checkpoint.background_job import BackgroundJob
from braidax.checkpoint.format.writing import Checksums
from braidax.checkpoint.processes import Processes
from braidax.checkpoint.snapshot.hold import Snapshot
from braidax.errors import ArgumentError, CheckpointError
from braidax.spans import Trace


class Skipped(NamedTuple):
    """A checkpoint that was not restored: its `path`, and the `reason`."""

    path: Path
    reason: str


class NothingValid(CheckpointError):
    """There are checkpoints, and none verifies; to callers it is a `CheckpointError` like others."""


class Part(NamedTuple):
    """What this process writes, when it is there. **Fields:** `owned`: the copy. `checksums`: of it."""

    owned: "Future[Snapshot]"
    checksums: "Future[Checksums]"


class Order(NamedTuple):
    """A checkpoint that is to be made.

    **Fields:** `step`: how many updates the tree has seen. `name`: of the messages about it, the same on all processes,
    used once. `metric`: of the tree, as process 0 sees it: a number to be had when it is asked for.
    `limit_bytes_per_second`: how fast a folder is written to at most. `trace`: gets the spans.
    """

    step: int
    name: str
    metric: Callable[[], float | None]
    limit_bytes_per_second: float | None
    trace: Trace


class Returned(NamedTuple):
    """What was restored from a place. **Fields:** `tree`; `step`: updates it has seen; `path`: of the checkpoint."""

    tree: Any
    step: int
    path: Path


@runtime_checkable
class Place(Protocol):
    """Where checkpoints are kept, as a user gives it to a `Checkpointer`; has no state of its own."""

    @property
    def every(self) -> int:
        """Of the checkpoints that are due it takes one in so many."""
        ...

    def open(self, processes: Processes, before: "Sequence[OpenPlace]") -> "OpenPlace":
        """Takes the place for this run, on all processes.

        **Arguments:** `processes`: that save together; for messages about this place alone. `before`: the places that
        stand before it.

        **Raises:** `CheckpointError` on all processes when it cannot be had on one.
        """
        ...


@runtime_checkable
class OpenPlace(Protocol):
    """A place while a run goes on. All processes call the same methods in the same order.

    **Fields:** `where`: what it is called in errors. `skipped`: checkpoints that the last `restore` found invalid.
    `job`: what of a checkpoint goes on when `persist` has returned, None where nothing does.
    """

    where: str
    skipped: list[Skipped]
    job: BackgroundJob | None

    @property
    def earlier(self) -> str:
        """The newest checkpoint of an earlier run that nobody has restored, empty without one."""
        ...

    def begin(self, order: Order) -> None:
        """Takes note of a checkpoint that begins, on the loop's thread; its `job` is over."""
        ...

    def persist(self, part: Part, order: Order) -> Path | None:
        """Makes this process's part of a checkpoint durable, on a thread of the checkpoint.

        It is called once for each `begin`, whatever has become of the snapshot or of other places.

        **Returns:** the folder of the checkpoint on this host, once all processes have done so; None without one.

        **Raises:** what went wrong, on all processes; earlier checkpoints are untouched.
        """
        ...

    def withdraw(self, name: str, step: int, reason: str) -> None:
        """Ends the others' wait for this process in a checkpoint, begun or not, to which it has nothing to say."""
        ...

    def newest(self) -> int | None:
        """Returns how many updates the newest checkpoint here has seen, whether or not it verifies.

        None where there is none, -1 where there are only parts.
        """
        ...

    def restore(self, like: Any, only: Sequence[str] | None, above: int) -> Returned | None:
        """Restores the newest checkpoint that verifies and has seen more than `above` updates, None without one.

        **Raises:** `NothingValid` where there are checkpoints, and none of any step verifies; `CheckpointError` where
        the newest valid one does not match `like`.
        """
        ...

    def go_on(self, num_updates: int) -> None:
        """Takes note of where the run goes on, wherever that was restored from.

        Checkpoints here that say that they are newer are taken for invalid: the next durable one replaces them.
        """
        ...

    def limit(self, timeout_seconds: float) -> None:
        """Sets the limit of every wait."""
        ...

    def close(self) -> None:
        """Gives the place free; a second call does nothing."""
        ...


def check_every(every: int) -> None:
    """Raises `ArgumentError` where a place takes none of the checkpoints that are due."""
    if every < 1:
        raise ArgumentError(f"every={every!r}: expected a whole number >= 1, of how many that are due one is taken")
