"""`connect`: ranks that know nothing but a store find one another."""

import base64
import contextlib
import importlib.metadata
import json
import os
import secrets
import socket
import threading
import time
from dataclasses import asdict, dataclass
from typing import final

from braidax.comm.collectives.splitting import Counters
from braidax.comm.communicator import Communicator
from braidax.comm.group import Group
from braidax.comm.progress import Progress
from braidax.comm.stores.store import ScopedStore, Store
from braidax.comm.transports.named import make_transport
from braidax.comm.transports.tcp import TcpTransport
from braidax.comm.transports.transport import Transport
from braidax.comm.waiting import words_of
from braidax.comm.watch import Notice, OnLoss, Watch
from braidax.connections.hosts import host_id
from braidax.connections.listener import Tls
from braidax.connections.world import World
from braidax.errors import Aborted, ArgumentError, CommError, HandshakeError, WaitTimeout

_SLICE_SECONDS = 1.0  # how often a rank that waits looks whether another has given up


@final
@dataclass(frozen=True)
class Tuning:
    """Times and hosts, for those who know better than the defaults.

    **Arguments:** `peer_timeout_seconds`: a rank that says nothing for so long is lost; longer than any code of yours
    that keeps the GIL. `spin_seconds`: how long a wait keeps its core before it sleeps; 0 where ranks are more than
    cores. `host`: instead of this host's name; ranks that give the same one count as being on one host. `tls`: for the
    connections of the transport named `tcp` and of the ring on which ranks watch one another.
    """

    peer_timeout_seconds: float = 60.0
    spin_seconds: float = 50e-6
    host: str | None = None
    tls: Tls | None = None

    def __post_init__(self) -> None:
        if not self.peer_timeout_seconds > 0:
            raise ArgumentError(f"peer_timeout_seconds={self.peer_timeout_seconds!r}: expected seconds > 0")
        if not self.spin_seconds >= 0:
            raise ArgumentError(f"spin_seconds={self.spin_seconds!r}: expected seconds >= 0")


DEFAULT = Tuning()


def connect(
    store: Store,
    *,
    rank: int,
    size: int,
    transport: str | Transport = "tcp",
    job: str = "braidax",
    generation: int = 0,
    on_loss: OnLoss = "generation",
    timeout_seconds: float = 120.0,
    tuning: Tuning = DEFAULT,
) -> Communicator:
    """Joins the ranks of a job; all of them call it at about the same time, and it returns when all have.

    **Arguments:** `store`: that all ranks see; it stays the caller's, and is not used afterwards. `rank`, `size`: 0 to
    `size` - 1, and how many there are. `transport`: `tcp`, `ucx`, `mpi`, the name of a plug-in, or a `Transport`, which
    then belongs to the communicator. `job`, `generation`: which ranks belong together, see `ScopedStore`; the same job
    connects again as the next generation. `on_loss`: what ends with a rank that is lost, aborts, or fails in a
    collective; the same on all ranks. `"generation"`: everything, for ranks that do one thing together. `"peer"`: what
    others wait for from it, now and later, and the collectives of its groups; all else goes on, and a limit that passes
    ends nothing but the wait. That is for ranks of several kinds, such as servers and those who ask them; each kind has
    collectives of its own by `split`, or in another world. There every rank is connected to every other one, values are
    copied before they are sent, and where a connection breaks between two that live, the higher rank is lost.
    `timeout_seconds`: the limit of this, and of every wait of the communicator.

    **Returns:** a communicator, to be closed. **Raises:** `ArgumentError` for a transport that cannot lose one rank and
    keep the others, as `mpi`; `HandshakeError` for ranks that do not fit together;
    `WaitTimeout` naming the ranks that did not come, or cannot be reached; `Aborted` where another rank raised first.
    """
    _check(rank, size, timeout_seconds, on_loss)
    deadline = time.monotonic() + timeout_seconds
    scoped = ScopedStore(store, job=job, generation=generation)
    where = f"job={job!r}, generation={generation}, at {store.address}"
    chosen = _transport(transport, tuning)
    watch = Watch(peer_timeout_seconds=tuning.peer_timeout_seconds, tls=tuning.tls, on_loss=on_loss)
    try:
        _check_can_lose(chosen, on_loss)
        card = _card_of(rank, size, chosen, watch, tuning, on_loss)
        try:
            cards, secret = _meet(scoped, card, where, deadline, timeout_seconds)
            worlds = _worlds(cards, rank, secret, _Check(scoped, watch))
            try:
                watch.connect(worlds.watch, timeout_seconds=_left(deadline))
                chosen.connect(worlds.transport, timeout_seconds=_left(deadline))
            except CommError:  # that rank may have gone because a third one failed
                _check_failure(scoped)
                raise
        except BaseException as error:
            with contextlib.suppress(CommError, WaitTimeout):  # the store itself may be what failed
                scoped.set("failure", f"{type(error).__name__} in rank {rank}: {error}".encode())
            raise
        spin_seconds = tuning.spin_seconds
        progress = Progress(chosen, watch, worlds.transport, spin_seconds=spin_seconds, on_loss=on_loss)
    except BaseException:
        watch.close()
        chosen.close(timeout_seconds=0)
        raise
    comm = _begun(progress, cards, rank, deadline)
    comm.timeout_seconds = timeout_seconds
    return comm


