"""Messages over MPI, for programs that an MPI launcher starts."""

import hmac
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

from braidax.comm.transports.bell import Bell
from braidax.comm.transports.matching import Matching
from braidax.comm.transports.transport import Buffer, Operation, Transport, too_long
from braidax.comm.transports.unreached import other_secret, other_world, unreached
from braidax.connections.world import World
from braidax.errors import CommError, HandshakeError, import_extra

# On the wire: an envelope for each message, in order, with the message inside when it is short. A longer one follows in
# pieces, whose MPI tag the envelope names: MPI keeps them at the sender until this rank has asked for them.
_HEADER = struct.Struct("<QQII")  # tag, length, MPI tag of the pieces, number of pieces
_LENGTH_BYTES = 8  # of a piece, behind the header
_ENVELOPE_TAG = 0
_INSIDE_BYTES = 3 << 10  # such an envelope is small enough for every MPI to send it without asking
_JOINED_BYTES = 1 << 16  # smaller buffers are copied together into one piece
_PIECE_BYTES = 1 << 23  # far below MPI's limit of 2 GiB, so that the end of each shows that something moves

_HELLO = struct.Struct("<7sBII32s")  # magic, version, size, rank, proof
_HELLO_TAG = 25_202  # on the user's communicator
_MAGIC = b"braidax"
_VERSION = 1

_SHORTEST_NAP_SECONDS = 0.0001
_LONGEST_NAP_SECONDS = 0.01
_NAP_FRACTION = 1 / 8  # of the time in which nothing moved


