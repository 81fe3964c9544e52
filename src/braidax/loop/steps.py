"""What the loop asks of a step, and of what turns knobs beside it, beyond `update`."""

import contextlib
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from braidax.checkpoint import Saver
from braidax.data import DataLoader

if TYPE_CHECKING:
    from braidax.parallel import PipelinedStep, ServedStep, Step, TrainStep, WorkerStep

    AnyStep = Step | TrainStep | PipelinedStep | ServedStep | WorkerStep


@runtime_checkable
class HasTables(Protocol):
    """A step whose tables are elsewhere, on servers."""

    @property
    def tables(self) -> Any:
        """Stands for them in a checkpoint."""
        ...

    def prepare(self, batch: Any) -> None:
        """Begins to pull what a coming batch reads."""
        ...


@runtime_checkable
class HasVariables(Protocol):
    """A step of a worker, all of whose variables are on servers."""

    @property
    def variables(self) -> Any:
        """Stands for them in a checkpoint."""
        ...

    @property
    def fetches_ahead(self) -> bool:
        """Whether it pulls rows ahead that are never late."""
        ...

    def meet(self, state: Any) -> Any:
        """Returns the state to go on with, when all workers have come."""
        ...

    def of_first(self, value: Any) -> Any:
        """Returns the array that the first worker gives, when all have come."""
        ...

    def ends(self, *, wanted: bool) -> bool:
        """Returns whether it is to end now, as all others do, since one of them wants to."""
        ...


@runtime_checkable
class Tuning(Protocol):
    """Turns knobs while the loop runs; `braidax.tune.Tuner` is one."""

    def owning(self, loader: DataLoader, saver: Saver | None = None) -> contextlib.AbstractContextManager[Any]:
        """Owns the knobs of both inside the `with` block."""
        ...

    def stepped(self) -> None:
        """Takes note of an update."""
        ...

    def pause(self) -> None:
        """Takes note that the time until the next one is not that of an update."""
        ...


class Untuned:
    """Turns no knob."""

    def owning(self, loader: DataLoader, saver: Saver | None = None) -> contextlib.AbstractContextManager[Any]:
        """Owns nothing."""
        return contextlib.nullcontext()

    def stepped(self) -> None:
        """Does nothing."""

    def pause(self) -> None:
        """Does nothing."""