def give_up_meeting(store: Store, *, job: str, generation: int, reason: str) -> None:
    """Lets the ranks that wait in `connect` for others of this generation raise `Aborted`, within about a second.

    **Arguments:** `store`, `job`, `generation`: as theirs. `reason`: why not all of them will come.
    """
    ScopedStore(store, job=job, generation=generation).set("failure", reason.encode())


def _transport(transport: str | Transport, tuning: Tuning) -> Transport:
    if isinstance(transport, Transport):
        return transport
    return TcpTransport(tls=tuning.tls) if transport == "tcp" else make_transport(transport)


@dataclass(frozen=True)
class _Card:
    """What a rank leaves in the store."""

    rank: int
    size: int
    version: str
    transport: str
    host: str
    machine: str
    pid: int
    address: str
    watch: str
    on_loss: str


def _card_of(rank: int, size: int, transport: Transport, watch: Watch, tuning: Tuning, on_loss: OnLoss) -> _Card:
    return _Card(
        rank=rank,
        size=size,
        version=importlib.metadata.version("braidax"),
        transport=transport.name,
        host=tuning.host or socket.gethostname(),
        machine=tuning.host or host_id(),
        pid=os.getpid(),
        address=base64.b64encode(transport.address).decode(),
        watch=base64.b64encode(watch.address).decode(),
        on_loss=on_loss,
    )


@dataclass(frozen=True)
class _Worlds:
    transport: World
    watch: World


def _begun(progress: Progress, cards: list[_Card], rank: int, deadline: float) -> Communicator:
    """Returns a communicator once all ranks have theirs."""
    try:
        progress.start()
        machines = sorted({card.machine for card in cards})
        hosts = [machines.index(card.machine) for card in cards]
        group = Group(progress, number=0, ranks=range(len(cards)), rank=rank, hosts=hosts)
        comm = Communicator(group, counters=Counters(), timeout_seconds=_left(deadline))
        try:
            comm.barrier()
        except CommError:  # all have met, and who is lost since then is so for those who need it
            if progress.failure is not None or not progress.lost:
                raise
    except BaseException as error:
        progress.fail(Notice("aborted", rank, f"connect failed: {words_of(error)}"))
        progress.close(timeout_seconds=0)
        raise
    return comm


def _meet(
    store: ScopedStore, card: _Card, where: str, deadline: float, timeout_seconds: float
) -> tuple[list[_Card], bytes]:
    """Leaves a card, and collects those of all ranks, and the secret of the seed that rank 0 leaves."""
    if store.add(f"joined/{card.rank}", 1) != 1:
        raise HandshakeError(
            f"rank {card.rank} has joined {where} before; expected each rank once: give another job its own job=, and "
            "the same job, when it connects again, the next generation="
        )
    if card.rank == 0:
        store.set("seed", secrets.token_bytes(32))
    store.set(f"card/{card.rank}", json.dumps(asdict(card)).encode())
    cards: dict[int, _Card] = {card.rank: card}
    while missing := [rank for rank in range(card.size) if rank not in cards]:
        try:
            other = _card(_get(store, f"card/{missing[0]}", deadline))
        except WaitTimeout:
            raise _absent(store, missing, card, where, timeout_seconds) from None
        _check_fits(card, other)
        cards[missing[0]] = other
    return [cards[rank] for rank in range(card.size)], store.derive_secret(_get(store, "seed", deadline))