@final
class MpiTransport(Transport):
    """Moves messages over MPI, whose launcher has started the ranks, such as `mpiexec -n 4 python SCRIPT`.

    MPI gives nothing to sleep on: while nothing moves, `nap_seconds` grows with the time, up to 10 ms. When a rank
    dies, MPI's launcher ends all. What a rank was sending when it closed without time is kept, and must not be changed:
    a peer may still receive it.

    **Arguments:** `comm`: an `mpi4py.MPI.Intracomm` of exactly the ranks of the world, by default all that the launcher
    started. It is duplicated: other messages on it are not touched.

    **Raises:** `MissingExtra` without mpi4py; `HandshakeError` when MPI is not initialized, or not for several threads.
    """

    name = "mpi"

    def __init__(self, comm: Any = None) -> None:
        self._mpi: Any = import_extra("mpi4py.MPI", "mpi", purpose='the transport "mpi"')
        _check_threads(self._mpi)
        self._whole: Any = self._mpi.COMM_WORLD if comm is None else comm
        self._comm: Any = None  # a duplicate, once connected
        self._top_tag: int = self._mpi.COMM_WORLD.Get_attr(self._mpi.TAG_UB)
        self._world = World(0, (), (), b"")
        self._mpi_ranks: list[int] = []
        self._ranks: dict[int, int] = {}
        self._matching: Matching[_Posted, _Message] = Matching()
        self._coming: list[tuple[int, bytearray, Any]] = []  # envelopes under way: rank, place, request
        self._requests: list[Any] = []
        self._transfers: list[_Transfer] = []  # what each request is a part of
        self._num_ended = 0
        self._num_bodies = 0
        self._broken: CommError | None = None
        self._moved_at = time.monotonic()
        self._closed = False
        self._bell = Bell()  # never rung: there must be a descriptor

    @property
    def address(self) -> bytes:
        return b"%d" % self._whole.Get_rank()

    def connect(self, world: World, *, timeout_seconds: float) -> None:
        deadline = time.monotonic() + timeout_seconds
        self._mpi_ranks = _mpi_ranks(world, self._whole)
        self._ranks = {mpi_rank: rank for rank, mpi_rank in enumerate(self._mpi_ranks)}
        self._world = world
        self._greet(deadline, timeout_seconds)
        comm, request = self._whole.Idup()
        while not request.Test():
            if time.monotonic() >= deadline:
                self._keep_for_ever((comm, request))
                raise unreached(world, [rank for rank in range(world.size) if rank != world.rank], timeout_seconds)
            self._bell.wait(_SHORTEST_NAP_SECONDS)
        comm.Set_errhandler(self._mpi.ERRORS_RETURN)
        self._comm = comm
        self._moved_at = time.monotonic()

    def send(self, peer: int, tag: int, buffers: Sequence[Buffer], operation: Operation) -> None:
        if self._broken is not None:
            operation.fail(self._broken)
            return
        num_bytes = sum(map(len, buffers))
        target = self._mpi_ranks[peer]
        if num_bytes <= _INSIDE_BYTES:
            envelope = b"".join((_HEADER.pack(tag, num_bytes, 0, 0), *buffers))
            self._begin(_Transfer(None), "Isend", [envelope], target, _ENVELOPE_TAG)
            if self._broken is None:
                operation.finish()
            else:
                operation.fail(self._broken)
            return
        pieces = list(_pieces(buffers))
        body_tag = 1 + self._num_bodies % self._top_tag
        self._num_bodies += 1
        lengths = struct.pack(f"<{len(pieces)}Q", *map(len, pieces))
        envelope = _HEADER.pack(tag, num_bytes, body_tag, len(pieces)) + lengths
        self._begin(_Transfer(None), "Isend", [envelope], target, _ENVELOPE_TAG)
        self._begin(_Transfer(operation), "Isend", pieces, target, body_tag)

    def receive(self, peer: int, tag: int, buffer: Buffer, operation: Operation) -> None:
        if self._broken is not None:
            operation.fail(self._broken)
            return
        self._moved_at = time.monotonic()
        posted = _Posted(buffer, operation)
        if (message := self._matching.post(peer, tag, posted)) is not None:
            self._take(message, posted)

    def poll(self, spin_seconds: float) -> None:
        before, deadline = self._num_ended, time.monotonic() + spin_seconds
        while True:
            self._move()
            if self._num_ended > before or time.monotonic() >= deadline:
                return

    def arm(self) -> bool:
        idle_seconds = time.monotonic() - self._moved_at
        self.nap_seconds = min(max(idle_seconds * _NAP_FRACTION, _SHORTEST_NAP_SECONDS), _LONGEST_NAP_SECONDS)
        return True

    def fileno(self) -> int:
        return self._bell.fileno()

    def close(self, *, timeout_seconds: float) -> None:
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + timeout_seconds
        while any(transfer.sends for transfer in self._transfers) and time.monotonic() < deadline:
            self._move()
            self._bell.wait(_SHORTEST_NAP_SECONDS)
        if self._comm is not None:
            self._cancel()
        self._bell.close()

    def _greet(self, deadline: float, timeout_seconds: float) -> None:
        """Waits until every rank has said that it is there, and fits."""
        world, comm, byte = self._world, self._whole, self._mpi.BYTE
        hello = _hello(world, world.rank)
        peers = [rank for rank in range(world.size) if rank != world.rank]
        places = {rank: bytearray(_HELLO.size) for rank in peers}
        missing: dict[int, list[Any]] = {}
        for rank, place in places.items():
            target = self._mpi_ranks[rank]
            missing[rank] = [
                comm.Irecv([place, byte], target, _HELLO_TAG),
                comm.Isend([hello, byte], target, _HELLO_TAG),
            ]
        testall = self._mpi.Request.Testall
        while missing := {rank: requests for rank, requests in missing.items() if not testall(requests)}:
            if time.monotonic() >= deadline:
                for requests in missing.values():
                    requests[0].Cancel()
                self._keep_for_ever((hello, places, missing))
                raise unreached(world, sorted(missing), timeout_seconds)
            self._bell.wait(_SHORTEST_NAP_SECONDS)
        for rank, place in places.items():
            _check_hello(world, rank, bytes(place))

    def _begin(self, transfer: "_Transfer", way: str, buffers: Sequence[Any], target: int, tag: int) -> None:
        """Starts to send, or to receive, a transfer's buffers."""
        if self._broken is not None:
            if transfer.operation is not None:
                transfer.operation.fail(self._broken)
            return
        self._moved_at = time.monotonic()
        transfer.sends = way == "Isend"
        transfer.num_missing = len(buffers)
        start = getattr(self._comm, way)
        try:
            for buffer in buffers:
                self._requests.append(start([buffer, self._mpi.BYTE], target, tag))
                self._transfers.append(transfer)
        except self._mpi.Exception as error:
            self._transfers.append(transfer)
            self._break(error)

    def _take(self, message: "_Message", posted: "_Posted") -> None:
        """Moves a message, or begins to, into the place that was posted for it."""
        operation, place = posted.operation, posted.buffer
        if message.num_bytes > len(place):
            operation.fail(too_long(self._world, message.peer, message.num_bytes, len(place)))
            self._num_ended += 1
            operation = None
            place = memoryview(bytearray(message.num_bytes))  # what is on its way must go somewhere
        if not message.lengths:
            place[: message.num_bytes] = message.inside
            if operation is not None:
                operation.finish(message.num_bytes)
                self._num_ended += 1
            return
        places = list[Buffer]()
        begin = 0
        for length in message.lengths:
            places.append(place[begin : begin + length])
            begin += length
        transfer = _Transfer(operation, message.num_bytes)
        self._begin(transfer, "Irecv", places, self._mpi_ranks[message.peer], message.body_tag)

    def _move(self) -> None:
        if self._broken is not None or self._comm is None:
            return
        try:
            self._hear()
            self._read()
            ended = self._mpi.Request.Testsome(self._requests) if self._requests else None
        except self._mpi.Exception as error:
            self._break(error)
            return
        if ended:
            self._moved_at = time.monotonic()
            for place in sorted(ended, reverse=True):
                transfer = self._transfers.pop(place)
                del self._requests[place]
                self._end(transfer)

    def _end(self, transfer: "_Transfer") -> None:
        transfer.num_missing -= 1
        if not transfer.num_missing and transfer.operation is not None:
            transfer.operation.finish(transfer.num_bytes)
            self._num_ended += 1

    def _hear(self) -> None:
        """Begins to receive the envelopes that have come."""
        status = self._mpi.Status()
        while (message := self._comm.Improbe(self._mpi.ANY_SOURCE, _ENVELOPE_TAG, status)) is not None:
            place = bytearray(status.Get_count(self._mpi.BYTE))
            request = message.Irecv([place, self._mpi.BYTE])
            self._coming.append((self._ranks[status.Get_source()], place, request))

    def _read(self) -> None:
        """Reads the envelopes that are here, those of each peer in order."""
        coming, self._coming = self._coming, []
        late = set[int]()
        for peer, place, request in coming:
            if peer in late or not request.Test():
                late.add(peer)
                self._coming.append((peer, place, request))
                continue
            self._moved_at = time.monotonic()
            tag, num_bytes, body_tag, num_pieces = _HEADER.unpack_from(place)
            rest = memoryview(place)[_HEADER.size :]
            lengths = struct.unpack_from(f"<{num_pieces}Q", rest)
            message = _Message(peer, num_bytes, rest, body_tag, lengths)
            if (posted := self._matching.arrive(peer, tag, message)) is not None:
                self._take(message, posted)

    def _break(self, error: Exception) -> None:
        """Fails all operations: what MPI guarantees after an error is nothing."""
        me = self._world.describe(self._world.rank)
        self._broken = CommError(f"MPI failed at {me}: {error}; see what the launcher wrote about the other ranks")
        self._keep_for_ever((self._requests, self._transfers, self._coming))
        waiting = {id(transfer): transfer.operation for transfer in self._transfers}
        operations = [operation for operation in waiting.values() if operation is not None]
        for peer in range(self._world.size):
            operations += [posted.operation for posted in self._matching.give_up(peer)]
        self._requests, self._transfers, self._coming = [], [], []
        for operation in operations:
            operation.fail(self._broken)
        self._num_ended += len(operations)

    def _cancel(self) -> None:
        """Gives up the duplicate, unless MPI may still write into buffers or read from them."""
        self._matching.clear()
        for transfer, request in zip(self._transfers, self._requests, strict=True):
            if not transfer.sends:
                request.Cancel()
        coming = [request for _, _, request in self._coming]
        if self._broken is None and self._mpi.Request.Testall([*self._requests, *coming]):
            self._comm.Free()
        else:
            self._keep_for_ever((self._requests, self._transfers, self._coming))
        self._comm = None
        self._requests, self._transfers, self._coming = [], [], []

    def _keep_for_ever(self, kept: object) -> None:
        """Ties buffers that MPI may still use to the life of the user's communicator."""
        self._whole.Set_attr(self._mpi.Comm.Create_keyval(), kept)


