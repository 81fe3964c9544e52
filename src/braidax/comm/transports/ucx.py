"""Messages over UCX: shared memory inside a host, InfiniBand, RoCE or TCP between hosts."""

import hmac
import importlib
import os
import platform
import select
import struct
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import final

from braidax.comm.transports.quick import know_arrays
from braidax.comm.transports.schedules import BindingSchedules, disagree
from braidax.comm.transports.transport import MAX_TAG, Buffer, Operation, QuickCalls, Transport, too_long
from braidax.comm.transports.unreached import other_secret, other_world
from braidax.connections.world import World
from braidax.errors import (
    ArgumentError,
    CommError,
    HandshakeError,
    MissingExtra,
    PeerLost,
    WaitTimeout,
    import_extra,
)

_PURPOSE = 'the transport "ucx"'
_VARIABLE = "BRAIDAX_UCX_LIBRARY"
_INFINIBAND = Path("/dev/infiniband")
_SYSTEM = "libucp.so.0"

_WHILE_LOADING = {
    "UCX_LOG_LEVEL": "fatal",  # it tells stdout of lost peers and of messages that nobody received; we raise
    "UCX_HANDLE_ERRORS": "none",  # signal handlers are the program's business
}
_WITHOUT_INFINIBAND = {
    "UCX_MEM_EVENTS": "n",  # it replaces mmap and its like in the whole process, which takes 0.4 s; only RDMA needs it
}
_SETTINGS = {
    "POSIX_ERROR_HANDLING": "y",  # shared memory takes part although it cannot tell of a dead peer: our owner can
    "SYSV_ERROR_HANDLING": "y",
    "CMA_MEMORY_INVALIDATE": "y",  # so does the single copy, which reads the sender's memory and writes only our own
    "CMA_SEG_SIZE": "4m",  # of one copy; the default of 512k costs a tenth of the bandwidth
    "TCP_TX_SEG_SIZE": "64k",  # eight times the default: twice the bandwidth
    "SYSV_FIFO_ELEM_SIZE": "192",  # 156 bytes go the shortest way: what begins a collective, with some numbers
    "POSIX_FIFO_ELEM_SIZE": "192",
    "TCP_CONN_NB": "y",  # a connection attempt that nobody answers does not block
}
_TAKES_SETTINGS = (1, 18)  # older versions know those of their transports from the environment alone

_HELLO = struct.Struct("<7sBII32s")  # magic, version, size, rank, proof
_HELLO_TAG = MAX_TAG + 1
_MAGIC = b"braidax"
_VERSION = 2
_ADDRESS_PREFIX = b"braidax-ucx "


@dataclass(frozen=True)
class UcxLibrary:
    """The UCX that is used. **Fields:** `path`: of libucp. `version`: such as `1.22.0`."""

    path: str
    version: str


