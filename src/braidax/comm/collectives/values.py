"""Algorithms on values of any kind and size: point to point, broadcast, gather, all to all."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from braidax.comm.collectives.opening import Opening, opened, place_of
from braidax.comm.messages import FIRST_BYTES, Parcel, Unpacking, Value, pack
from braidax.comm.port import Port, Steps, together
from braidax.comm.transports.transport import Operation

_PIPE_BYTES = 1 << 18  # from here on a broadcast is a pipeline, not a tree
_PIECE_BYTES = 1 << 19  # of a pipeline
_LENGTH_BYTES = 4  # of a block that travels with others


def barrier(port: Port) -> Steps[None]:
    """Returns when all members have come: dissemination, log2(size) rounds (Hensgen, Finkel and Manber 1988)."""
    if port.size == 1:
        return
    opening = Opening(port)
    yield from opening.heard()
    distance = 2
    while distance < port.size:
        place = place_of(port)
        received = port.receive((port.rank - distance) % port.size, place.data)
        yield [port.send((port.rank + distance) % port.size, memoryview(port.brings)), received]
        port.check_brings(received, place)
        distance *= 2
    yield [opening.sent]


def send(port: Port, peer: int, value: Value) -> Steps[None]:
    """Sends a value to a member."""
    yield _begin_send(port, peer, _packed(port, value))


def receive(port: Port, peer: int) -> Steps[Value]:
    """Receives a value from a member."""
    arriving = yield from _first(port, peer)
    return (yield from _rest(port, peer, arriving))


def broadcast(port: Port, value: Value, root: int) -> Steps[Value]:
    """Returns the root's value on every member, the root's own object there.

    The first message, and all of a small value, goes down a binomial tree. A large one goes through all members as a
    pipeline of pieces, so that every link carries it once; neighbors in rank are mostly on one host.
    """
    return opened(port, _broadcast(port, value, root))


def _broadcast(port: Port, value: Value, root: int) -> Steps[Value]:
    place = (port.rank - root) % port.size
    arriving: Unpacking | None = None
    if place == 0:
        parcel = pack(value)
        first = memoryview(b"".join((port.brings, *parcel.first)))
        rest = np.frombuffer(b"".join(parcel.rest), np.uint8) if len(parcel.rest) > 1 else None
        if rest is None and parcel.rest:
            rest = np.frombuffer(parcel.rest[0], np.uint8)
    else:
        arriving = yield from _first(port, _parent(place, root, port.size))
        first, rest = memoryview(port.brings + arriving.first.data), arriving.rest
    yield [port.send(child, first) for child in _children(place, root, port.size)]
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
    return opened(port, _gather(port, value, root))


def _gather(port: Port, value: Value, root: int) -> Steps[list[Value]]:
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
    parcel = pack(value)
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
    if port.size == 1:
        return list(values)
    parcels = {peer: _packed(port, value) for peer, value in enumerate(values) if peer != port.rank}
    after, before = (port.rank + 1) % port.size, (port.rank - 1) % port.size
    opening = Opening(port, parcels[after].first)
    # What is sent is waited for last: it may end only when the others, who also send, receive it.
    sends = [opening.sent]
    if parcels[after].rest:
        sends.append(port.send_body(after, parcels[after].number, parcels[after].rest))
    for distance in range(2, port.size):
        peer = (port.rank + distance) % port.size
        sends += _begin_send(port, peer, parcels[peer])
    sources = [(port.rank - distance) % port.size for distance in range(2, port.size)]
    others = [receive(port, source) for source in sources]
    arriving = Unpacking((yield from opening.heard()))
    received = yield from together([_rest(port, before, arriving), *others])
    yield sends
    results = list(values)
    for source, value in zip([before, *sources], received, strict=True):
        results[source] = value
    return results


def _packed(port: Port, value: Value) -> Parcel:
    return pack(value, port.progress.number())


def _begin_send(port: Port, peer: int, parcel: Parcel) -> list[Operation]:
    head, *parts = parcel.first
    operations = [port.send(peer, memoryview(port.brings + head), *parts)]
    return [*operations, port.send_body(peer, parcel.number, parcel.rest)] if parcel.rest else operations


def _first(port: Port, peer: int) -> Steps[Unpacking]:
    """Receives the first message of a value, and in a collective what its sender brings to that."""
    place = place_of(port, FIRST_BYTES)
    received = port.receive(peer, place.data)
    yield [received]
    return Unpacking(port.check_brings(received, place) if port.brings else place[: received.num_bytes])


def _rest(port: Port, peer: int, arriving: Unpacking) -> Steps[Value]:
    """Receives the second message of a value, if there is one."""
    if arriving.rest is not None:
        operation = port.receive_body(peer, arriving.number, arriving.rest.data)
        yield [operation]
        port.check_whole(operation, arriving.rest)
    return arriving.value()


def _bruck(port: Port, block: bytes) -> Steps[list[bytes]]:
    """Gathers one block of at most `FIRST_BYTES` from every member on all of them."""
    blocks = [block]
    if port.size == 1:
        return blocks
    opening = Opening(port, [memoryview(_listed(blocks))])
    blocks += _unlisted((yield from opening.heard()))
    distance = 2
    while distance < port.size:
        count = min(distance, port.size - distance)
        place = place_of(port, count * (FIRST_BYTES + _LENGTH_BYTES))
        incoming = port.receive((port.rank - distance) % port.size, place.data)
        data = memoryview(port.brings + _listed(blocks[:count]))
        yield [incoming, port.send((port.rank + distance) % port.size, data)]
        blocks += _unlisted(port.check_brings(incoming, place))
        distance *= 2
    yield [opening.sent]
    return [blocks[(port.rank - rank) % port.size] for rank in range(port.size)]


def _listed(blocks: Sequence[bytes]) -> bytes:
    return b"".join(len(item).to_bytes(_LENGTH_BYTES, "little") + item for item in blocks)


def _unlisted(data: NDArray[np.uint8]) -> list[bytes]:
    blocks: list[bytes] = []
    position = 0
    while position < data.nbytes:
        begin = position + _LENGTH_BYTES
        position = begin + int.from_bytes(data.data[position:begin], "little")
        blocks.append(data[begin:position].tobytes())
    return blocks


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
