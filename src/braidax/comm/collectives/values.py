"""Algorithms on values of any kind and size: point to point, broadcast, gather, all to all."""

from collections.abc import Sequence
from typing import final

import numpy as np
from numpy.typing import NDArray

from braidax.comm.collectives.opening import Opening, place_of
from braidax.comm.group_messages import GroupMessages, Steps, interleaved
from braidax.comm.messages import FIRST_BYTES, Parcel, Unpacking, Value, pack
from braidax.comm.transports.transport import Operation

_PIPE_BYTES = 1 << 18  # from here on a broadcast is a pipeline, not a tree
_PIECE_BYTES = 1 << 19  # of a pipeline
_LENGTH_BYTES = 4  # of a block that travels with others


def send(messages: GroupMessages, peer: int, value: Value) -> Steps[None]:
    """Sends a value to a member."""
    yield _begin_send(messages, peer, _packed(messages, value))


def receive(messages: GroupMessages, peer: int) -> Steps[Value]:
    """Receives a value from a member."""
    return (yield from _First(messages, peer).whole())


def receive_rest(messages: GroupMessages, peer: int, first: NDArray[np.uint8]) -> Steps[Value]:
    """Receives what is left of a value whose first message is here."""
    return (yield from _rest(messages, peer, Unpacking(first)))


def broadcast(messages: GroupMessages, value: Value, root: int) -> Steps[Value]:
    """Returns the root's value on every member, the root's own object there.

    The first message, and all of a small value, goes down a binomial tree. A large one goes through all members as a
    pipeline of pieces, so that every link carries it once; neighbors in rank are mostly on one host.
    """
    place = (messages.rank - root) % messages.size
    if place == 0:
        yield from _broadcast_own(messages, value)
        return value
    opening = Opening(messages)
    if place == 1:  # its parent is the member before it
        arriving = Unpacking((yield from opening.heard()))
    else:
        parent = _First(messages, _parent(place, root, messages.size))
        yield from opening.heard()
        arriving = yield from parent.arrived()
    first = memoryview(messages.brings + arriving.first.data)
    yield [opening.sent, *(messages.send(child, first) for child in _children(place, root, messages.size))]
    if arriving.rest is not None:
        yield from _pass_on(messages, arriving.rest, root)
    return arriving.value()


def _broadcast_own(messages: GroupMessages, value: Value) -> Steps[None]:
    parcel = pack(value)
    if messages.size == 1:
        return
    opening = Opening(messages, parcel.first)
    first = memoryview(b"".join((messages.brings, *parcel.first)))
    _, *others = _children(0, messages.rank, messages.size)
    yield [messages.send(child, first) for child in others]
    if parcel.rest:
        whole = parcel.rest[0] if len(parcel.rest) == 1 else b"".join(parcel.rest)
        yield from _pass_on(messages, np.frombuffer(whole, np.uint8), messages.rank)
    yield from opening.later()


def _pass_on(messages: GroupMessages, rest: NDArray[np.uint8], root: int) -> Steps[None]:
    """Receives a value's second message, but on the root, and sends it on."""
    if rest.nbytes >= _PIPE_BYTES and messages.size > 2:
        yield from _pipeline(messages, rest, root)
        return
    place = (messages.rank - root) % messages.size
    if place:
        operation = messages.receive(_parent(place, root, messages.size), rest.data)
        yield [operation]
        messages.check_whole(operation, rest)
    yield [messages.send(child, rest.data) for child in _children(place, root, messages.size)]


def gather(messages: GroupMessages, value: Value, root: int) -> Steps[list[Value]]:
    """Returns the values of all members in rank order on the root, an empty list elsewhere."""
    if messages.rank != root:
        yield from _gather_own(messages, value, root)
        return []
    if messages.size == 1:
        return [value]
    opening = Opening(messages)
    before = (root - 1) % messages.size
    sources = [peer for peer in range(messages.size) if peer not in (root, before)]
    others = [_First(messages, source) for source in sources]
    arriving = Unpacking((yield from opening.heard()))
    received = yield from interleaved([_rest(messages, before, arriving), *(first.whole() for first in others)])
    results: list[Value] = [value] * messages.size
    for source, result in zip([before, *sources], received, strict=True):
        results[source] = result
    yield [opening.sent]
    return results


def _gather_own(messages: GroupMessages, value: Value, root: int) -> Steps[None]:
    parcel = _packed(messages, value)
    if (messages.rank + 1) % messages.size == root:
        opening = Opening(messages, parcel.first)
        yield [messages.send_body(root, parcel.number, parcel.rest)] if parcel.rest else []
    else:
        opening = Opening(messages)
        yield _begin_send(messages, root, parcel)
    yield from opening.later()


