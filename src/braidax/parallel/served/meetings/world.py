"""The world of servers and those who train, which all may leave for another one with others in place of lost ones."""

import contextlib
import threading
from collections.abc import Generator
from typing import Any, final

import numpy as np

from braidax.comm import Communicator
from braidax.connections.hosts import host_id
from braidax.errors import BraidaxError, CommError, PeerLost
from braidax.parallel.served.meetings.meeting import Meeting

MOVE_SECONDS = 30.0
"""That all may take to meet once more. They go on where they are when one does not come."""

_LOOK_SECONDS = 0.2


@final
class World:
    """The world of a run as one who trains sees it. It waits for all others.

    **Arguments:** `meeting`: where all meet. `worker`: which of those who train this is.

    **Fields:** `comm`: of all, servers first. `workers`: of those who train; None where that is one, or before
    `divide`. `host`: of those of them that are on this host; None where that is one.
    """

    def __init__(self, meeting: Meeting, worker: int) -> None:
        self._meeting, self._rank = meeting, meeting.num_servers + worker
        self.comm = meeting.join(self._rank)
        self.workers: Communicator | None = None
        self.host: Communicator | None = None

    @property
    def failure(self) -> CommError | None:
        """What has ended it, or that it was closed; None while it goes on."""
        return self.comm.failure

    def divide(self) -> None:
        """Makes the groups of those who train; all of them call it, and servers make theirs."""
        self.workers, self.host = self._divided(self.comm)

    def _divided(self, comm: Communicator) -> tuple[Communicator | None, Communicator | None]:
        """Returns `workers` and `host`."""
        if self._meeting.num_workers == 1:
            return None, None
        workers, own = comm.split(1), host_id().encode()
        hosts = [bytes(one) for one in workers.all_gather(own)]
        host = workers.split(hosts.index(own))
        return workers, host if host.size > 1 else None

    def ask(self, server: int, question: Any) -> Any:
        """Returns what a server answers. **Raises:** as `Communicator.ask`."""
        return self.comm.ask(server, question)

    @property
    def lost(self) -> frozenset[int]:
        """The ranks that are known to be lost."""
        return self.comm.lost

    def move(self, generation: int) -> str:
        """Goes on in another world, where all servers come; all who train call it, while nobody asks anything.

        **Arguments:** `generation`: how often all were to meet before.

        **Returns:** why all stay where they are; empty when they have moved. **Raises:** `PeerLost` when one who trains
        is gone.
        """
        came, workers, host, why = None, None, None, ""
        try:
            with self._giving_up(generation):
                came = self._meeting.join(self._rank, generation=generation, timeout_seconds=MOVE_SECONDS)
            workers, host = self._divided(came)
        except (BraidaxError, OSError) as error:
            why = f"{type(error).__name__}: {error}"
            self._meeting.give_up(why, generation=generation)
        try:
            found = [why]
            if self.workers is not None:
                told = self.workers.all_gather(np.frombuffer(why.encode(), np.uint8))
                found = [bytes(np.asarray(one)).decode() for one in told]
        except BaseException:
            if came is not None:
                came.close()
            raise
        why = next(filter(None, found), "")
        if came is None or why:
            if came is not None:
                came.close()
            return why
        former, self.comm, self.workers, self.host = self.comm, came, workers, host
        if workers is not None:
            workers.barrier()
        former.close()
        return ""

    @contextlib.contextmanager
    def _giving_up(self, generation: int) -> Generator[None]:
        """Lets nobody wait in a meeting for a server that is lost meanwhile."""
        done, before = threading.Event(), self.comm.lost

        def watch() -> None:
            while not done.wait(_LOOK_SECONDS):
                if self.comm.lost - before:
                    self._meeting.give_up("another server was lost meanwhile", generation=generation)
                    return

        watching = threading.Thread(target=watch, name="braidax-moving-world")
        watching.start()
        try:
            yield
        finally:
            done.set()
            watching.join()

    def close(self) -> None:
        """Leaves it. A second call does nothing."""
        self.comm.close()


def trainer_lost(told: str, rank: int, host: str = "") -> PeerLost:
    """Returns that one who trains is gone, where an update takes all. **Arguments:** `told`: how that was seen. Others:
    as of `PeerLost`."""
    return PeerLost(
        f"a process that trains, too, is lost, and an update takes all: {told}; start all of them again, and they go "
        f"on from the last checkpoint",
        rank,
        host,
    )