@dataclass(slots=True)
class _Posted:
    """A receive that has no message yet."""

    buffer: Buffer
    operation: Operation


@dataclass(frozen=True, slots=True)
class _Message:
    """A message whose envelope has come: itself, or the lengths of the pieces that are to be asked for."""

    peer: int
    num_bytes: int
    inside: Buffer
    body_tag: int
    lengths: Sequence[int]


@dataclass(slots=True, eq=False)
class _Transfer:
    """Requests to MPI that make up one operation, if anybody waits for it."""

    operation: Operation | None
    num_bytes: int = 0
    num_missing: int = 0
    sends: bool = False


def _pieces(buffers: Sequence[Buffer]) -> Iterator[Any]:
    """Yields what to send in turn: parts of buffers that are not too long, and small buffers joined."""
    small = bytearray()
    for buffer in buffers:
        if len(buffer) < _JOINED_BYTES:
            small += buffer
        if small and (len(buffer) >= _JOINED_BYTES or len(small) >= _JOINED_BYTES):
            yield small
            small = bytearray()
        if len(buffer) >= _JOINED_BYTES:
            for begin in range(0, len(buffer), _PIECE_BYTES):
                yield buffer[begin : begin + _PIECE_BYTES]
    if small:
        yield small


def _check_threads(mpi: Any) -> None:
    if not mpi.Is_initialized() or mpi.Is_finalized():
        raise HandshakeError(
            "MPI is not initialized in this process, or is over; let mpi4py do it: leave mpi4py.rc.initialize and "
            "mpi4py.rc.finalize alone, and make the transport before the program ends"
        )
    if mpi.Query_thread() < mpi.THREAD_SERIALIZED:
        raise HandshakeError(
            f"MPI was initialized with thread level {mpi.Query_thread()}; expected at least {mpi.THREAD_SERIALIZED} "
            "(MPI_THREAD_SERIALIZED), since several threads take turns; set mpi4py.rc.thread_level to 'serialized' or "
            "'multiple' before mpi4py.MPI is imported, and build MPI with threads"
        )


