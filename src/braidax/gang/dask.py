"""Gangs on Dask: in each of a cluster's workers one actor that is a rank, with a thread of its own."""

import asyncio
import contextlib
import math
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, final

from braidax.comm.stores.store import backoff
from braidax.errors import ArgumentError, GangError
from braidax.gang.actor_store import ActorStore
from braidax.gang.dask_rank import DaskRank
from braidax.gang.dask_store import ANSWER_SECONDS, SCHEME, import_distributed
from braidax.gang.dask_store import DaskStore as DaskStore
from braidax.gang.gang import Ended, Gang, Ranks

_LEAVE_SECONDS = 2.0  # that ranks may take to leave
_LOOK_SECONDS = 0.5  # between looks at whether the scheduler still knows the workers
_PAUSE_SECONDS = 0.1  # between looks for workers that are on their way
_ALIVE = ("pending", "finished")  # what Dask says of an actor whose worker is there


@final
class DaskGang(Gang):
    """A gang whose ranks are actors on the workers of a Dask cluster, one a worker, in the order of their addresses.

    A rank runs in a thread of its own in the worker's process, so tasks of Dask go on beside it. What it prints goes
    where its worker's output goes. At a restart ranks whose worker is alive stay where they are, and the others go to
    workers that are free. No thread can be ended by force: a function that goes on when the gang has ended, after a
    `WaitTimeout` say, goes on until it comes to its next message or returns; `client.restart_workers` ends it at once,
    with all that the worker holds.

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
        self._client = client
        self._allowed = None if workers is None else frozenset(workers)
        self._transport = transport
        self._timeout_seconds = timeout_seconds
        self._workers: list[str] = []
        there = len(self._there())
        if size is None and not there:
            raise GangError(f"size=None takes all workers, and there are none: {self._cluster()}; add workers")
        super().__init__(
            there if size is None else size, job=f"dask-{secrets.token_hex(8)}", timeout_seconds=timeout_seconds
        )

    @property
    def workers(self) -> tuple[str, ...]:
        """The address of each rank's worker, by rank, as of the last start."""
        return tuple(self._workers)

    def _begin(self, epoch: int, deadline: float) -> Ranks:
        self._workers = self._chosen(deadline)
        member = {
            "size": self._size,
            "job": self._job,
            "epoch": epoch,
            "transport": self._transport,
            "timeout_seconds": self._timeout_seconds,
        }
        return _DaskRanks(self._client, self._workers, member, deadline)

    def _close(self) -> None:
        pass  # the client is not ours

    def _there(self) -> list[str]:
        """Returns the addresses of the workers that may be used, sorted."""
        return sorted(worker for worker in self._client.nthreads() if self._allowed is None or worker in self._allowed)

    def _chosen(self, deadline: float) -> list[str]:
        """Waits for enough workers, and returns one a rank: the one it had, if that is still there."""
        while len(there := self._there()) < self._size:
            pause = backoff(deadline, _PAUSE_SECONDS)
            if pause is None:
                raise GangError(
                    f"size={self._size} ranks need a worker each, and there are {len(there)} after "
                    f"timeout_seconds={self._timeout_seconds:g}: {self._cluster()}; add workers, or take fewer ranks"
                )
            time.sleep(pause)
        kept = [worker if worker in there else "" for worker in self._workers] or [""] * self._size
        free = iter([worker for worker in there if worker not in kept])
        return [worker or next(free) for worker in kept]

    def _cluster(self) -> str:
        among = "" if self._allowed is None else f", of which workers= allows {len(self._allowed)}"
        return f"the Dask cluster at {self._client.scheduler.address} has {len(self._client.nthreads())} workers{among}"


