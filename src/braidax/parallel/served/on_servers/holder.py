"""What one rank of a gang has of the tables of a run, and how long it serves."""

import contextlib
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, final

from braidax.comm import Communicator
from braidax.errors import ArgumentError
from braidax.parallel.served.wire import Message, packed, unpacked

from .moving import Moving, checked_having
from .server import TableServer

_NUM_MOVING = 4  # parts that are filled at a time
_NO_ROWS = 1 << 62  # a part of so many, which no table has a row for


def _done() -> "Future[Any]":
    future: Future[Any] = Future()
    future.set_result(None)
    return future


@final
class Holder:
    """What one rank of a gang has: the part of each table that is its own, and copies of the parts before it.

    Copies are told of each update as the part itself is, so that either is as good as the other. Parts that are to take
    the place of these are *coming*: they are made and filled while these are there still, and `commit` puts them in
    place, or `drop` lets go of them.

    **Arguments:** `rank`: of this. `num_workers`: who train. `world`: in which other servers are asked; it may be set.
    `threads`: as of `Shard`. `meet`: begins to join another world, of a generation.
    """

    def __init__(
        self,
        rank: int,
        num_workers: int,
        world: Communicator,
        threads: Executor | None = None,
        meet: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._rank, self._num_workers, self.world, self._threads = rank, num_workers, world, threads
        self._meet = meet
        self._parts: dict[int, TableServer] = {}
        self._coming: dict[int, _Coming] = {}
        self._gone: set[int] = set()  # who trained
        self._is_closed = False
        self._moving = ThreadPoolExecutor(_NUM_MOVING, thread_name_prefix="braidax-filling")
        self._lock = threading.RLock()  # requests come on one thread, and losses on another

    def handle(self, rank: int, value: Any) -> Any:
        """Answers a request for a part, maybe later. **Raises:** as `TableServer.handle`."""
        message = unpacked(value)
        with self._lock:
            match message.kind:
                case "make":
                    self._begin(message.fields)
                case "leave":
                    self._lose(rank)
                    return packed("left")
                case "make coming":
                    return self._make_coming(rank, message)
                case "prepare":
                    self._moving.submit(self._prepare, rank, message)
                    return packed("preparing")
                case "meet":
                    self._meet(int(message.fields["generation"]))
                    return packed("meeting")
                case "fill":
                    return self._fill(message.fields)
                case "commit":
                    return self._commit(message.fields)
                case "drop":
                    self._drop()
                    return packed("dropped")
                case _:
                    pass
            return self._part(message.fields).answer(rank, message)

    def _begin(self, fields: Mapping[str, Any]) -> None:
        """Makes room for a part of `parts`."""
        part, parts = int(fields["part"]), int(fields["parts"])
        if 0 <= part < parts:
            if part in self._parts:
                self._parts[part].close()
            self._parts[part] = TableServer(part, parts, self._num_workers, self._threads)

    def _part(self, fields: Mapping[str, Any]) -> TableServer:
        """Returns the part that a request is about."""
        part, parts = fields.get("part"), fields.get("parts")
        found = self._parts.get(part) if isinstance(part, int) else None
        if found is None or found.size != parts:
            have = [f"{one.number} of {one.size}" for one in self._parts.values()]
            raise ArgumentError(
                f"server {self._rank} was asked for part {part} of {parts}, expected one of those that it has: {have}"
            )
        return found

    # Parts that are coming

    def _make_coming(self, rank: int, message: Message) -> Any:
        """Makes room for a part that is to take the place of others."""
        part, parts = int(message.fields["part"]), int(message.fields["parts"])
        if not 0 <= part < parts:
            raise ArgumentError(f"part={part}, parts={parts}: expected 0 <= part < parts")
        if part in self._coming:
            self._coming.pop(part).close()
        coming = _Coming(TableServer(part, parts, self._num_workers, self._threads))
        try:
            coming.part.answer(rank, message._replace(kind="make"))
        except BaseException:
            coming.close()
            raise
        self._coming[part] = coming
        return packed("made")

    def _prepare(self, rank: int, message: Message) -> None:
        """Compiles what moves rows, beside other requests. What fails here fails when there are to be rows, which is
        told of then."""
        fields = {**message.fields, "disk": None}
        none = TableServer(_NO_ROWS, _NO_ROWS + 1, self._num_workers, self._threads)
        with contextlib.closing(none):
            none.answer(rank, message._replace(kind="make", fields=fields))
            for shard in none.shards.values():
                for _ in shard.compile():
                    if self._is_closed:
                        return

    def _fill(self, fields: Mapping[str, Any]) -> "Future[Any]":
        """Copies some of the rows of a part that is coming, beside other requests, and tells whether it has all; those
        that others train meanwhile are copied `ahead`."""
        coming = self._coming.get(int(fields["part"]))
        if coming is None or not coming.filling.done():
            state = "is not coming" if coming is None else "is being filled"
            raise ArgumentError(
                f"part {fields['part']} of server {self._rank} {state}: expected it to be made, and filled by one"
            )
        if coming.moving is None:
            having = checked_having(fields["having"], self.world.size)
            coming.moving = Moving(coming.part, having, self._parts, self._lock, self.world.ask)
        coming.filling = self._moving.submit(_copied_ahead if fields["ahead"] else _filled_on, coming.moving)
        return coming.filling

    def _commit(self, fields: Mapping[str, Any]) -> Any:
        """Puts the parts that are coming in place of those that were here."""
        ready = sorted(part for part, one in self._coming.items() if one.is_full and one.part.run == fields["run"])
        if ready != sorted(fields["own"]) or len(ready) != len(self._coming):
            raise ArgumentError(
                f"server {self._rank} was told to go on with the parts {fields['own']}, and has all rows of {ready}: "
                f"expected these to be made and filled first"
            )
        former, self._parts = self._parts, {part: one.part for part, one in self._coming.items()}
        self._coming = {}
        for part in former.values():
            part.close()
        for gone in self._gone:
            for part in self._parts.values():
                part.lose(gone)
        return packed("committed")

    def _drop(self) -> None:
        for one in self._coming.values():
            one.close()
        self._coming = {}

    def lose(self, rank: int) -> None:
        """Goes on without one who trained, as `TableServer.lose` says. **Arguments:** `rank`: in the world."""
        with self._lock:
            self._lose(rank)

    def close(self) -> None:
        """Lets go of all tables."""
        self._is_closed = True
        self._moving.shutdown(cancel_futures=True)
        with self._lock:
            self._drop()
            for part in self._parts.values():
                part.close()

    def _lose(self, rank: int) -> None:
        self._gone.add(rank)
        for part in self._parts.values():
            part.lose(rank)


@dataclass
class _Coming:
    """A part that is to take the place of others. **Fields:** `moving`: what fills it. `filling`: the last answer."""

    part: TableServer
    moving: Moving | None = None
    filling: "Future[Any]" = field(default_factory=_done)

    @property
    def is_full(self) -> bool:
        """Whether it has all rows."""
        return self.moving is not None and self.moving.is_full and self.filling.done()

    def close(self) -> None:
        """Lets go of it, once nobody fills it any more."""
        self.filling.add_done_callback(lambda _: self.part.close())


def _filled_on(moving: Moving) -> Any:
    moving.advance()
    return packed("filled", {"is_full": moving.is_full, "num_bytes": moving.num_bytes})


def _copied_ahead(moving: Moving) -> Any:
    moving.copy_ahead()
    return packed("copied", {"is_copied": moving.is_copied, "num_bytes": moving.num_bytes})