@final
class UcxTransport(Transport):
    """Moves messages over UCX, which chooses the fastest ways that two ranks have in common.

    Its variables are respected, such as `UCX_TLS` and `UCX_NET_DEVICES`; give all ranks the same. The library is, in
    this order: what `BRAIDAX_UCX_LIBRARY` names; that of the system, where there is InfiniBand; that of the extra
    `ucx`, which knows no InfiniBand; that of the system.

    UCX does not authenticate: ranks prove to one another that they know the secret, but whoever can reach a rank over
    the network, or runs as the same user, can send it messages. Use it in trusted networks. Over shared memory the
    death of a peer is not seen at once.

    A large message is copied out of its sender's memory. A rank that closes without time tells its peers that what they
    have not received is no message any more, so that they do not take what lies there later for one. A peer that is
    frozen behind a full queue cannot be told: what was being sent to it is kept until the process ends, and must not be
    changed. Closing amid gigabytes that are being received does not wait for them: UCX's memory and descriptors then
    stay until the process ends, and so do the buffers.

    **Fields:** `library`: the UCX that is used.

    **Raises:** `MissingExtra` without UCX, or without the binding, which is compiled when braidax is installed;
    `CommError` when UCX finds nothing to communicate with.
    """

    name = "ucx"
    takes_arrays = True
    can_lose = True

    def __init__(self) -> None:
        self._given_up: dict[int, CommError] = {}
        binding = _binding()
        self.library = _load(binding)
        try:
            self._worker = binding.Worker(_settings())
        except OSError as error:
            raise CommError(
                f"UCX {self.library.version} ({self.library.path}) cannot start: {error}; expected a transport that "
                f"this machine has: mend {_chosen()}"
            ) from error
        header = f"{self.library.version} {os.getpid()} "
        self._address = _ADDRESS_PREFIX + header.encode() + self._worker.address
        # Half of the time of a small message would be ours otherwise.
        self.send = self._worker.send
        self.receive = self._worker.receive
        self.poll = self._worker.poll
        self.arm = self._worker.arm
        worker = self._worker
        self.quick = QuickCalls(worker.send, worker.receive, worker.send_receive, worker.send_receive_value)
        self.schedules = BindingSchedules(binding, worker)
        know_arrays(binding.know_arrays)

    @property
    def address(self) -> bytes:
        return self._address

    def connect(self, world: World, *, timeout_seconds: float) -> None:
        deadline = time.monotonic() + timeout_seconds
        addresses = tuple(_raw_address(world, rank, self.library) for rank in range(world.size))
        is_crowded = world.hosts.count(world.hosts[world.rank]) > (os.cpu_count() or 1)
        told = partial(_fail, world, self._given_up), partial(disagree, world)
        reasons = self._worker.connect(world.rank, addresses, *told, Operation, is_crowded)
        for rank, reason in enumerate(reasons):
            if reason:
                raise HandshakeError(
                    f"{world.describe(world.rank)} cannot reach {world.describe(rank)}: UCX says {reason!r}; expected "
                    f"a transport that both have: mend {_chosen()}, the same on all ranks"
                )
        self._greet(world, deadline, timeout_seconds)

    def send(self, peer: int, tag: int, buffers: Sequence[Buffer], operation: Operation) -> None:
        self._worker.send(peer, tag, buffers, operation)

    def receive(self, peer: int, tag: int, buffer: Buffer, operation: Operation) -> None:
        self._worker.receive(peer, tag, buffer, operation)

    def poll(self, spin_seconds: float) -> None:
        self._worker.poll(spin_seconds)

    def arm(self) -> bool:
        return self._worker.arm()

    def fileno(self) -> int:
        return self._worker.fileno()

    def transports(self, peer: int) -> list[str]:
        """Returns what UCX uses to reach a connected rank, such as `["sysv/memory", "cma/memory"]`.

        Empty where UCX is too old to tell.
        """
        return self._worker.transports(peer)

    def lose(self, peer: int, error: CommError) -> None:
        if peer not in self._given_up:
            self._given_up[peer] = error
            self._worker.lose(peer)

    def close(self, *, timeout_seconds: float) -> None:
        self._worker.close(timeout_seconds)

    def _greet(self, world: World, deadline: float, timeout_seconds: float) -> None:
        """Waits until every rank has said that it is there, and fits."""
        peers = [rank for rank in range(world.size) if rank != world.rank]
        hello = memoryview(_hello(world, world.rank))
        places = {rank: bytearray(_HELLO.size) for rank in peers}
        sent = {rank: Operation(rank) for rank in peers}
        heard = {rank: Operation(rank) for rank in peers}
        for rank in peers:
            self.receive(rank, _HELLO_TAG, memoryview(places[rank]), heard[rank])
            self.send(rank, _HELLO_TAG, (hello,), sent[rank])
        readable = select.poll()
        readable.register(self.fileno(), select.POLLIN)
        while True:
            self.poll(0)
            for operation in (*sent.values(), *heard.values()):
                if operation.error is not None:
                    raise operation.error
            missing = [rank for rank in peers if not (sent[rank].done and heard[rank].done)]
            seconds = deadline - time.monotonic()
            if not missing:
                break
            if seconds <= 0:
                raise WaitTimeout(_unreached(world, missing, timeout_seconds))
            if self.arm():
                readable.poll(max(1.0, seconds * 1000))
        for rank in peers:
            _check_hello(world, rank, bytes(places[rank]))


def _fail(
    world: World,
    given_up: Mapping[int, CommError],
    operation: Operation,
    peer: int,
    reason: str,
    is_lost: bool,
    num_bytes: int,
    capacity: int,
) -> None:
    """Ends an operation that UCX ended with an error."""
    name = world.describe(peer)
    if (error := given_up.get(peer)) is not None:
        operation.fail(error)
    elif num_bytes > capacity:
        operation.fail(too_long(world, peer, num_bytes, capacity))
    elif is_lost:
        text = f"{name} is lost: UCX says {reason!r}; see what that rank wrote before it ended"
        operation.fail(PeerLost(text, peer, world.hosts[peer]))
    else:
        me = world.describe(world.rank)
        operation.fail(
            CommError(
                f"UCX could not move a message between {me} and {name}: it says {reason!r}; set UCX_LOG_LEVEL=debug to "
                "see why"
            )
        )


def _raw_address(world: World, rank: int, library: UcxLibrary) -> bytes:
    """Returns an address as UCX knows it. UCX trusts it blindly, so it must be one of the same UCX."""
    address = world.addresses[rank]
    if not address.startswith(_ADDRESS_PREFIX):
        raise HandshakeError(
            f"{world.describe(rank)} has the address {address[:32]!r}; expected one of the transport 'ucx': let all "
            "ranks use the same transport"
        )
    version, _, raw = address.removeprefix(_ADDRESS_PREFIX).split(b" ", 2)
    if version.split(b".")[:2] != library.version.encode().split(b".")[:2]:
        raise HandshakeError(
            f"{world.describe(rank)} has UCX {version.decode()}, {world.describe(world.rank)} UCX {library.version} "
            f"({library.path}); expected the same on all ranks: install the same, or let {_VARIABLE} name it"
        )
    return raw


