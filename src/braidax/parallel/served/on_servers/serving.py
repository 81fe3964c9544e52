"""How long one rank of a gang serves tables, and in which worlds."""

import contextlib
import functools
import logging
import threading
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, final

from braidax.comm import Communicator
from braidax.cores import usable_cores
from braidax.errors import BraidaxError, WaitTimeout
from braidax.parallel.served.meetings.meeting import Meeting
from braidax.parallel.served.meetings.replacing import await_others
from braidax.parallel.served.meetings.world import MOVE_SECONDS

from .holder import Holder

_log = logging.getLogger("braidax")
_LOOK_SECONDS = 0.5  # how long nobody asks before it is looked who is lost


def serve(comm: Communicator, meeting: Meeting) -> None:
    """Serves tables as one rank of a gang. **Arguments:** `comm`: of the gang. `meeting`: as of `serve_as`."""
    serve_as(comm.rank, meeting)


def serve_in_place(comm: Communicator, meeting: Meeting, number: int, rank: int) -> None:
    """Serves tables in place of a rank that is lost, once all meet again. **Arguments:** `comm`: of this rank alone.
    `meeting`: where all have met before. `number`: as of `await_others`. `rank`: of the gang."""
    if (generation := await_others(meeting, number, rank)) is not None:
        serve_as(rank, meeting, generation)


def serve_as(rank: int, meeting: Meeting, generation: int = 0) -> None:
    """Serves tables until those who ask are gone.

    **Arguments:** `rank`: which of the servers this is. `meeting`: where servers and those who ask meet. `generation`:
    how often they were to before.
    """
    world = meeting.join(rank, generation=generation, timeout_seconds=MOVE_SECONDS if generation else None)
    with ThreadPoolExecutor(usable_cores(), "braidax-rows") as threads:
        _Serving(rank, meeting, world, threads).run()


@final
class _Serving:
    """Serves what one rank has, in a world and in those that it is called to behind it: who asks leaves one for the
    next, and until then both are served."""

    def __init__(self, rank: int, meeting: Meeting, world: Communicator, threads: Executor) -> None:
        self._rank, self._meeting, self._first = rank, meeting, world
        self._holder = Holder(rank, meeting.num_workers, world, threads, self._meet)
        self._moving: set[int] = set()  # generations of worlds that nobody has asked in so far
        self._others: list[threading.Thread] = []

    def run(self) -> None:
        """Returns when those who ask are gone."""
        with contextlib.closing(self._holder):
            self._serve(self._first)
            for other in self._others:  # of which more may come meanwhile
                other.join()

    def _meet(self, generation: int) -> None:
        """Begins to join another world."""
        self._moving.add(generation)
        joining = threading.Thread(target=self._join, args=(generation,), name="braidax-joining", daemon=True)
        self._others.append(joining)
        joining.start()

    def _join(self, generation: int) -> None:
        try:
            world = self._meeting.join(self._rank, generation=generation, timeout_seconds=MOVE_SECONDS)
            self._serve(world)
        except (BraidaxError, OSError) as error:
            _log.warning("server %d stays where it is: %s", self._rank, error)
        finally:
            self._moving.discard(generation)

    def _serve(self, world: Communicator) -> None:
        """Serves in a world until those who ask have left it."""
        lost = set[int]()
        with world:
            if self._meeting.num_workers > 1:
                world.split(0)
            with world.serve(functools.partial(self._answer, world)) as serving:
                for other in range(self._meeting.num_servers):  # not waited for, though one may ask to fill its part
                    if other != self._rank:
                        world.end_asking(other)
                while True:
                    try:
                        serving.wait(_LOOK_SECONDS)
                    except WaitTimeout:  # who is lost is not waited for by others
                        if world is self._holder.world and not self._moving:  # who moves is not
                            for one in sorted(world.lost - lost):
                                lost.add(one)
                                if one >= self._meeting.num_servers:
                                    self._holder.lose(one)
                    else:
                        return

    def _answer(self, world: Communicator, rank: int, value: Any) -> Any:
        """Answers a request; who asks in a world has left those before."""
        if world is not self._holder.world:
            self._holder.world = world
            self._moving.clear()
        return self._holder.handle(rank, value)