def all_gather(messages: GroupMessages, value: Value) -> Steps[list[Value]]:
    """Returns the values of all members in rank order on every member.

    First messages travel by Bruck's algorithm (1997) in log2(size) rounds; what does not fit in them by a ring.
    """
    parcel = pack(value)
    blocks = yield from _bruck(messages, b"".join(parcel.first))
    arriving = [Unpacking(np.frombuffer(block, np.uint8)) for block in blocks]
    after, before = (messages.rank + 1) % messages.size, (messages.rank - 1) % messages.size
    for step in range(messages.size - 1):
        outgoing, incoming = (messages.rank - step) % messages.size, (messages.rank - step - 1) % messages.size
        operations: list[Operation] = []
        place = arriving[incoming].rest
        if place is not None:
            operations.append(messages.receive(before, place.data))
        if (rest := arriving[outgoing].rest) is not None:
            operations.append(messages.send(after, *parcel.rest) if step == 0 else messages.send(after, rest.data))
        yield operations
        if place is not None:
            messages.check_whole(operations[0], place)
    return [value if rank == messages.rank else arriving[rank].value() for rank in range(messages.size)]


def all_to_all(messages: GroupMessages, values: Sequence[Value]) -> Steps[list[Value]]:
    """Returns what every member has for this one, by rank: each pair exchanges directly."""
    if messages.size == 1:
        return list(values)
    parcels = {peer: _packed(messages, value) for peer, value in enumerate(values) if peer != messages.rank}
    after, before = (messages.rank + 1) % messages.size, (messages.rank - 1) % messages.size
    opening = Opening(messages, parcels[after].first)
    # What is sent is waited for last: it may end only when the others, who also send, receive it.
    sends = [opening.sent]
    if parcels[after].rest:
        sends.append(messages.send_body(after, parcels[after].number, parcels[after].rest))
    for distance in range(2, messages.size):
        peer = (messages.rank + distance) % messages.size
        sends += _begin_send(messages, peer, parcels[peer])
    sources = [(messages.rank - distance) % messages.size for distance in range(2, messages.size)]
    others = [receive(messages, source) for source in sources]
    arriving = Unpacking((yield from opening.heard()))
    received = yield from interleaved([_rest(messages, before, arriving), *others])
    yield sends
    results = list(values)
    for source, value in zip([before, *sources], received, strict=True):
        results[source] = value
    return results


def _packed(messages: GroupMessages, value: Value) -> Parcel:
    return pack(value, messages.progress.number())


def _begin_send(messages: GroupMessages, peer: int, parcel: Parcel) -> list[Operation]:
    head, *parts = parcel.first
    operations = [messages.send(peer, memoryview(messages.brings + head), *parts)]
    return [*operations, messages.send_body(peer, parcel.number, parcel.rest)] if parcel.rest else operations


@final
class _First:
    """The first message of a value, which is being received, and in a collective what its sender brings to that."""

    def __init__(self, messages: GroupMessages, peer: int) -> None:
        self._messages = messages
        self.peer = peer
        self._place = place_of(messages, FIRST_BYTES)
        self._received = messages.receive(peer, self._place.data)

    def arrived(self) -> Steps[Unpacking]:
        """Returns the value, as far as it is here."""
        yield [self._received]
        if self._messages.brings:
            return Unpacking(self._messages.check_brings(self._received, self._place))
        return Unpacking(self._place[: self._received.num_bytes])

    def whole(self) -> Steps[Value]:
        """Returns the value."""
        return (yield from _rest(self._messages, self.peer, (yield from self.arrived())))


def _rest(messages: GroupMessages, peer: int, arriving: Unpacking) -> Steps[Value]:
    """Receives the second message of a value, if there is one."""
    if arriving.rest is not None:
        operation = messages.receive_body(peer, arriving.number, arriving.rest.data)
        yield [operation]
        messages.check_whole(operation, arriving.rest)
    return arriving.value()


def _bruck(messages: GroupMessages, block: bytes) -> Steps[list[bytes]]:
    """Gathers one block of at most `FIRST_BYTES` from every member on all of them."""
    blocks = [block]
    if messages.size == 1:
        return blocks
    opening = Opening(messages, [memoryview(_listed(blocks))])
    blocks += _unlisted((yield from opening.heard()))
    distance = 2
    while distance < messages.size:
        count = min(distance, messages.size - distance)
        place = place_of(messages, count * (FIRST_BYTES + _LENGTH_BYTES))
        incoming = messages.receive((messages.rank - distance) % messages.size, place.data)
        data = memoryview(messages.brings + _listed(blocks[:count]))
        yield [incoming, messages.send((messages.rank + distance) % messages.size, data)]
        blocks += _unlisted(messages.check_brings(incoming, place))
        distance *= 2
    yield [opening.sent]
    return [blocks[(messages.rank - rank) % messages.size] for rank in range(messages.size)]


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


def _pipeline(messages: GroupMessages, data: NDArray[np.uint8], root: int) -> Steps[None]:
    place = (messages.rank - root) % messages.size
    after, before = (messages.rank + 1) % messages.size, (messages.rank - 1) % messages.size
    pieces = [data[start : start + _PIECE_BYTES] for start in range(0, data.nbytes, _PIECE_BYTES)]
    receives = [messages.receive(before, piece.data) for piece in pieces] if place else []
    sends: list[Operation] = []
    for index, piece in enumerate(pieces):
        if place:
            yield [receives[index]]
            messages.check_whole(receives[index], piece)
        if place < messages.size - 1:
            sends.append(messages.send(after, piece.data))
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