def _unreached(world: World, ranks: Sequence[int], seconds: float) -> str:
    listed = list[str]()
    for rank in ranks:
        version, process, _ = world.addresses[rank].removeprefix(_ADDRESS_PREFIX).split(b" ", 2)
        listed.append(f"{world.describe(rank)} at UCX {version.decode()} of process {process.decode()}")
    return (
        f"{', '.join(listed)} did not connect to {world.describe(world.rank)} within {seconds:g} s; expected every "
        "rank to connect at about the same time: is it running, and do its UCX_NET_DEVICES lead here?"
    )


def _hello(world: World, rank: int) -> bytes:
    proof = hmac.digest(world.secret, b"ucx %d %d" % (world.size, rank), "sha256")
    return _HELLO.pack(_MAGIC, _VERSION, world.size, rank, proof)


def _check_hello(world: World, rank: int, hello: bytes) -> None:
    magic, version, size, claimed, _ = _HELLO.unpack(hello)
    if (magic, version) != (_MAGIC, _VERSION):
        raise HandshakeError(
            f"{world.describe(rank)} speaks version {version} of braidax's messages over UCX, this process version "
            f"{_VERSION}; install the same version of braidax on all machines"
        )
    if (size, claimed) != (world.size, rank):
        raise other_world(world, rank, size)
    if not hmac.compare_digest(hello, _hello(world, rank)):
        raise other_secret(world, rank)


def _binding() -> ModuleType:
    """Imports the binding; the message of its absence depends on why."""
    if sys.platform != "linux":
        raise MissingExtra(f"{_PURPOSE} runs on Linux only, this is {platform.system()}; use the transport 'tcp'")
    try:
        return importlib.import_module("braidax.comm.transports.ucx_binding")
    except ImportError as error:
        raise MissingExtra(
            f"{_PURPOSE} needs its binding in C, which is compiled while braidax is installed and cannot be imported "
            f"({error}); install a wheel of braidax for Linux, or a C compiler and the headers of Python "
            f"{platform.python_version()} (on Debian and Ubuntu: apt install gcc python3-dev), and then again what "
            "braidax was installed from, by: BRAIDAX_BINDINGS=required pip install --force-reinstall --no-deps PATH"
        ) from error


def _load(binding: ModuleType) -> UcxLibrary:
    """Loads UCX: once a process, whatever is asked for later."""
    named = os.environ.get(_VARIABLE)
    has_infiniband = _INFINIBAND.exists()
    with _defaults(_WHILE_LOADING if has_infiniband else _WHILE_LOADING | _WITHOUT_INFINIBAND):
        if named is not None:
            try:
                return _loaded(binding, named)
            except OSError as error:
                raise ArgumentError(
                    f"{_VARIABLE}={named!r} cannot be loaded: {error}; expected the path of {_SYSTEM} of UCX 1.11 or "
                    "newer: mend it, or leave it unset"
                ) from error
        if has_infiniband:
            with suppress(OSError):  # there is the wheel still
                return _loaded(binding, _SYSTEM)
        try:
            wheel = import_extra("libucx", "ucx", purpose=_PURPOSE)
            return _loaded(binding, str(Path(wheel.__path__[0], "lib", _SYSTEM)))
        except (MissingExtra, OSError) as error:
            with suppress(OSError):
                return _loaded(binding, _SYSTEM)
            if isinstance(error, MissingExtra):
                raise
            raise MissingExtra(
                f"{_PURPOSE} cannot load the UCX of the module 'libucx': {error}; install it anew with: "
                "pip install --force-reinstall --no-deps libucx-cu12"
            ) from error


def _chosen() -> str:
    return " and ".join(f"{name}={os.environ.get(name, 'all')!r}" for name in ("UCX_TLS", "UCX_NET_DEVICES"))


def _settings() -> tuple[tuple[str, str], ...]:
    return tuple((name, value) for name, value in _SETTINGS.items() if f"UCX_{name}" not in os.environ)


def _loaded(binding: ModuleType, path: str) -> UcxLibrary:
    found, *version = binding.load(path)
    if tuple(version) < _TAKES_SETTINGS:
        for name, value in _SETTINGS.items():
            os.environ.setdefault(f"UCX_{name}", value)
    return UcxLibrary(found, ".".join(map(str, version)))


@contextmanager
def _defaults(variables: dict[str, str]) -> Generator[None]:
    """Sets variables of the environment that the user has not set, as long as UCX reads them."""
    ours = variables.keys() - os.environ.keys()
    os.environ.update({name: variables[name] for name in ours})
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)  # another thread may load it, too
