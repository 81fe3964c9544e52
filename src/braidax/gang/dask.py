"""Gangs on Dask: in each of a cluster's workers one actor that is a rank, with a thread of its own."""

import asyncio
import contextlib
import functools
import math
import queue
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, final

from braidax.comm.stores.store import backoff
from braidax.errors import ArgumentError, GangError
from braidax.gang.actor_store import ActorStore
from braidax.gang.calling.parcels import Parcel, own, shown_to_pickle
from braidax.gang.calling.ranks import Ended, Message, Ranks
from braidax.gang.cluster import ClusterGang
from braidax.gang.dask_handing import Places, hand, results, take_back
from braidax.gang.dask_rank import DaskRank
from braidax.gang.dask_store import ALIVE, ANSWER_SECONDS, SCHEME, import_distributed
from braidax.gang.dask_store import DaskStore as DaskStore

_LEAVE_SECONDS = 2.0  # that ranks may take to leave
_LOOK_SECONDS = 0.5  # between looks at whether the scheduler still knows the workers
_PAUSE_SECONDS = 0.1  # between looks for workers that are on their way


@final
class DaskGang(ClusterGang):
    """A gang whose ranks are actors on the workers of a Dask cluster, one a worker, in the order of their addresses.

    A rank runs in a thread of its own in the worker's process, so tasks of Dask go on beside it, and so do ranks of
    other gangs. What it prints goes where its worker's output goes. At a replacement or restart ranks whose worker is
    alive stay where they are, and the others go to workers that are free. No thread can be ended by force: a function
    whose rank was given up, after a `WaitTimeout` say, goes on until it comes to its next message or returns;
    `client.restart_workers` ends it at once, with all that the worker holds.

    **Arguments:** `client`: a `distributed.Client` that is not asynchronous; the gang does not close it. `size`: the
    number of ranks, None for as many as there are workers. `workers`: the addresses of those that may be used, None for
    all. `transport`: what carries the ranks' messages. `timeout_seconds`: how long workers may take to be there and
    to start the ranks, and they to meet; it is also the communicator's limit.

    **Raises:** `ArgumentError` for values that cannot work, `GangError` for `size=None` when there are no workers;
    `MissingExtra` without Dask. `start` raises `GangError` when there are too few workers.
    """

    def __init__(
        self,
        client: Any,
        size: int | None = None,
        *,
        workers: Sequence[str] | None = None,
        transport: str = "tcp",
        timeout_seconds: float = 60.0,
    ) -> None:
        distributed = import_distributed()
        if not isinstance(client, distributed.Client) or client.asynchronous:
            raise ArgumentError(f"{client=}: expected a distributed.Client that is not asynchronous")
        self.client = client
        self._allowed = None if workers is None else frozenset(workers)
        self._timeout_seconds = timeout_seconds
        self._workers: list[str] = []
        there = len(self._there())
        if size is None and not there:
            raise GangError(f"size=None takes all workers, and there are none: {self._cluster()}; add workers")
        super().__init__(
            there if size is None else size,
            job=f"dask-{secrets.token_hex(8)}",
            timeout_seconds=timeout_seconds,
            transport=transport,
        )

    @property
    def workers(self) -> tuple[str, ...]:
        """The address of each rank's worker, by rank, as of the last start."""
        return tuple(self._workers)

    def _hand(self, token: str, references: Sequence[Sequence[Any]]) -> None:
        hand(self._places, token, references)

    def _take_back(self, token: str) -> None:
        take_back(self._places, token)

    def _results(self, fn: Callable[[Any], Any], name: str) -> list[Any]:
        return results(self._places, fn, name)

    @property
    def _places(self) -> Places:
        keys = self._ranks.keys if isinstance(self._ranks, _DaskRanks) else ()
        return Places(self.client, tuple(zip(self._workers, keys, strict=False)))

    def _begin(self, deadline: float) -> Ranks:
        self._workers = self._chosen(deadline, self._all)
        member = {"transport": self.transport, "timeout_seconds": self._timeout_seconds}
        return _DaskRanks(self.client, self._workers, self._chosen, self._job, member, deadline)

    def _close(self) -> None:
        pass  # the client is not ours

    def _there(self) -> list[str]:
        """Returns the addresses of the workers that may be used, sorted."""
        return sorted(worker for worker in self.client.nthreads() if self._allowed is None or worker in self._allowed)

    def _chosen(self, deadline: float, ranks: Collection[int], lost: Collection[str] = ()) -> list[str]:
        """Waits for enough workers, and returns one a rank. A rank that had one keeps it, if that is still there.

        **Arguments:** `ranks`: to be started; all others stay where they are, which the scheduler need not know any
        more. `lost`: workers that are gone, whatever the scheduler says.
        """
        workers = list(self._workers) or [""] * self._size
        taken = {worker for rank, worker in enumerate(workers) if rank not in ranks}
        while True:
            there = [worker for worker in self._there() if worker not in lost]
            free = [worker for worker in there if worker not in taken]
            if len(free) >= len(ranks):
                break
            pause = backoff(deadline, _PAUSE_SECONDS)
            if pause is None:
                raise GangError(
                    f"size={self._size} ranks need a worker each, and there are {len(there)} after "
                    f"timeout_seconds={self._timeout_seconds:g}: {self._cluster()}; add workers, or take fewer ranks"
                )
            time.sleep(pause)
        others = iter([worker for worker in free if worker not in workers])
        for rank in ranks:
            if workers[rank] not in free:
                workers[rank] = next(others)
        self._workers = workers
        return workers

    def _cluster(self) -> str:
        among = "" if self._allowed is None else f", of which workers= allows {len(self._allowed)}"
        return f"the Dask cluster at {self.client.scheduler.address} has {len(self.client.nthreads())} workers{among}"


