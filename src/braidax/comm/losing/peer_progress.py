"""What ends with a rank that is lost alone, and how those who wait for it hear of that.

What a wait leaves under way there, by its limit or because a collective failed, goes on in the transport, since living
ranks are at its other end. So what is moved there is no memory of the caller's, but a copy.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, final

from braidax.comm.progress import VERDICT_SECONDS, Progress
from braidax.comm.transports.transport import Buffer, Operation, Transport
from braidax.comm.waiting import again, all_done
from braidax.comm.watch import SECOND_WORD_SECONDS, Notice, OnLoss, Watch
from braidax.connections.world import World
from braidax.errors import Aborted, CommError, PeerLost


@final
class PeerProgress(Progress):
    """Moves the messages of one rank: what happens to another one ends what the two have to do with each other.

    **Arguments:** as of `Progress`.

    **Fields:** besides those of `Progress`, `domains`: of the groups of this rank.
    """

    on_loss: OnLoss = "peer"

    def __init__(self, transport: Transport, watch: Watch, world: World, *, spin_seconds: float) -> None:
        super().__init__(transport, watch, world, spin_seconds=spin_seconds)
        self.domains: list[Domain] = []

    def _fail(self, notice: Notice) -> CommError:
        if notice.kind == "failed":
            return self._end_group(notice)
        if notice.rank == self.world.rank:
            return super()._fail(notice)
        return self._lose(notice)

    def _lose(self, notice: Notice) -> CommError:
        rank = notice.rank
        if rank not in self.lost:
            error = self.lost[rank] = _error_of(notice, self.world)
            try:
                self._transport.lose(rank, error)
                for domain in self.domains:
                    if rank in domain.ranks:
                        domain.end_all(error)
            except BaseException as interrupt:
                self._break(interrupt)
                raise
            self._rouse()
        return self.lost[rank]

    def _end_group(self, notice: Notice) -> CommError:
        error = _error_of(notice, self.world)
        for domain in self.domains:
            if domain.group == notice.group and notice.rank in domain.ranks:
                domain.end_all(error)
        self._rouse()
        return error

    def _rouse(self) -> None:
        """Wakes all that may wait for what has ended."""
        self._notify_all()
        self._nap.ring()
        self._wake_thread.ring()

    def _judge(self, error: CommError) -> CommError:
        """Returns what to raise for an operation that failed; the watch is given time to say why."""
        if not isinstance(error, PeerLost) or error.rank in self._watch.left:
            return again(error)
        rank = error.rank
        seconds = VERDICT_SECONDS if self.world.rank < rank else SECOND_WORD_SECONDS

        def is_known() -> bool:
            return self.failure is not None or rank in self.lost or rank in self._watch.left

        self._listeners.wait_for(is_known, seconds)
        if self.failure is not None or rank in self.lost:
            return again(self.failure or self.lost[rank])
        if rank in self._watch.left:
            return again(error)
        return again(self.fail(Notice("lost", rank, "its connection ended")))


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

    def __init__(self, progress: PeerProgress, group: int, ranks: Sequence[int]) -> None:
        self.group = group
        self.ranks = frozenset(ranks)
        self.error: CommError | None = None
        self.world = progress.world
        self.schedules = progress.schedules
        self.number = progress.number
        self._progress = progress
        self._waited: dict[int, Sequence[Operation]] = {}  # by thread
        self._pending: set[Operation] = set()  # that requests wait for
        progress.domains.append(self)
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
    return Domain(progress, group, ranks) if isinstance(progress, PeerProgress) else progress


def _error_of(notice: Notice, world: World) -> CommError:
    """Returns what the operations that end with a rank, or with its collective, fail with."""
    name = world.describe(notice.rank)
    if notice.kind == "failed":
        return Aborted(
            f"{name} ended the collectives of a group: {notice.reason}; they cannot go on, all else can: split the "
            "group beforehand where other collectives are to go on without it"
        )
    if notice.kind == "aborted":
        return Aborted(f"{name} ended its part: {notice.reason}; what others do without it goes on")
    return PeerLost(
        f"{name} is lost: {notice.reason}; what others do without it goes on", notice.rank, world.hosts[notice.rank]
    )
