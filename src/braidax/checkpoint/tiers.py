"""`Tiers`: several places for the checkpoints of one run, quick and lasting ones."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, final, runtime_checkable

from braidax.checkpoint.places.restoring import NothingValid
from braidax.checkpoint.snapshot.leaves import put_outside, with_outside
from braidax.errors import ArgumentError, BraidaxError

_logger = logging.getLogger(__name__)


@runtime_checkable
class Saver(Protocol):
    """What a training loop needs to save its state: a `Checkpointer`, an `Archive`, `Peers`, or `Tiers` of those.

    **Fields:** `notes`: as of `Checkpointer`.
    """

    notes: dict[str, str]

    @property
    def num_updates(self) -> int:
        """How many updates the state has seen."""
        ...

    @property
    def timeout_seconds(self) -> float:
        """The limit of every wait; it may be set."""
        ...

    @timeout_seconds.setter
    def timeout_seconds(self, seconds: float) -> None: ...

    def update(self, tree: Any, *, metric: Any = None) -> None:
        """As `Checkpointer.update`."""
        ...

    def save(self, tree: Any, *, metric: Any = None) -> Path:
        """As `Checkpointer.save`."""
        ...

    def wait(self) -> None:
        """As `Checkpointer.wait`."""
        ...

    def restore(self, like: Any, *, only: Sequence[str] | None = None) -> Any:
        """As `Checkpointer.restore`."""
        ...

    def close(self) -> None:
        """As `Checkpointer.close`."""
        ...


@runtime_checkable
class Tier(Saver, Protocol):
    """One of several savers of a run."""

    @property
    def path(self) -> Path:
        """Where its checkpoints are."""
        ...

    def newest(self) -> int | None:
        """As `Checkpointer.newest`."""
        ...

    def go_on(self, num_updates: int) -> None:
        """As `Checkpointer.go_on`."""
        ...


@final
class Tiers:
    """Saves one state in several places, each with an interval of its own, and restores the newest of all.

    ```
    saver = bx.checkpoint.Tiers(
        bx.Checkpointer("/dev/shm/run", bx.Every(10), keep=1),
        bx.checkpoint.Archive(bx.Checkpointer("runs/a", bx.Every(100)), "s3://bucket/run", bx.Every(1000)),
    )
    ```

    Every call goes to all tiers, in their order. One that fails does not keep the others from theirs; the first failure
    is raised afterwards. Each takes snapshots of its own.

    **Fields:** `notes`: as of `Checkpointer`, the same of all tiers.

    **Arguments:** `tiers`: at least one, from the quickest to the most lasting; they are closed by `close`.
    """

    def __init__(self, *tiers: Tier) -> None:
        if not tiers:
            raise ArgumentError("tiers=(): expected at least one, such as Checkpointer(path, Every(100))")
        if len({tier.num_updates for tier in tiers}) > 1:
            counts = [tier.num_updates for tier in tiers]
            raise ArgumentError(f"tiers= have seen {counts} updates: expected as many by all; make new ones")
        self.tiers = tiers
        self.notes = {name: text for tier in tiers for name, text in tier.notes.items()}
        for tier in tiers:
            tier.notes = self.notes

    @property
    def num_updates(self) -> int:
        """How many updates the state has seen."""
        return self.tiers[0].num_updates

    @property
    def timeout_seconds(self) -> float:
        """The limit of every wait, the longest of the tiers'; setting it sets all."""
        return max(tier.timeout_seconds for tier in self.tiers)

    @timeout_seconds.setter
    def timeout_seconds(self, seconds: float) -> None:
        for tier in self.tiers:
            tier.timeout_seconds = seconds

    def update(self, tree: Any, *, metric: Any = None) -> None:
        """Counts an update of the state, and takes the checkpoints that are due, as `Checkpointer.update`."""
        self._each(lambda tier: tier.update(tree, metric=metric))

    def save(self, tree: Any, *, metric: Any = None) -> Path:
        """Takes a checkpoint in every tier now, in their order. **Returns:** the folder of the last tier's."""
        return self._each(lambda tier: tier.save(tree, metric=metric))[-1]

    def wait(self) -> None:
        """Returns when no snapshot under way needs the tree any more, as `Checkpointer.wait`."""
        self._each(lambda tier: tier.wait())

    def restore(self, like: Any, *, only: Sequence[str] | None = None) -> Any:
        """Restores the newest checkpoint of all tiers that verifies, and goes on counting updates there in all.

        **Arguments, Returns, Raises:** as of `Checkpointer.restore`.
        """
        inside = with_outside(like)  # which gets back what is restored last, and that need not be what is found
        said = [(tier, tier.newest()) for tier in self.tiers]
        candidates = [(newest, tier) for tier, newest in said if newest is not None]
        found: tuple[Any, Tier] | None = None
        damaged: list[NothingValid] = []
        for newest, tier in sorted(candidates, key=lambda each: -each[0]):
            if found is not None and found[1].num_updates >= newest:
                break
            try:
                tree = tier.restore(inside, only=only)
            except NothingValid as error:
                damaged.append(error)
                continue
            if found is None or tier.num_updates > found[1].num_updates:
                found = tree, tier
        if found is None:
            if damaged:
                raise damaged[0]
            return like
        tree, source = found
        _logger.info("restored the checkpoint of update %d in %s", source.num_updates, source.path)
        for tier in self.tiers:
            if tier is not source:
                tier.go_on(source.num_updates)
        return put_outside(like, tree)

    def close(self) -> None:
        """Finishes what is under way and closes all tiers, as `Checkpointer.close`."""
        self._each(lambda tier: tier.close())

    def __enter__(self) -> "Tiers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _each(self, call: Callable[[Tier], Any]) -> list[Any]:
        results: list[Any] = []
        failures: list[Exception] = []
        for tier in self.tiers:
            try:
                results.append(call(tier))
            except BraidaxError as error:
                failures.append(error)
        if failures:
            for other in failures[1:]:
                _logger.error("%s", other)
            raise failures[0]
        return results