class _DaskRanks(Ranks):
    """The actors of a gang, and that of their store, which lies on the worker of one of them.

    **Arguments:** `workers`: of each rank. `choose`: returns them anew, by a deadline, for ranks to be started, without
    workers that are gone. `job`: the gang's name. `member`: how a rank makes its `Member`. `deadline`: by
    `time.monotonic`.
    """

    def __init__(
        self,
        client: Any,
        workers: Sequence[str],
        choose: Callable[[float, Collection[int], Collection[str]], Sequence[str]],
        job: str,
        member: Mapping[str, Any],
        deadline: float,
    ) -> None:
        self._client = client
        self._workers = list(workers)
        self._choose = choose
        self._job = job
        self._member = member
        self._store: Any = None
        self._store_worker = ""
        self._store_address = ""
        self._made: dict[int, Any] = {}  # what stands for the actors of ranks that are there
        self._actors: dict[int, Any] = {}
        self._places: dict[int, tuple[str, int]] = {}
        self._tasks: dict[int, asyncio.Task[Any]] = {}  # of ranks that owe an answer; the client's loop has them
        self._aborting: set[asyncio.Task[Any]] = set()
        self._gone: set[str] = set()  # workers
        self._news: queue.SimpleQueue[tuple[int, asyncio.Task[Any]] | None] = queue.SimpleQueue()
        try:
            self._start_store(workers[0])
            self._start(range(len(workers)), deadline)
        except BaseException:
            self.end("stop")
            raise

    @property
    def keys(self) -> Sequence[str]:
        """The key of each rank's actor, as far as it is there."""
        return [self._made[rank].key for rank in sorted(self._made)]

    def ask(self, messages: Mapping[int, Message]) -> None:
        bodies = {id(message.body): shown_to_pickle(message.body) for message in messages.values()}
        arguments = {
            rank: (shown_to_pickle(message.head), bodies[id(message.body)]) for rank, message in messages.items()
        }
        self._ask(arguments)

    def answers(self, *, timeout_seconds: float | None) -> Mapping[int, Parcel | Ended]:
        deadline = math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds
        while True:
            left = max(0.0, deadline - time.monotonic())
            told = self._told(min(left, _LOOK_SECONDS))
            if told is None:
                return {}
            new = {rank: self._read(rank, task) for rank, task in told.items()}
            # A worker whose host went down closes nothing: its scheduler says at some time that it is gone.
            for rank, made in list(self._made.items()):
                if rank not in new and made.status not in ALIVE:
                    new[rank] = self._ended(rank, f"the scheduler says that it is {made.status}")
            if new or left <= 0:
                return new

    def wake(self) -> None:
        self._news.put(None)

    def abort(self, ranks: Collection[int], call: int, reason: str) -> None:
        actors = [self._actors[rank] for rank in ranks if rank in self._actors]

        async def begin() -> None:
            for actor in actors:
                task = asyncio.create_task(_asked(actor, "abort", call, reason))
                self._aborting.add(task)  # the loop itself holds no task
                task.add_done_callback(self._note_aborted)

        self._client.sync(begin)

    def _note_aborted(self, task: "asyncio.Task[Any]") -> None:
        self._aborting.discard(task)
        _note_end(task)

    def kill(self, ranks: Collection[int]) -> None:
        made = [self._made.pop(rank) for rank in ranks if rank in self._made]
        tasks = [self._tasks.pop(rank) for rank in ranks if rank in self._tasks]
        for rank in ranks:
            self._actors.pop(rank, None)

        async def cancel() -> None:
            for task in tasks:
                task.cancel()

        with contextlib.suppress(OSError, RuntimeError):  # the client is closed, or the cluster is gone
            self._client.sync(cancel)
            self._client.cancel(made, force=True)  # as in `end`; the actor lets its rank leave when it is dropped

    def replace(self, ranks: Collection[int], deadline: float) -> None:
        self.kill(ranks)
        self._workers = list(self._choose(deadline, ranks, self._gone))
        try:
            if self._store_worker in self._gone or self._store.status not in ALIVE:
                self._client.cancel([self._store], force=True)
                self._start_store(self._workers[min(ranks)])  # of whom the scheduler has just said that it is there
                self._move(self._store_address, deadline)
            self._start(ranks, deadline)
        except BaseException:
            self.kill(ranks)
            raise

    def end(self, reason: Literal["stop", "interrupt"]) -> None:
        actors, self._actors = list(self._actors.values()), {}
        made, self._made = list(self._made.values()), {}
        store, self._store = self._store, None
        with contextlib.suppress(OSError, RuntimeError):  # the client is closed, or the cluster is gone
            if actors:
                self._client.sync(self._leave, actors)
            if store is not None:
                # By force: what stands for an actor counts as somebody who needs it, and lies in reference cycles.
                self._client.cancel([*made, store], force=True)

    def _start_store(self, worker: str) -> None:
        key = f"braidax-{self._job}-store-{secrets.token_hex(8)}"
        self._store_address = f"{SCHEME}{worker}#{key}"
        self._store_worker = worker
        self._store = self._make(ActorStore, worker, key)

    def _start(self, ranks: Collection[int], deadline: float) -> None:
        """Makes the actors of ranks, and waits until they are there."""
        for rank in ranks:
            key = f"braidax-{self._job}-{rank}-{secrets.token_hex(8)}"
            worker = self._workers[rank]
            self._made[rank] = self._make(DaskRank, worker, key, self._store_address, key, rank, self._member)
        self._wait_until_made(ranks, deadline)
        with self._client.as_current():  # it need not be the default one
            actor = import_distributed().Actor
            for rank in ranks:
                self._actors[rank] = actor(DaskRank, self._workers[rank], self._made[rank].key)
        self._find(ranks, deadline)

    def _make(self, kind: type, worker: str, key: str, *args: Any) -> Any:
        options = {"workers": [worker], "allow_other_workers": False, "actor": True, "pure": False, "key": key}
        return self._client.submit(kind, *args, **options)

    def _wait_until_made(self, ranks: Collection[int], deadline: float) -> None:
        made = {"the store": self._store, **{f"rank {rank}": self._made[rank] for rank in ranks}}
        places = {"the store": self._store_worker, **{f"rank {rank}": self._workers[rank] for rank in ranks}}
        late = list(made)
        while late and (left := max(0.0, deadline - time.monotonic())):
            with contextlib.suppress(TimeoutError), self._client.as_current():
                import_distributed().wait(list(made.values()), timeout=min(left, _LOOK_SECONDS))
            late = [who for who, future in made.items() if future.status == "pending"]
            for who in late:  # a worker that is gone starts nothing, and Dask waits for it to come back
                if places[who] not in self._client.nthreads():
                    raise GangError(f"{who} cannot be started: its Dask worker {places[who]} has ended meanwhile")
        for who, future in made.items():
            if future.status == "pending":
                raise GangError(
                    f"{who} was not started by its Dask worker in time (size={len(self._workers)}, workers "
                    f"{', '.join(self._workers)}): is the worker alive, and has it a thread that is free?"
                )
            if future.status != "finished":
                error = future.exception(timeout=ANSWER_SECONDS) if future.status == "error" else None
                why = future.status if error is None else f"{type(error).__name__}: {error}"
                raise GangError(f"{who} cannot be started on its Dask worker: {why}") from error

    def _find(self, ranks: Collection[int], deadline: float) -> None:
        """Asks ranks for the names of their hosts and processes."""
        found: dict[int, Any] = {}

        async def ask() -> None:
            asked = {rank: asyncio.create_task(_asked(self._actors[rank], "where")) for rank in ranks}
            await self._settled(asked, deadline)
            for rank, task in asked.items():
                if task.done():
                    found[rank] = task.exception() or task.result()
                task.cancel()

        self._client.sync(ask)
        for rank in ranks:
            if not isinstance(found.get(rank), tuple):
                why = found.get(rank, "it did not answer in time")
                raise GangError(f"rank {rank} cannot be started on the Dask worker {self._workers[rank]}: {why}")
            self._places[rank] = found[rank]

    def _ask(self, arguments: Mapping[int, tuple[Any, ...]]) -> None:
        """Asks ranks for their answers."""

        async def begin() -> None:
            for rank, each in arguments.items():
                task = asyncio.create_task(_asked(self._actors[rank], "answer", *each))
                task.add_done_callback(functools.partial(self._note, rank))
                self._tasks[rank] = task

        self._client.sync(begin)

    def _move(self, address: str, deadline: float) -> None:
        """Lets all ranks that are there meet at another store."""

        async def move() -> None:
            moving = {rank: asyncio.create_task(_asked(actor, "move", address)) for rank, actor in self._actors.items()}
            await self._settled(moving, deadline)
            for task in moving.values():
                task.add_done_callback(_note_end)  # of a rank that is lost meanwhile its answer tells

        self._client.sync(move)

    async def _settled(self, asked: "Mapping[int, asyncio.Task[Any]]", deadline: float) -> None:
        """Waits for answers of ranks, but not of those whose worker the scheduler has given up: Dask may never tell."""
        while left := max(0.0, deadline - time.monotonic()):
            late = [task for rank, task in asked.items() if not task.done() and self._made[rank].status in ALIVE]
            if not late:
                return
            await asyncio.wait(late, timeout=min(left, _LOOK_SECONDS))

    def _note(self, rank: int, task: "asyncio.Task[Any]") -> None:
        self._news.put((rank, task))

    def _told(self, seconds: float) -> "dict[int, asyncio.Task[Any]] | None":
        """Waits for answers, and returns what ended; None when it was woken and nothing has ended."""
        told: dict[int, asyncio.Task[Any]] = {}
        is_woken = False
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._news.get(timeout=seconds) if not (told or is_woken) else self._news.get_nowait()
                if item is None:
                    is_woken = True
                elif self._tasks.get(item[0]) is item[1]:  # and not of a rank that was killed
                    del self._tasks[item[0]]
                    told[item[0]] = item[1]
        return told if told or not is_woken else None

    def _read(self, rank: int, task: "asyncio.Task[Any]") -> Parcel | Ended:
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or error is not None:
            return self._ended(rank, str(error or "the client gave it up"))
        return own(task.result())

    def _ended(self, rank: int, why: str) -> Ended:
        host, pid = self._places[rank]
        self._gone.add(self._workers[rank])
        self.kill([rank])
        how = f"ended without an answer, with the Dask worker {self._workers[rank]} ({why}); see that worker's log"
        return Ended(host, pid, how, time.time())

    async def _leave(self, actors: Sequence[Any]) -> None:
        leaving = [asyncio.create_task(_asked(actor, "leave", _LEAVE_SECONDS)) for actor in actors]
        tasks = {*leaving, *self._tasks.values(), *self._aborting}
        self._tasks = {}
        await asyncio.wait(leaving, timeout=2 * _LEAVE_SECONDS)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _note_end(task: "asyncio.Task[Any]") -> None:
    if not task.cancelled():
        task.exception()  # a worker that is gone is told of by its answer


async def _asked(actor: Any, method: str, *args: Any) -> Any:
    return await getattr(actor, method)(*args)
