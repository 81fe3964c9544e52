"""Algorithms on values of any kind and size: point to point, broadcast, gather, all to all."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from braidax.comm.messages import FIRST_BYTES, Unpacking, Value, empty, pack, parts_of
from braidax.comm.port import Port, Steps, together
from braidax.comm.transports.transport import Operation

_PIPE_BYTES = 1 << 18  # from here on a broadcast is a pipeline, not a tree
_PIECE_BYTES = 1 << 19  # of a pipeline


def barrier(port: Port) -> Steps[None]:
    """Returns when all members have come: dissemination, log2(size) rounds (Hensgen, Finkel and Manber 1988)."""
    nothing = memoryview(bytearray())
    distance = 1
    while distance < port.size:
        yield [
            port.send((port.rank + distance) % port.size, nothing),
            port.receive((port.rank - distance) % port.size, nothing),
        ]
        distance *= 2


def send(port: Port, peer: int, value: Value) -> Steps[None]:
    """Sends a value to a member."""
    yield _begin_send(port, peer, value)


def receive(port: Port, peer: int) -> Steps[Value]:
    """Receives a value from a member."""
    first = empty(FIRST_BYTES)
    yield [port.receive(peer, first.data)]
    arriving = Unpacking(first)
    if arriving.rest is not None:
        operation = port.receive(peer, arriving.rest.data)
        yield [operation]
        port.check_whole(operation, arriving.rest)
    return arriving.value()


def broadcast(port: Port, value: Value, root: int) -> Steps[Value]:
    """Returns the root's value on every member, the root's own object there.

    The first message, and all of a small value, goes down a binomial tree. A large one goes through all members as a
    pipeline of pieces, so that every link carries it once; neighbors in rank are mostly on one host.
    """
    place = (port.rank - root) % port.size
    arriving: Unpacking | None = None
    if place == 0:
        parcel = pack(*parts_of(value))
        first = np.frombuffer(b"".join(parcel.first), np.uint8)
        rest = np.frombuffer(b"".join(parcel.rest), np.uint8) if len(parcel.rest) > 1 else None
        if rest is None and parcel.rest:
            rest = np.frombuffer(parcel.rest[0], np.uint8)
    else:
        first = empty(FIRST_BYTES)
        yield [port.receive(_parent(place, root, port.size), first.data)]
        arriving = Unpacking(first)
        first, rest = first[: arriving.num_bytes], arriving.rest
    yield [port.send(child, first.data) for child in _children(place, root, port.size)]
    if rest is not None and rest.nbytes >= _PIPE_BYTES and port.size > 2:
        yield from _pipeline(port, rest, root)
    elif rest is not None:
        if place:
            operation = port.receive(_parent(place, root, port.size), rest.data)
            yield [operation]
            port.check_whole(operation, rest)
        yield [port.send(child, rest.data) for child in _children(place, root, port.size)]
    return value if arriving is None else arriving.value()


def gather(port: Port, value: Value, root: int) -> Steps[list[Value]]:
    """Returns the values of all members in rank order on the root, an empty list elsewhere."""
    if port.rank != root:
        yield from send(port, root, value)
        return []
    others = [peer for peer in range(port.size) if peer != root]
    values = yield from together([receive(port, peer) for peer in others])
    values.insert(root, value)
    return values


def all_gather(port: Port, value: Value) -> Steps[list[Value]]:
    """Returns the values of all members in rank order on every member.

    First messages travel by Bruck's algorithm (1997) in log2(size) rounds; what does not fit in them by a ring.
    """
    parcel = pack(*parts_of(value))
    blocks = yield from _bruck(port, b"".join(parcel.first))
    arriving = [Unpacking(np.frombuffer(block, np.uint8)) for block in blocks]
    after, before = (port.rank + 1) % port.size, (port.rank - 1) % port.size
    for step in range(port.size - 1):
        outgoing, incoming = (port.rank - step) % port.size, (port.rank - step - 1) % port.size
        operations: list[Operation] = []
        place = arriving[incoming].rest
        if place is not None:
            operations.append(port.receive(before, place.data))
        if (rest := arriving[outgoing].rest) is not None:
            operations.append(port.send(after, *parcel.rest) if step == 0 else port.send(after, rest.data))
        yield operations
        if place is not None:
            port.check_whole(operations[0], place)
    return [value if rank == port.rank else arriving[rank].value() for rank in range(port.size)]


def all_to_all(port: Port, values: Sequence[Value]) -> Steps[list[Value]]:
    """Returns what every member has for this one, by rank: each pair exchanges directly."""
    distances = range(1, port.size)
    peers = [(port.rank + distance) % port.size for distance in distances]
    sources = [(port.rank - distance) % port.size for distance in distances]
    # What is sent is waited for last: it may end only when the others, who also send, receive it.
    sends = [operation for peer in peers for operation in _begin_send(port, peer, values[peer])]
    received = yield from together([receive(port, source) for source in sources])
    yield sends
    results: list[Any] = [None] * port.size
    for source, value in zip(sources, received, strict=True):
        results[source] = value
    results[port.rank] = values[port.rank]
    return results


def _begin_send(port: Port, peer: int, value: Value) -> list[Operation]:
    parcel = pack(*parts_of(value))
    operations = [port.send(peer, *parcel.first)]
    return [*operations, port.send(peer, *parcel.rest)] if parcel.rest else operations


def _bruck(port: Port, block: bytes) -> Steps[list[bytes]]:
    """Gathers one block of at most `FIRST_BYTES` from every member on all of them."""
    blocks = [block]
    distance = 1
    while distance < port.size:
        count = min(distance, port.size - distance)
        data = b"".join(len(item).to_bytes(4, "little") + item for item in blocks[:count])
        place = empty(count * (FIRST_BYTES + 4))
        incoming = port.receive((port.rank + distance) % port.size, place.data)
        yield [incoming, port.send((port.rank - distance) % port.size, memoryview(data))]
        position = 0
        while position < incoming.num_bytes:
            end = position + 4 + int.from_bytes(place.data[position : position + 4], "little")
            blocks.append(place[position + 4 : end].tobytes())
            position = end
        distance *= 2
    return [blocks[(rank - port.rank) % port.size] for rank in range(port.size)]


def _pipeline(port: Port, data: NDArray[np.uint8], root: int) -> Steps[None]:
    place = (port.rank - root) % port.size
    after, before = (port.rank + 1) % port.size, (port.rank - 1) % port.size
    pieces = [data[start : start + _PIECE_BYTES] for start in range(0, data.nbytes, _PIECE_BYTES)]
    receives = [port.receive(before, piece.data) for piece in pieces] if place else []
    sends: list[Operation] = []
    for index, piece in enumerate(pieces):
        if place:
            yield [receives[index]]
            port.check_whole(receives[index], piece)
        if place < port.size - 1:
            sends.append(port.send(after, piece.data))
    yield sends


def _parent(place: int, root: int, size: int) -> int:
    """Returns the rank above a place in the binomial tree: the place without its highest bit."""
    return (place - (1 << (place.bit_length() - 1)) + root) % size


def _children(place: int, root: int, size: int) -> list[int]:
    bit = 1 << place.bit_length()
    children: list[int] = []
    while place + bit < size:
        children.append((place + bit + root) % size)
        bit *= 2
    return children
