"""Gangs on Ray: a placement group with one bundle a rank, and in each bundle an actor that is the rank."""

import contextlib
import os
import re
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, final, get_args

from braidax.comm.stores.limits import check_amount, check_value, key_bytes
from braidax.comm.stores.store import Store, missing
from braidax.errors import ArgumentError, CommError, GangError, import_extra
from braidax.gang.actor_store import ActorStore
from braidax.gang.gang import Ended, Gang, Ranks
from braidax.gang.member import Member

Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]

_SCHEME = "ray:"
_NAMESPACE = "braidax"
_ANSWER_SECONDS = 30.0  # that an actor on a busy host may take to answer
_LEAVE_SECONDS = 2.0  # a rank that does not leave by itself in that time is killed
_GONE_SECONDS = 10.0  # after a kill
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_MIN_WAITING = 1000  # calls that may wait in a store's actor, Ray's own default


@final
class RayStore(Store):
    """A store in an actor of Ray, reached by whatever Ray itself talks over.

    **Arguments:** `address`: `ray:NAMESPACE/NAME` of an actor that a `RayGang` holds; it ends with the gang's
    epoch.

    **Raises:** `ArgumentError` for another address, `CommError` when Ray knows no such actor.
    """

    def __init__(self, address: str) -> None:
        namespace, slash, name = address.removeprefix(_SCHEME).partition("/")
        if not address.startswith(_SCHEME) or not slash or not name:
            raise ArgumentError(f"{address=}: expected {_SCHEME}NAMESPACE/NAME, as RayStore.address gives it")
        self._ray = _ray()
        self._address = address
        try:
            self._actor = self._ray.get_actor(name, namespace=namespace)
        except ValueError as error:
            raise CommError(
                f"{address}: Ray knows no such actor ({error}); it ends with the epoch of the gang that holds it: is "
                "this the same Ray cluster, and does the gang run?"
            ) from error

    @property
    def address(self) -> str:
        return self._address

    def set(self, key: str, value: bytes) -> None:
        check_value(key, value)
        self._answer(self._actor.set.remote(key_bytes(key), value), 0.0)

    def get(self, key: str, *, timeout_seconds: float) -> bytes:
        value = self._answer(self._actor.get.remote(key_bytes(key), timeout_seconds), timeout_seconds)
        if value is None:
            raise missing(key, self._address, timeout_seconds)
        return value

    def add(self, key: str, amount: int) -> int:
        check_amount(amount)
        return self._answer(self._actor.add.remote(key_bytes(key), amount), 0.0)

    def close(self) -> None:
        pass  # the gang ends the actor

    def _answer(self, call: Any, seconds: float) -> Any:
        limit = seconds + _ANSWER_SECONDS
        try:
            return self._ray.get(call, timeout=limit)
        except self._ray.exceptions.GetTimeoutError as error:
            raise CommError(f"{self._address} did not answer within {limit:g} s; is its host alive?") from error
        except self._ray.exceptions.RayError as error:
            raise CommError(
                f"{self._address} cannot be reached: {_told(error)}; it ends with the epoch of the gang that holds it: "
                "does the gang run?"
            ) from error


@dataclass(frozen=True)
class _Options:
    """What the ranks of every epoch start from."""

    transport: str
    bundle: dict[str, float]
    strategy: str
    environment: dict[str, str] = field(repr=False)
    timeout_seconds: float


@final
class RayGang(Gang):
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
        super().__init__(size, job=f"ray-{secrets.token_hex(8)}", timeout_seconds=timeout_seconds)
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
        self._ray = _ray()
        self._started = ""  # the address of the cluster that this gang started

    def _begin(self, epoch: int, deadline: float) -> Ranks:
        if self._ray.is_initialized():
            return self._ranks_of(epoch, deadline)
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
            return self._ranks_of(epoch, deadline)
        except BaseException:
            self._close()
            raise

    def _ranks_of(self, epoch: int, deadline: float) -> Ranks:
        member = {
            "size": self._size,
            "job": self._job,
            "epoch": epoch,
            "transport": self._options.transport,
            "timeout_seconds": self._options.timeout_seconds,
        }
        return _RayRanks(self._ray, self._options, member, deadline)

    def _close(self) -> None:
        started, self._started = self._started, ""
        if started and started == self._cluster():
            self._ray.shutdown()

    def _cluster(self) -> str:
        """Returns the address of the cluster that this process is connected to, if it is to any."""
        return self._ray.get_runtime_context().gcs_address if self._ray.is_initialized() else ""


