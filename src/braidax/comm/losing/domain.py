"""The collectives of a group in a world of `on_loss="peer"`, which end at all its members or at none.

What a wait leaves under way there, by its limit or because a collective failed, goes on in the transport, since living
ranks are at its other end. So what is moved there is no memory of the caller's, but a copy.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, final

from braidax.comm.progress import Progress
from braidax.comm.transports.transport import Buffer, Operation
from braidax.comm.waiting import again, all_done
from braidax.comm.watch import Notice, OnLoss
from braidax.errors import CommError


@final
class Domain:
    """Moves the messages of a group's collectives: the first that fails, at whichever member, ends all of them.

    It stands in the place of a `Progress`, and has those of its methods that collectives use. An operation that is
    waited for is ended here, while the transport may still move what it was to move.

    **Arguments:** `progress`: of this rank. `group`: its number in the world. `ranks`: of the members in the world.

    **Fields:** the latter two. `error`: what ended the group's collectives. `on_loss`, `world`, `schedules`, `number`:
    see `Progress`.
    """

    on_loss: OnLoss = "peer"

    def __init__(self, progress: Progress, group: int, ranks: Sequence[int]) -> None:
        self.group = group
        self.ranks = frozenset(ranks)
        self.error: CommError | None = None
        self.world = progress.world
        self.schedules = progress.schedules
        self.number = progress.number
        self._progress = progress
        self._waited: dict[int, Sequence[Operation]] = {}  # by thread
        self._pending: set[Operation] = set()  # that requests wait for
        if progress.losses is not None:
            progress.losses.domains.append(self)
        for rank in self.ranks & progress.lost.keys():
            self.error = progress.lost[rank]

    @property
    def failure(self) -> CommError | None:
        """What ended this rank's world, or the group's collectives."""
        return self._progress.failure or self.error

    @property
    def hurried(self) -> bool:
        """See `Progress`."""
        return self._progress.hurried

    @hurried.setter
    def hurried(self, hurried: bool) -> None:
        self._progress.hurried = hurried

    def check(self) -> None:
        """Raises the failure, if there is one."""
        if self.failure is not None:
            raise again(self.failure)

    def send(self, peer: int, tag: int, buffers: Sequence[Buffer]) -> Operation:
        """See `Progress.send`."""
        self.check()
        return self._progress.send(peer, tag, buffers)

    def receive(self, peer: int, tag: int, buffer: Buffer) -> Operation:
        """See `Progress.receive`."""
        self.check()
        return self._progress.receive(peer, tag, buffer)

    def run(self, tag: int, compiled: object, head: bytes, own: Any, out: Any) -> Operation | None:
        """See `Progress.run`."""
        self.check()
        return self._progress.run(tag, compiled, head, own, out)

    def wait(self, operations: Sequence[Operation], deadline: float) -> None:
        """See `Progress.wait`."""
        thread = threading.get_ident()
        self._waited[thread] = operations
        try:
            if not all_done(operations):  # what has come before the failure is here
                self.check()
            self._progress.wait(operations, deadline)
        finally:
            self._waited.pop(thread, None)

    def then(self, operations: Sequence[Operation], call: Callable[[], None]) -> None:
        """See `Progress.then`."""
        self._pending.difference_update([operation for operation in list(self._pending) if operation.done])
        self._pending.update(operations)
        self.check()
        self._progress.then(operations, call)

    def end(self, operation: Operation, error: CommError | None = None) -> None:
        """See `Progress.end`."""
        self._progress.end(operation, error)

    def fail(self, notice: Notice) -> CommError:
        """Ends the collectives of the group at all members. **Arguments:** `notice`: which rank ends them, and why."""
        return self._progress.fail(self._of_group(notice))

    def fail_later(self, notice: Notice) -> None:
        """See `Progress.fail_later`."""
        self._progress.fail_later(self._of_group(notice))

    def end_all(self, error: CommError) -> None:
        """Ends what is waited for; called under the lock of the `Progress`."""
        self.error = self.error or error
        waited = [operation for operations in list(self._waited.values()) for operation in operations]
        for operation in [*waited, *list(self._pending)]:
            if not operation.done:
                operation.fail(error)

    def _of_group(self, notice: Notice) -> Notice:
        return Notice("failed", notice.rank, notice.reason, self.group)


def domain_of(progress: Progress, group: int, ranks: Sequence[int]) -> Progress | Domain:
    """Returns what moves the messages of a group's collectives. **Arguments:** as of `Domain`."""
    return progress if progress.losses is None else Domain(progress, group, ranks)