def _get(store: ScopedStore, key: str, deadline: float) -> bytes:
    """Waits for a value, unless another rank gives up meanwhile."""
    while True:
        left = deadline - time.monotonic()
        try:
            return store.get(key, timeout_seconds=max(0.0, min(left, _SLICE_SECONDS)))
        except WaitTimeout:
            _check_failure(store)
            if left <= 0:
                raise


def _check_failure(store: ScopedStore) -> None:
    try:
        reason = store.get("failure", timeout_seconds=0)
    except WaitTimeout:
        return
    raise Aborted(f"another rank could not join, and this generation is over: {reason.decode()}")


def _absent(store: ScopedStore, missing: list[int], card: _Card, where: str, timeout_seconds: float) -> WaitTimeout:
    absent: list[int] = []
    for rank in missing:
        try:
            store.get(f"card/{rank}", timeout_seconds=0)
        except WaitTimeout:
            absent.append(rank)
    listed = ", ".join(map(str, absent[:16])) + ("…" if len(absent) > 16 else "")
    return WaitTimeout(
        f"ranks {listed} of {card.size} did not join {where} within {timeout_seconds=:g}; expected all of them: "
        "look at their logs, and see that all use the same store, job, generation and size"
    )


def _check_fits(mine: _Card, other: _Card) -> None:
    who, me = f"rank {other.rank} (host {other.host}, pid {other.pid})", f"rank {mine.rank}"
    if other.version != mine.version:
        raise HandshakeError(
            f"{who} runs braidax {other.version}, {me} {mine.version}; install the same version on all hosts"
        )
    if other.size != mine.size:
        raise HandshakeError(
            f"{who} was started as one of size={other.size} ranks, {me} as one of {mine.size}; start all with the same "
            "size"
        )
    if other.transport != mine.transport:
        raise HandshakeError(
            f"{who} uses transport={other.transport!r}, {me} {mine.transport!r}; give all ranks the same transport"
        )
    if other.on_loss != mine.on_loss:
        raise HandshakeError(
            f"{who} connects with on_loss={other.on_loss!r}, {me} with {mine.on_loss!r}; give all ranks the same"
        )


def _card(data: bytes) -> _Card:
    return _Card(**json.loads(data))


class _Check:
    """Raises when another rank has given up, or is lost, while connections are made."""

    def __init__(self, store: ScopedStore, watch: Watch) -> None:
        self.store = store
        self._watch = watch
        self._lock = threading.Lock()
        self.world: World | None = None

    def __call__(self) -> None:
        with self._lock:
            _check_failure(self.store)
            for notice in self._watch.look():
                if self.world is not None:
                    raise notice.error(self.world)


def _worlds(cards: list[_Card], rank: int, secret: bytes, check: _Check) -> _Worlds:
    hosts = [card.host for card in cards]
    addresses = ([base64.b64decode(item) for item in (card.address, card.watch)] for card in cards)
    ours, watched = zip(*addresses, strict=True)
    check.world = World(rank, ours, hosts, secret, check=check)
    return _Worlds(check.world, World(rank, watched, hosts, secret, check=lambda: _check_failure(check.store)))


def _left(deadline: float) -> float:
    return max(1e-3, deadline - time.monotonic())


def _check_can_lose(transport: Transport, on_loss: OnLoss) -> None:
    if on_loss == "peer" and not transport.can_lose:
        raise ArgumentError(
            f"on_loss='peer': the transport {transport.name!r} cannot lose one rank and keep the others; use "
            "transport='tcp' or 'ucx', or on_loss='generation'"
        )


def _check(rank: int, size: int, timeout_seconds: float, on_loss: str) -> None:
    if on_loss not in ("generation", "peer"):
        raise ArgumentError(f"on_loss={on_loss!r}: expected 'generation' or 'peer'")
    if size < 1:
        raise ArgumentError(f"size={size!r}: expected a whole number >= 1")
    if not 0 <= rank < size:
        raise ArgumentError(f"rank={rank!r}: expected a whole number from 0 to size - 1, {size - 1}")
    if not timeout_seconds > 0:
        raise ArgumentError(f"timeout_seconds={timeout_seconds!r}: expected seconds > 0")
