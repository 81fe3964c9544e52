"""Gangs on Ray: a placement group with one bundle a rank, and in each bundle an actor that is the rank."""

import contextlib
import math
import os
import queue
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, final, get_args

from braidax.errors import ArgumentError, GangError
from braidax.gang.actor_store import ActorStore
from braidax.gang.calling.parcels import Parcel, own, shown_to_pickle
from braidax.gang.calling.ranks import Ended, Message, Ranks
from braidax.gang.cluster import ClusterGang
from braidax.gang.keeping.kept import listed
from braidax.gang.ray_rank import RayRank
from braidax.gang.ray_store import ANSWER_SECONDS, SCHEME, import_ray, told
from braidax.gang.ray_store import RayStore as RayStore

Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]

_NAMESPACE = "braidax"
_LEAVE_SECONDS = 2.0  # a rank that does not leave by itself in that time is killed
_GONE_SECONDS = 10.0  # after a kill
_CONTROL = "control"  # the concurrency group of what is not to wait for a call
_MIN_WAITING = 1000  # calls that may wait in a store's actor, Ray's own default


@dataclass(frozen=True)
class _Options:
    """What the ranks of every generation start from."""

    transport: str
    bundle: dict[str, float]
    strategy: str
    environment: dict[str, str] = field(repr=False)
    timeout_seconds: float


@final
class RayGang(ClusterGang):
    """A gang whose ranks are actors on a Ray cluster, in one placement group.

    It uses the cluster that this process is connected to, and calls `ray.init()` only when there is none; what that
    started is shut down by `stop`. The ranks' output comes to the terminal with the rank in front, such as
    `(rank 2 pid=4711)`, as far as Ray forwards logs (Ray's `log_to_driver`); Ray shows lines that are the same on many
    ranks once (`RAY_DEDUP_LOGS=0` shows all). They also lie in the session folder of Ray.

    **Arguments:** `size`: the number of ranks. `transport`: what carries their messages. `num_cpus`, `num_gpus`: what
    Ray reserves for each rank. `resources`: other resources of Ray for each rank, such as `{"TPU": 4}`. `strategy`:
    how Ray spreads the ranks over hosts, in Ray's words; the default packs them on few, and spreads them where they do
    not fit. `environment`: variables that each rank begins with, besides those of Ray's own. `timeout_seconds`: how
    long Ray may take to find room and to start the ranks, and they to meet; it is also the communicator's limit.

    **Raises:** `ArgumentError` for values that cannot work; `MissingExtra` without Ray. `start` raises `GangError` when
    the cluster has no room for all ranks.
    """

    def __init__(
        self,
        size: int,
        *,
        transport: str = "tcp",
        num_cpus: float = 1,
        num_gpus: float = 0,
        resources: Mapping[str, float] | None = None,
        strategy: Strategy = "PACK",
        environment: Mapping[str, str] | None = None,
        timeout_seconds: float = 60.0,
    ) -> None:
        super().__init__(size, job=f"ray-{secrets.token_hex(8)}", timeout_seconds=timeout_seconds, transport=transport)
        asked = {"num_cpus": num_cpus, "num_gpus": num_gpus}
        for name, amount in (resources or {}).items():
            if name in ("CPU", "GPU"):
                raise ArgumentError(f"resources={resources!r}: expected no {name} there; use num_cpus= and num_gpus=")
            asked[f"resources[{name!r}]"] = amount
        for name, amount in asked.items():
            if not amount >= 0:
                raise ArgumentError(f"{name}={amount!r}: expected a number >= 0")
        bundle = {"CPU": float(num_cpus), "GPU": float(num_gpus), **(resources or {})}
        bundle = {name: amount for name, amount in bundle.items() if amount}
        if not bundle:
            raise ArgumentError("num_cpus=0: expected that a rank takes something of a host; try num_cpus=0.001")
        if strategy not in get_args(Strategy):
            raise ArgumentError(f"{strategy=}: expected one of {', '.join(get_args(Strategy))}")
        self._options = _Options(transport, bundle, strategy, dict(environment or {}), timeout_seconds)
        self._ray = import_ray()
        self._started = ""  # the address of the cluster that this gang started

    def _hand(self, token: str, references: Sequence[Sequence[Any]]) -> None:
        self._ray_ranks.each("hand", [(token, list(own)) for own in references])

    def _take_back(self, token: str) -> None:
        self._ray_ranks.take_back(token)

    def _results(self, fn: Callable[[Any], Any], name: str) -> list[Any]:
        return self._ray_ranks.each("result", [(name, fn)] * self.size)

    @property
    def _ray_ranks(self) -> "_RayRanks":
        assert isinstance(self._ranks, _RayRanks)
        return self._ranks

    def _begin(self, deadline: float) -> Ranks:
        if self._ray.is_initialized():
            return _RayRanks(self._ray, self._options, self._size, deadline)
        try:
            self._ray.init()
        except (OSError, RuntimeError, ValueError) as error:
            address = os.environ.get("RAY_ADDRESS")
            raise GangError(
                f"ray.init() failed with RAY_ADDRESS={address!r}: {type(error).__name__}: {error}; connect to the "
                "cluster before, with ray.init(address)"
            ) from error
        self._started = self._cluster()
        try:
            return _RayRanks(self._ray, self._options, self._size, deadline)
        except BaseException:
            self._close()
            raise

    def _close(self) -> None:
        started, self._started = self._started, ""
        if started and started == self._cluster():
            self._ray.shutdown()

    def _cluster(self) -> str:
        """Returns the address of the cluster that this process is connected to, if it is to any."""
        return self._ray.get_runtime_context().gcs_address if self._ray.is_initialized() else ""