def _mpi_ranks(world: World, comm: Any) -> list[int]:
    """Returns the MPI rank of each rank."""
    if world.size != comm.Get_size():
        raise HandshakeError(
            f"the world has {world.size} ranks, the MPI communicator {comm.Get_size()}; expected the same: start "
            f"mpiexec -n {world.size}, or pass a communicator of those ranks alone: comm="
        )
    texts = [address.decode("ascii", "replace") for address in world.addresses]
    ranks = [int(text) if text.isdecimal() else -1 for text in texts]
    if sorted(ranks) != list(range(world.size)):
        raise HandshakeError(
            f"the ranks of the world have the MPI ranks {texts}; expected each of 0 to {world.size - 1} once: does "
            "every rank use the transport 'mpi', and did one launcher start them all?"
        )
    if ranks[world.rank] != comm.Get_rank():
        raise HandshakeError(
            f"{world.describe(world.rank)} has the MPI rank {ranks[world.rank]} in this world, {comm.Get_rank()} in "
            "MPI; expected the same: give each rank its own transport"
        )
    return ranks


def _hello(world: World, rank: int) -> bytes:
    proof = hmac.digest(world.secret, b"mpi %d %d" % (world.size, rank), "sha256")
    return _HELLO.pack(_MAGIC, _VERSION, world.size, rank, proof)


def _check_hello(world: World, rank: int, hello: bytes) -> None:
    magic, version, size, claimed, _ = _HELLO.unpack(hello)
    if (magic, version) != (_MAGIC, _VERSION):
        raise HandshakeError(
            f"{world.describe(rank)} speaks version {version} of braidax's messages over MPI, this process version "
            f"{_VERSION}; install the same version of braidax on all machines"
        )
    if (size, claimed) != (world.size, rank):
        raise other_world(world, rank, size)
    if not hmac.compare_digest(hello, _hello(world, rank)):
        raise other_secret(world, rank)
