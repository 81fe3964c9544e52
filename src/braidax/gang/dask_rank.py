"""A rank on Dask: an actor on a worker, with a thread of its own."""

import asyncio
import functools
import os
import queue
import socket
import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, final

from braidax.gang.dask_store import DaskStore, import_distributed
from braidax.gang.member import Member

_LOOK_SECONDS = 0.5  # between looks whether Dask has dropped the actor


@final
class DaskRank:
    """An actor that is a rank. Its methods run in the worker's event loop, and what it is asked for in its thread.

    It ends when it is told to leave, and when Dask drops the actor, as it does where client or gang are gone.

    **Arguments:** `address`: of the store. `key`: of this actor. `rank`: its number. `member`: the other arguments of
    its `Member`.
    """

    def __init__(self, address: str, key: str, rank: int, member: Mapping[str, Any]) -> None:
        store = DaskStore(address)  # only in this thread does Dask know which worker this is
        self._actors: Mapping[str, Any] = import_distributed().get_worker().state.actors
        self._key = key
        self._owner: asyncio.Task[None] | None = None
        self._member = Member(store, rank=rank, **member)
        self._answer: Future[bytes] | None = None
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_serve, args=(self._member, self._tasks), name=f"braidax-rank-{rank}", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, self._tasks.put, None)  # before it has joined

    async def where(self) -> tuple[str, int]:
        """Returns the names of the host and of the process."""
        return socket.gethostname(), os.getpid()

    async def join(self, timeout_seconds: float) -> bytes:
        """Answers what `Member.join` does."""
        self._owner = asyncio.create_task(self._end_with_actor())
        return await self._done(functools.partial(self._member.join, timeout_seconds=timeout_seconds))

    async def call(self, call: bytes) -> bytes:
        """Answers what `Member.call` does."""
        return await self._done(functools.partial(self._member.call, call))

    async def leave(self, timeout_seconds: float) -> None:
        """Lets the rank leave; if it is busy, its next message raises. Waits until it has left, up to a limit."""
        if self._owner is not None:
            self._owner.cancel()
        await self._dismiss("the gang has ended its ranks")
        await asyncio.to_thread(self._thread.join, timeout_seconds)

    async def _end_with_actor(self) -> None:
        while self._actors.get(self._key) is self:
            await asyncio.sleep(_LOOK_SECONDS)
        await self._dismiss("the gang is gone")

    async def _dismiss(self, reason: str) -> None:
        """Lets the rank leave when it has done what it does now, which ends at its next message."""
        is_busy = self._answer is not None and not self._answer.done()
        self._tasks.put(None)
        if is_busy:
            await asyncio.to_thread(self._member.abort, reason)

    async def _done(self, fn: Callable[[], bytes]) -> bytes:
        answer: Future[bytes] = Future()
        self._answer = answer
        self._tasks.put((fn, answer))
        return await asyncio.wrap_future(answer)


_Task = tuple[Callable[[], bytes], Future[bytes]]


def _serve(member: Member, tasks: "queue.SimpleQueue[_Task | None]") -> None:
    """Does what a rank is asked for, and leaves when nothing more will come."""
    try:
        while (task := tasks.get()) is not None:
            fn, answer = task
            if answer.set_running_or_notify_cancel():
                answer.set_result(fn())
    finally:
        member.leave()