class _DaskRanks(Ranks):
    """The actors of one epoch, and that of their store, which lies on the worker of rank 0.

    **Arguments:** `workers`: of each rank. `member`: how each one makes its `Member`. `deadline`: by `time.monotonic`.
    """

    def __init__(self, client: Any, workers: Sequence[str], member: Mapping[str, Any], deadline: float) -> None:
        self._client = client
        self._workers = workers
        self._actors: list[Any] = []
        self._owed: dict[asyncio.Task[Any], int] = {}
        name = f"braidax-{member['job']}-{member['epoch']}-{secrets.token_hex(8)}"
        address = f"{SCHEME}{workers[0]}#{name}-store"
        self._store = self._made(ActorStore, workers[0], f"{name}-store")
        self._made_ranks = [
            self._made(DaskRank, worker, f"{name}-{rank}", address, f"{name}-{rank}", rank, member)
            for rank, worker in enumerate(workers)
        ]
        try:
            self._wait_until_made(deadline)
            with client.as_current():  # it need not be the default one
                actor = import_distributed().Actor
                self._actors = [
                    actor(DaskRank, worker, made.key) for worker, made in zip(workers, self._made_ranks, strict=True)
                ]
            self._places = self._found(deadline)
            self._ask("join", max(1e-3, deadline - time.monotonic()))
        except BaseException:
            self.end()
            raise

    def call(self, call: bytes) -> None:
        self._ask("call", call)

    def answers(self, *, timeout_seconds: float | None) -> Mapping[int, bytes | Ended]:
        limit = math.inf if timeout_seconds is None else timeout_seconds
        new: dict[int, bytes | Exception] = self._client.sync(self._answers, limit)
        return {rank: self._ended(rank, got) if isinstance(got, Exception) else got for rank, got in new.items()}

    def end(self) -> None:
        actors, self._actors = self._actors, []
        made, self._made_ranks = self._made_ranks, []
        with contextlib.suppress(OSError, RuntimeError):  # the client is closed, or the cluster is gone
            if actors:
                self._client.sync(self._leave, actors)
            if made:
                # By force: what stands for an actor counts as somebody who needs it, and lies in reference cycles.
                self._client.cancel([*made, self._store], force=True)

    def _made(self, kind: type, worker: str, key: str, *args: Any) -> Any:
        options = {"workers": [worker], "allow_other_workers": False, "actor": True, "pure": False, "key": key}
        return self._client.submit(kind, *args, **options)

    def _wait_until_made(self, deadline: float) -> None:
        made = {"the store": self._store, **{f"rank {rank}": made for rank, made in enumerate(self._made_ranks)}}
        left = max(0.0, deadline - time.monotonic())
        with contextlib.suppress(TimeoutError), self._client.as_current():
            import_distributed().wait(list(made.values()), timeout=left)
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

    def _found(self, deadline: float) -> dict[int, tuple[str, int]]:
        """Returns where the ranks are: the names of the host and of the process."""
        self._ask("where")
        found: dict[int, Any] = {}
        while self._owed and (left := deadline - time.monotonic()) > 0:
            found.update(self._client.sync(self._answers, left))
        for rank, worker in enumerate(self._workers):
            if not isinstance(found.get(rank), tuple):
                why = found.get(rank, "it did not answer in time")
                raise GangError(f"rank {rank} cannot be started on the Dask worker {worker}: {why}")
        return found

    def _ask(self, method: str, *args: Any) -> None:
        async def begin() -> dict[asyncio.Task[Any], int]:
            return {asyncio.create_task(_asked(actor, method, *args)): rank for rank, actor in enumerate(self._actors)}

        self._owed = self._client.sync(begin)

    async def _answers(self, limit_seconds: float) -> dict[int, Any]:
        """Waits until ranks have answered or are lost, and returns what is new."""
        deadline = time.monotonic() + limit_seconds
        new: dict[int, Any] = {}
        while self._owed and not new:
            left = deadline - time.monotonic()
            done, _ = await asyncio.wait(
                self._owed, timeout=max(0.0, min(left, _LOOK_SECONDS)), return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                new[self._owed.pop(task)] = task.exception() or task.result()
            # A worker whose host went down closes nothing: its scheduler says at some time that it is gone.
            for task, rank in list(self._owed.items()):
                if self._made_ranks[rank].status not in _ALIVE:
                    del self._owed[task]
                    task.cancel()
                    new[rank] = OSError(f"the scheduler says that it is {self._made_ranks[rank].status}")
            if left <= 0:
                break
        return new

    async def _leave(self, actors: Sequence[Any]) -> None:
        leaving = [asyncio.create_task(_asked(actor, "leave", _LEAVE_SECONDS)) for actor in actors]
        tasks = {*leaving, *self._owed}
        self._owed = {}
        await asyncio.wait(leaving, timeout=2 * _LEAVE_SECONDS)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, rank: int, error: Exception) -> Ended:
        host, pid = self._places[rank]
        how = f"ended without an answer, with the Dask worker {self._workers[rank]} ({error}); see that worker's log"
        return Ended(host, pid, how, time.time())


async def _asked(actor: Any, method: str, *args: Any) -> Any:
    return await getattr(actor, method)(*args)


def open_client(address: str | None) -> Any:
    """Returns a client of a Dask cluster, to be closed.

    **Arguments:** `address`: of the scheduler, such as `tcp://host:8786`; None is what `DASK_SCHEDULER_ADDRESS` says.

    **Raises:** `ArgumentError` when nobody says, `GangError` when the scheduler does not answer.
    """
    distributed = import_distributed()
    address = address or os.environ.get("DASK_SCHEDULER_ADDRESS")
    if not address:
        raise ArgumentError(
            "address=None, and the environment variable DASK_SCHEDULER_ADDRESS is not set; expected the address of "
            "Dask's scheduler in one of them (--scheduler), such as tcp://host:8786"
        )
    try:
        return distributed.Client(address, set_as_default=False)
    except (OSError, ValueError) as error:
        raise GangError(f"{address}: no scheduler of Dask answers there ({error}); does it run?") from error
