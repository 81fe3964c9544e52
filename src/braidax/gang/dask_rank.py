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

import numpy as np

from braidax.gang.calling.parcels import Parcel, own, shown_to_pickle
from braidax.gang.dask_store import DaskStore, import_distributed
from braidax.gang.member import Member

Arrays = list[np.ndarray[Any, np.dtype[np.uint8]]]
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
        distributed = import_distributed()
        self._client = distributed.get_client()
        self._actors: Mapping[str, Any] = distributed.get_worker().state.actors
        self._key = key
        self._owner: asyncio.Task[None] | None = None
        self._member = Member(store, rank=rank, **member)
        self._answer: Future[Parcel] | None = None
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_serve, args=(self._member, self._tasks), name=f"braidax-rank-{rank}", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, self._tasks.put, None)  # before its first call

    async def where(self) -> tuple[str, int]:
        """Returns the names of the host and of the process."""
        return socket.gethostname(), os.getpid()

    async def answer(self, head: Arrays, body: Arrays) -> Arrays:
        """Answers what `Member.answer` does. All are parts as arrays, which Dask sends as they are."""
        if self._owner is None:
            self._owner = asyncio.create_task(self._end_with_actor())
        answer: Future[Parcel] = Future()
        self._answer = answer
        self._tasks.put((functools.partial(self._member.answer, own(head), own(body)), answer))
        parcel = await asyncio.wrap_future(answer)
        self._answer = None  # the next call may be long in coming
        return shown_to_pickle(parcel)

    def hand(self, token: str, value: Any) -> None:
        """Does what `Member.hand` does; a task on this worker calls it."""
        self._member.hand(token, value)

    def take_back(self, token: str) -> None:
        """Does what `Member.take_back` does."""
        self._member.take_back(token)

    def kept(self, name: str) -> Any:
        """Does what `Member.kept` does."""
        return self._member.kept(name)

    async def abort(self, call: int, reason: str) -> None:
        """Does what `Member.abort` does."""
        await asyncio.to_thread(self._member.abort, call, reason)

    async def move(self, address: str) -> None:
        """Meets at another store from the next call on."""
        with self._client.as_current():
            store = DaskStore(address)
        self._tasks.put((functools.partial(self._member.move, store), Future()))

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
            await asyncio.to_thread(self._member.dismiss, reason)


_Task = tuple[Callable[[], Any], Future[Any]]


def _serve(member: Member, tasks: "queue.SimpleQueue[_Task | None]") -> None:
    """Does what a rank is asked for, and leaves when nothing more will come."""
    try:
        while (task := tasks.get()) is not None:
            fn, answer = task
            if answer.set_running_or_notify_cancel():
                answer.set_result(fn())
            del task, fn, answer
    finally:
        member.leave()
