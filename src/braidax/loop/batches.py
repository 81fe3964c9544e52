"""The batches of a loop, and the one that comes, where an update is told."""

from typing import TYPE_CHECKING, Any, Literal, final

from braidax.data import Cursor, DataLoader
from braidax.errors import ArgumentError, BraidaxError
from braidax.loop.steps import HasTables, HasVariables
from braidax.parallel import Step

if TYPE_CHECKING:
    from braidax.loop.steps import AnyStep


def is_told(step: "AnyStep", coming: Literal["auto", "known", "unknown"]) -> bool:
    """Whether updates are told the coming batch. **Raises:** `ArgumentError` where they could make nothing of it."""
    if coming not in ("auto", "known", "unknown"):
        raise ArgumentError(f'coming is {coming!r}, expected "auto", "known" or "unknown"')
    served = isinstance(step, HasTables) or (isinstance(step, HasVariables) and step.fetches_ahead)
    fetches = served or (isinstance(step, Step) and step.fetches_ahead)
    if coming == "known" and not fetches:
        raise ArgumentError(
            'coming is "known", and the step fetches nothing ahead: it is decorated, or reads no table by rows; '
            'expected "auto" or "unknown"'
        )
    if coming == "auto":
        return served or (fetches and all(device.platform != "cpu" for device in step.mesh.devices.flat))
    return coming == "known"


@final
class Batches:
    """The batches of a loader, each with the one that comes, if that is wanted and there is one.

    `cursor` stands behind the last one that was taken, wherever the loader's own is.
    """

    def __init__(self, loader: DataLoader, *, is_ahead: bool) -> None:
        self._loader, self._batches, self._is_ahead = loader, iter(loader), is_ahead
        self.cursor = loader.cursor
        self._following: tuple[Any, Cursor] | None = None
        self._error: BraidaxError | None = None

    @property
    def are_over(self) -> bool:
        """Whether all epochs are over."""
        return self._loader.epochs is not None and self.cursor.epoch >= self._loader.epochs

    def take(self) -> tuple[Any, dict[str, Any]]:
        """Returns a batch, and what an update is told of the one that comes, whose error is raised when it is taken."""
        if self._error is not None:
            raise self._error
        batch, self.cursor = self._next() if self._following is None else self._following
        self._following = None
        if self._is_ahead and not self.are_over:
            try:
                self._following = self._next()
            except BraidaxError as error:
                self._error = error
        return batch, {} if self._following is None else {"coming": self._following[0]}

    def close(self) -> None:
        """Sets the loader's cursor behind what was taken."""
        if self._loader.cursor != self.cursor:
            self._loader.cursor = self.cursor

    def _next(self) -> tuple[Any, Cursor]:
        return next(self._batches), self._loader.cursor
