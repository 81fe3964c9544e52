"""What one rank of a gang has of the tables of a run, and how long it serves."""

import contextlib
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, final

from braidax.comm import Communicator
from braidax.cores import usable_cores
from braidax.errors import ArgumentError, WaitTimeout
from braidax.parallel.served.meetings.meeting import Meeting
from braidax.parallel.served.wire import Message, packed, unpacked

from .server import TableServer

_LOOK_SECONDS = 0.5  # how long nobody asks before it is looked who is lost


@final
class Holder:
    """What one rank of a gang has: the part of each table that is its own, and copies of the parts before it.

    Copies are told of each update as the part itself is, so that either is as good as the other.

    **Arguments:** `rank`: of this. `num_workers`: who train. `ask`: asks another server. `threads`: as of `Shard`.
    """

    def __init__(
        self, rank: int, num_workers: int, ask: Callable[[int, Any], Any], threads: Executor | None = None
    ) -> None:
        self._rank, self._num_workers, self._ask, self._threads = rank, num_workers, ask, threads
        self._parts: dict[int, TableServer] = {}
        self._lock = threading.RLock()  # requests come on one thread, and losses on another

    def handle(self, rank: int, value: Any) -> Any:
        """Answers a request for a part. **Raises:** as `TableServer.handle`."""
        message = unpacked(value)
        with self._lock:
            if message.kind == "make":
                self._begin(message.fields)
            if message.kind == "leave":
                self._lose(rank)
                return packed("left")
            part = message.fields.get("part")
            if message.kind == "fill" and part in self._parts:
                return self._fill(self._parts[part], message.fields)
            if part not in self._parts:
                raise ArgumentError(f"server {self._rank} was asked for part {part}, expected one of {[*self._parts]}")
            return self._parts[part].answer(rank, message)

    def _begin(self, fields: Mapping[str, Any]) -> None:
        """Makes room for a part of `parts`."""
        part, parts = int(fields["part"]), int(fields["parts"])
        if 0 <= part < parts:
            if part in self._parts:
                self._parts[part].close()
            self._parts[part] = TableServer(part, parts, self._num_workers, self._threads)

    def _fill(self, part: TableServer, fields: Mapping[str, Any]) -> Any:
        """Copies a part from another server, its `source`, on which nothing changes meanwhile."""
        source = int(fields["source"])

        def ask(kind: str, more: Mapping[str, Any]) -> Message:
            told = {"run": fields["run"], "part": fields["part"], **more}
            return unpacked(self._ask(source, packed(kind, told)))

        part.fill(ask)
        return packed("filled")

    def lose(self, rank: int) -> None:
        """Goes on without one who trained, as `TableServer.lose` says. **Arguments:** `rank`: in the world."""
        with self._lock:
            self._lose(rank)

    def close(self) -> None:
        """Lets go of all tables."""
        with self._lock:
            for part in self._parts.values():
                part.close()

    def _lose(self, rank: int) -> None:
        for part in self._parts.values():
            part.lose(rank)


def serve(comm: Communicator, meeting: Meeting) -> None:
    """Serves tables as one rank of a gang. **Arguments:** `comm`: of the gang. `meeting`: as of `serve_as`."""
    serve_as(comm.rank, meeting)


def serve_as(rank: int, meeting: Meeting) -> None:
    """Serves tables until those who ask are gone.

    **Arguments:** `rank`: which of the servers this is. `meeting`: where servers and those who ask meet.
    """
    num_servers, num_workers, lost = meeting.num_servers, meeting.num_workers, set[int]()
    world = meeting.join(rank)
    with world, ThreadPoolExecutor(usable_cores(), "braidax-rows") as threads:
        holder = Holder(rank, num_workers, world.ask, threads)
        if num_workers > 1:
            world.split(0)
        with contextlib.closing(holder), world.serve(holder.handle) as serving:
            for other in range(num_servers):  # servers are not waited for, though one may ask to fill its part
                if other != rank:
                    world.end_asking(other)
            while True:
                try:
                    serving.wait(_LOOK_SECONDS)
                except WaitTimeout:  # who is lost is not waited for by others
                    for one in sorted(world.lost - lost):
                        lost.add(one)
                        if one >= num_servers:
                            holder.lose(one)
                else:
                    return