class _RayRanks(Ranks):
    """The actors of one epoch, the placement group that they lie in, and the actor of their store.

    **Arguments:** `member`: how each rank makes its `Member`. `deadline`: by `time.monotonic`.
    """

    def __init__(self, ray: Any, options: _Options, member: Mapping[str, Any], deadline: float) -> None:
        self._ray = ray
        self._options = options
        self._size: int = member["size"]
        self._group: Any = None
        self._store: Any = None
        self._actors: list[Any] = []
        self._owed: dict[Any, int] = {}
        with contextlib.ExitStack() as undone:
            undone.callback(self.end)
            self._reserve(deadline)
            address = self._start_store()
            for rank in range(self._size):
                self._actors.append(self._actor(rank).remote(address, rank, member))
            self._places = self._found(deadline)
            left = max(1e-3, deadline - time.monotonic())
            self._owed = {actor.join.remote(left): rank for rank, actor in enumerate(self._actors)}
            undone.pop_all()

    def call(self, call: bytes) -> None:
        sent = self._ray.put(call)  # once a host, not once a rank
        self._owed = {actor.call.remote(sent): rank for rank, actor in enumerate(self._actors)}

    def answers(self, *, timeout_seconds: float | None) -> Mapping[int, bytes | Ended]:
        self._ray.wait(list(self._owed), num_returns=1, timeout=timeout_seconds)
        ready, _ = self._ray.wait(list(self._owed), num_returns=len(self._owed), timeout=0)
        return {rank: self._read(rank, answer) for answer in ready for rank in [self._owed.pop(answer)]}

    def end(self) -> None:
        actors, self._actors = self._actors, []
        owed, self._owed = self._owed, {}
        group, self._group = self._group, None
        store, self._store = self._store, None
        if not self._ray.is_initialized():  # all of it went with the cluster, and Ray would begin a new one
            return
        quietly = contextlib.suppress(Exception)  # Ray raises just that for actors of a cluster that is gone
        with quietly:
            if actors and not owed:
                leaving = [actor.leave.remote() for actor in actors]
                self._ray.wait(leaving, num_returns=len(leaving), timeout=_LEAVE_SECONDS)
        for actor in (*actors, store):
            with quietly:
                if actor is not None:
                    self._ray.kill(actor)
        with quietly:
            if actors:
                ended = [actor.where.remote() for actor in actors]  # fails as soon as the actor is gone
                self._ray.wait(ended, num_returns=len(ended), timeout=_GONE_SECONDS)
        with quietly:
            if group is not None:
                self._ray.util.remove_placement_group(group)

    def _reserve(self, deadline: float) -> None:
        bundle, strategy = self._options.bundle, self._options.strategy
        self._group = self._ray.util.placement_group([bundle] * self._size, strategy=strategy)
        if not self._group.wait(timeout_seconds=max(0.0, deadline - time.monotonic())):
            all_of_it, free = self._ray.cluster_resources(), self._ray.available_resources()
            has = ", ".join(f"{name} {free.get(name, 0.0):g} of {all_of_it.get(name, 0.0):g}" for name in bundle)
            raise GangError(
                f"Ray found no room for size={self._size} ranks of {_listed(bundle)} each ({strategy}) within "
                f"timeout_seconds={self._options.timeout_seconds:g}; free in the cluster: {has}; take fewer ranks, ask "
                "for less (num_cpus=, num_gpus=, resources=), or add nodes"
            )

    def _start_store(self) -> str:
        name = f"store-{secrets.token_hex(16)}"
        waiting = max(_MIN_WAITING, 4 * self._size)
        store = self._ray.remote(ActorStore)
        self._store = store.options(num_cpus=0, name=name, namespace=_NAMESPACE, max_concurrency=waiting).remote()
        return f"{_SCHEME}{_NAMESPACE}/{name}"

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
        return self._ray.remote(_Rank).options(**options)

    def _found(self, deadline: float) -> list[tuple[str, int]]:
        """Waits until all actors are there, and returns where."""
        calls = [actor.where.remote() for actor in self._actors]
        left = max(0.0, deadline - time.monotonic())
        ready, late = self._ray.wait(calls, num_returns=len(calls), timeout=left)
        for rank, call in enumerate(calls):
            try:
                if call in ready:
                    self._ray.get(call)
            except self._ray.exceptions.RayError as error:
                raise GangError(f"rank {rank} of {self._size} cannot be started on Ray: {_told(error)}") from error
        if late:
            ranks = ", ".join(str(calls.index(call)) for call in late)
            raise GangError(
                f"Ray did not start rank {ranks} of {self._size} within "
                f"timeout_seconds={self._options.timeout_seconds:g}; allow more time, or see what Ray's log folder says"
            )
        return self._ray.get(calls)

    def _read(self, rank: int, answer: Any) -> bytes | Ended:
        try:
            return self._ray.get(answer)
        except self._ray.exceptions.RayError as error:
            host, pid = self._places[rank]
            how = (
                f"ended without an answer: {_told(error)}; Ray keeps what it wrote in its log folder, worker-*-{pid}.*"
            )
            return Ended(host, pid, how, time.time())


class _Rank:
    """An actor that is a rank; Ray shows what it prints with `repr` of it in front."""

    def __init__(self, address: str, rank: int, member: Mapping[str, Any]) -> None:
        self._rank = rank
        self._member = Member(RayStore(address), rank=rank, **member)

    def __repr__(self) -> str:
        return f"rank {self._rank}"

    def where(self) -> tuple[str, int]:
        """Returns the names of the host and of the process."""
        return socket.gethostname(), os.getpid()

    def join(self, timeout_seconds: float) -> bytes:
        """Answers what `Member.join` does."""
        return self._member.join(timeout_seconds=timeout_seconds)

    def call(self, call: bytes) -> bytes:
        """Answers what `Member.call` does."""
        return self._member.call(call)

    def leave(self) -> None:
        """Leaves the other ranks."""
        self._member.leave()


def _ray() -> Any:
    return import_extra("ray", "ray", purpose="a gang on Ray")


def _told(error: Exception) -> str:
    """Returns what Ray says in one line, without its colors and its guesses."""
    text = _COLOR.sub("", str(error)).rpartition("The actor is dead because ")[2].partition("Some common causes")[0]
    return " ".join(text.split()) or type(error).__name__


def _listed(bundle: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {amount:g}" for name, amount in bundle.items())
