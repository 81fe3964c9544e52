"""An operation that goes on while its caller does something else."""

import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, cast, final

from braidax.comm.group_messages import Steps
from braidax.comm.losing.domain import Domain
from braidax.comm.progress import Progress
from braidax.comm.transports.transport import Operation
from braidax.comm.waiting import all_done, late
from braidax.errors import CommError, WaitTimeout

T = TypeVar("T")


@final
class Request(Generic[T]):
    """What has been begun: `wait` returns its result. Made by `Communicator.start`.

    Arrays and buffers that were given must not be changed before `wait` has returned, or `done` is true.

    **Arguments:** `progress`: moves the messages. `steps`: the algorithm. `timeout_seconds`: the limit of `wait`.
    `failed`: is told what it failed of, as soon as that is known.
    """

    def __init__(
        self,
        progress: Progress | Domain,
        steps: Steps[T],
        timeout_seconds: float,
        failed: Callable[[BaseException], None],
    ) -> None:
        self._progress = progress
        self._steps = steps
        self._timeout_seconds = timeout_seconds
        self._failed = failed
        self._operations: Sequence[Operation] = ()  # that the algorithm waits for
        self._whole = Operation(progress.world.rank)
        self._result: T | None = None
        self._error: BaseException | None = None
        self._advance()

    @property
    def done(self) -> bool:
        """Whether it has ended; never waits."""
        return self._whole.done or self._progress.failure is not None

    def wait(self, timeout_seconds: float | None = None) -> T:
        """Waits for the result; may be called again, also after `WaitTimeout`.

        **Arguments:** `timeout_seconds`: the limit; that of the communicator by default.

        **Returns:** what the blocking form returns. **Raises:** what the blocking form raises. A limit that passes ends
        the generation in the blocking form only.
        """
        limit = self._timeout_seconds if timeout_seconds is None else timeout_seconds
        try:
            self._progress.wait([self._whole], time.monotonic() + limit)
        except WaitTimeout:
            raise late(self._progress.world, self._operations) from None
        except BaseException as error:
            self._failed(error)
            raise
        if self._error is not None:
            raise self._error
        return cast("T", self._result)

    def _advance(self) -> None:
        """Runs the algorithm until it has to wait; called by whoever noticed that it may go on, one at a time."""
        try:
            self._progress.check()
            while True:
                failed = next((item.error for item in self._operations if item.error is not None), None)
                if failed is not None:
                    raise failed
                self._operations = operations = next(self._steps)
                if not all_done(operations):
                    self._progress.then(operations, self._advance)
                    return
        except StopIteration as stop:
            self._result = stop.value
            self._progress.end(self._whole)
        except BaseException as error:
            self._failed(error)
            if isinstance(error, CommError):
                self._progress.end(self._whole, error)
                return
            self._error = error  # raised by wait: what a user's ufunc or dtype makes of its operands
            self._progress.end(self._whole)
            if not isinstance(error, Exception):  # an interrupt is for whoever noticed that this may go on, too
                raise


def run(progress: Progress | Domain, steps: Steps[Any], deadline: float) -> Any:
    """Runs an algorithm on the caller's thread, and returns its result. **Raises:** as `Progress.wait`."""
    progress.check()  # an algorithm for one rank never would
    try:
        while True:
            progress.wait(next(steps), deadline)
    except StopIteration as stop:
        return stop.value
    except WaitTimeout:
        steps.close()  # at once, whoever keeps the error
        raise