class _RayRanks(Ranks):
    """The actors of a gang, the placement group that they lie in, and the actor of their store.

    **Arguments:** `deadline`: until when they must be there, by `time.monotonic`.
    """

    def __init__(self, ray: Any, options: _Options, size: int, deadline: float) -> None:
        self._ray = ray
        self._options = options
        self._size = size
        self._group: Any = None
        self._store: Any = None
        self._store_address = ""
        self._actors: dict[int, Any] = {}
        self._places: dict[int, tuple[str, int]] = {}
        self._owed: dict[int, Any] = {}  # by rank, the answer
        self._watches: dict[int, Any] = {}  # by rank, what fails when it ends
        self._news: queue.SimpleQueue[tuple[int, Any] | None] = queue.SimpleQueue()
        with contextlib.ExitStack() as undone:
            undone.callback(self.end, "stop")
            self._reserve(deadline)
            self._start_store()
            self._start(range(size), deadline)
            undone.pop_all()

    def ask(self, messages: Mapping[int, Message]) -> None:
        bodies: dict[int, Any] = {}
        for message in messages.values():
            if id(message.body) not in bodies:  # once a host, not once a rank
                bodies[id(message.body)] = self._ray.put(shown_to_pickle(message.body))
        for rank, message in messages.items():
            answer = self._actors[rank].answer.remote(shown_to_pickle(message.head), bodies[id(message.body)])
            self._owed[rank] = answer
            self._listen(rank, answer)

    def answers(self, *, timeout_seconds: float | None) -> Mapping[int, Parcel | Ended]:
        deadline = math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds
        new: dict[int, Parcel | Ended] = {}
        left: float | None = None
        while not new:
            if not math.isinf(deadline):
                left = max(0.0, deadline - time.monotonic())
            try:
                item = self._news.get(timeout=left)
                while item is not None:
                    rank, ref = item
                    if rank in new:  # it has answered, and then ended
                        self._news.put(item)
                        return new
                    if ref in (self._owed.get(rank), self._watches.get(rank)):  # and not of a rank that was killed
                        new[rank] = self._read(rank, ref)
                    item = self._news.get_nowait()
                return new  # it was woken
            except queue.Empty:
                if left == 0.0:
                    return new
        return new

    def wake(self) -> None:
        self._news.put(None)

    def each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Calls a method of each rank, and returns references to the results when all are there.

        **Raises:** what a method or an object's task did; `GangError` when a rank or an object is lost.
        """
        found: list[Any] = []
        asked = [
            getattr(self._actors[rank], method).options(num_returns=2).remote(*each)
            for rank, each in enumerate(arguments)
        ]
        for rank, (done, result) in enumerate(asked):  # the first is there with the second, and brings nothing here
            try:
                self._ray.get(done)
            except self._ray.exceptions.RayTaskError as error:
                raise error.cause from None
            except self._ray.exceptions.RayError as error:
                raise GangError(f"rank {rank} cannot take or give what Ray keeps: {told(error)}") from error
            found.append(result)
        return found

    def take_back(self, token: str) -> None:
        """Lets ranks give up what they were handed, as far as they are there; does not wait."""
        with _quietly():
            for actor in self._actors.values():
                actor.take_back.remote(token)

    def abort(self, ranks: Collection[int], call: int, reason: str) -> None:
        for rank in ranks:
            if rank in self._actors:
                self._actors[rank].abort.options(concurrency_group=_CONTROL).remote(call, reason)

    def kill(self, ranks: Collection[int]) -> None:
        killed = [self._actors.pop(rank) for rank in ranks if rank in self._actors]
        for rank in ranks:
            self._owed.pop(rank, None)
            self._watches.pop(rank, None)
        self._kill(killed)

    def replace(self, ranks: Collection[int], deadline: float) -> None:
        self.kill(ranks)
        try:
            if not self._has_store():
                self._start_store()
                moving = [actor.move.remote(self._store_address) for actor in self._actors.values()]
                del moving
            self._start(ranks, deadline)
        except BaseException:
            self.kill(ranks)
            raise

    def end(self, reason: Literal["stop", "interrupt"]) -> None:
        actors, self._actors = list(self._actors.values()), {}
        owed, self._owed = self._owed, {}
        group, self._group = self._group, None
        store, self._store = self._store, None
        if not self._ray.is_initialized():  # all of it went with the cluster, and Ray would begin a new one
            return
        with _quietly():
            if actors and not owed:
                leaving = [actor.leave.remote() for actor in actors]
                self._ray.wait(leaving, num_returns=len(leaving), timeout=_LEAVE_SECONDS)
        self._kill([*actors, *([] if store is None else [store])])
        with _quietly():
            if group is not None:
                self._ray.util.remove_placement_group(group)

    def _kill(self, actors: Sequence[Any]) -> None:
        """Kills actors, and waits until they are gone, so that their place is free."""
        for actor in actors:
            with _quietly():
                self._ray.kill(actor)
        with _quietly():
            gone = [actor.__ray_ready__.remote() for actor in actors]  # fails as soon as the actor is gone
            if gone:
                self._ray.wait(gone, num_returns=len(gone), timeout=_GONE_SECONDS)

    def _start(self, ranks: Collection[int], deadline: float) -> None:
        for rank in ranks:
            member = {"transport": self._options.transport, "timeout_seconds": self._options.timeout_seconds}
            self._actors[rank] = self._actor(rank).remote(self._store_address, rank, member)
        self._find(ranks, deadline)
        for rank in ranks:
            self._watches[rank] = self._actors[rank].stay.options(concurrency_group=_CONTROL).remote()
            self._listen(rank, self._watches[rank])

    def _has_store(self) -> bool:
        try:
            self._ray.get(self._store.get.remote(b"", 0.0), timeout=ANSWER_SECONDS)
        except (self._ray.exceptions.RayError, self._ray.exceptions.GetTimeoutError):
            return False
        return True

    def _listen(self, rank: int, ref: Any) -> None:
        ref.future().add_done_callback(lambda _: self._news.put((rank, ref)))

    def _reserve(self, deadline: float) -> None:
        bundle, strategy = self._options.bundle, self._options.strategy
        self._group = self._ray.util.placement_group([bundle] * self._size, strategy=strategy)
        if not self._group.wait(timeout_seconds=max(0.0, deadline - time.monotonic())):
            all_of_it, free = self._ray.cluster_resources(), self._ray.available_resources()
            has = ", ".join(f"{name} {free.get(name, 0.0):g} of {all_of_it.get(name, 0.0):g}" for name in bundle)
            raise GangError(
                f"Ray found no room for size={self._size} ranks of {_amounts(bundle)} each ({strategy}) within "
                f"timeout_seconds={self._options.timeout_seconds:g}; free in the cluster: {has}; take fewer ranks, ask "
                "for less (num_cpus=, num_gpus=, resources=), or add nodes"
            )

    def _start_store(self) -> None:
        name = f"store-{secrets.token_hex(16)}"
        waiting = max(_MIN_WAITING, 4 * self._size)
        store = self._ray.remote(ActorStore)
        self._store = store.options(num_cpus=0, name=name, namespace=_NAMESPACE, max_concurrency=waiting).remote()
        self._store_address = f"{SCHEME}{_NAMESPACE}/{name}"

    def _actor(self, rank: int) -> Any:
        bundle = dict(self._options.bundle)
        strategies = self._ray.util.scheduling_strategies
        options = {
            "num_cpus": bundle.pop("CPU", 0),
            "num_gpus": bundle.pop("GPU", 0),
            "resources": bundle,
            "scheduling_strategy": strategies.PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=rank
            ),
        }
        if self._options.environment:
            options["runtime_env"] = {"env_vars": self._options.environment}
        return self._ray.remote(concurrency_groups={_CONTROL: 2})(RayRank).options(**options)

    def _find(self, ranks: Collection[int], deadline: float) -> None:
        """Waits until actors are there, and notes where."""
        calls = {rank: self._actors[rank].where.remote() for rank in ranks}
        left = max(0.0, deadline - time.monotonic())
        ready, late = self._ray.wait(list(calls.values()), num_returns=len(calls), timeout=left)
        for rank, call in calls.items():
            try:
                if call in ready:
                    self._places[rank] = self._ray.get(call)
            except self._ray.exceptions.RayError as error:
                raise GangError(f"rank {rank} of {self._size} cannot be started on Ray: {told(error)}") from error
        if late:
            raise GangError(
                f"Ray did not start {listed(rank for rank, call in calls.items() if call in late)} of {self._size} "
                f"within timeout_seconds={self._options.timeout_seconds:g}; allow more time, or see what Ray's log "
                "folder says"
            )

    def _read(self, rank: int, ref: Any) -> Parcel | Ended:
        try:
            answer = own(self._ray.get(ref))
            del self._owed[rank]
            return answer
        except self._ray.exceptions.RayError as error:
            host, pid = self._places[rank]
            self.kill([rank])
            how = f"ended without an answer: {told(error)}; Ray keeps what it wrote in its log folder, worker-*-{pid}.*"
            return Ended(host, pid, how, time.time())


def _quietly() -> contextlib.AbstractContextManager[None]:
    """Ignores what goes wrong with actors: Ray raises just any `Exception` for those of a cluster that is gone."""
    return contextlib.suppress(Exception)


def _amounts(bundle: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {amount:g}" for name, amount in bundle.items())
