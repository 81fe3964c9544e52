"""What a training loop needs of that which saves its state."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Saver(Protocol):
    """What a training loop needs to save its state; `Checkpointer` is one.

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
