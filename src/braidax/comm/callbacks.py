"""What is called once operations have ended."""

from collections.abc import Callable, Sequence
from typing import final

from braidax.comm.transports.transport import Operation


@final
class Callbacks:
    """Functions, and the operations whose ends they wait for. The owner calls all of this under its lock.

    **Fields:** `ready`: operations that have ended since `take`, and that somebody wants to hear of.
    """

    def __init__(self) -> None:
        self.ready: list[Operation] = []
        self._of: dict[Operation, Callable[[], None]] = {}

    def __bool__(self) -> bool:
        """Whether any function waits."""
        return bool(self._of)

    def add(self, operations: Sequence[Operation], call: Callable[[], None]) -> None:
        """Lets a function wait for operations none of which has ended."""
        num_missing = len(operations)

        def ended() -> None:
            nonlocal num_missing
            num_missing -= 1
            if not num_missing:
                call()

        for operation in operations:
            operation.ready = self.ready
            self._of[operation] = ended

    def listen(self, operations: Sequence[Operation]) -> None:
        """Lets operations say that they have ended, whichever call ends them: who waits for them is about to sleep."""
        for operation in operations:
            if operation.ready is None:
                operation.ready = self.ready

    def take(self) -> list[Callable[[], None]]:
        """Returns what is to be called for operations that have ended; without the lock."""
        if not self.ready:
            return []
        ready, self.ready[:] = list(self.ready), []
        return [self._of.pop(operation) for operation in ready if operation in self._of]
