"""Algorithms that reduce arrays: trees for small ones, rings for large ones, two levels where there are several hosts.

All members get the same bits: every element is reduced in one order, once, or in the mirrored order of a commutative
operation.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from braidax.comm.collectives.opening import OPENING_BYTES, Opening, headed, opened, place_of
from braidax.comm.group_messages import GroupMessages, Steps, scratch
from braidax.comm.messages import bytes_of
from braidax.comm.transports.transport import Operation

_SMALL_BYTES = OPENING_BYTES  # up to here rounds count, beyond it bytes
_PAIRWISE_BYTES = 1 << 20  # of a reduce_scatter whose blocks are exchanged directly
_PIECE_BYTES = 1 << 19  # of a ring: one is reduced while the next ones are on their way
_AHEAD = 4  # pieces that are received into memory of their own


def all_reduce(messages: GroupMessages, array: NDArray[Any], operation: np.ufunc) -> Steps[NDArray[Any]]:
    """Returns the reduction of all members' arrays on every member."""
    own = _flat(array)
    if messages.size == 2 and own.nbytes <= _SMALL_BYTES:
        return (yield from _exchange(messages, own, operation)).reshape(array.shape)
    groups = _by_host(messages)
    if 1 < len(groups) < messages.size:
        result = yield from opened(messages, _two_levels(messages, own, operation, groups))
    else:
        result = yield from opened(messages, _flat_all_reduce(messages, own, operation))
    return result.reshape(np.shape(array))


def reduce(messages: GroupMessages, array: NDArray[Any], operation: np.ufunc, root: int) -> Steps[NDArray[Any]]:
    """Returns the reduction of all members' arrays on the root, an empty array elsewhere."""
    own = _flat(array)
    if messages.size > 1 and own.nbytes <= _SMALL_BYTES:
        result = yield from _reduce_small(messages, own, operation, root)
    else:
        result = yield from opened(messages, _reduce(messages, own, operation, root))
    return result.reshape(np.shape(array)) if messages.rank == root else np.empty(0, own.dtype)


def reduce_scatter(messages: GroupMessages, array: NDArray[Any], operation: np.ufunc) -> Steps[NDArray[Any]]:
    """Returns this member's block, of `size` equal ones along dim 0, of the reduction of all members' arrays."""
    own = _flat(array)
    bounds = _bounds(own.size, messages.size)
    begin, end = bounds[messages.rank], bounds[messages.rank + 1]
    if own.nbytes <= _PAIRWISE_BYTES or messages.size == 1:
        block = own[begin:end].copy()
        yield from opened(messages, _pairwise_reduce_scatter(messages, own, block, operation, bounds))
    else:
        result = np.empty_like(own)
        yield from opened(messages, _ring_reduce_scatter(messages, own, result, operation, bounds))
        block = result[begin:end].copy()
    return block.reshape(len(array) // messages.size, *array.shape[1:])


def _exchange(messages: GroupMessages, own: NDArray[Any], operation: np.ufunc) -> Steps[NDArray[Any]]:
    """Reduces a small array with the only other member, in one message each way."""
    opening = Opening(messages, [bytes_of(own)])
    other = (yield from opening.heard()).view(own.dtype)
    result = np.empty_like(own)
    first, second = (own, other) if messages.rank == 0 else (other, own)  # so that both get the same bits
    operation(first, second, out=result)
    yield [opening.sent]
    return result


def _flat_all_reduce(messages: GroupMessages, own: NDArray[Any], operation: np.ufunc) -> Steps[NDArray[Any]]:
    if own.nbytes <= _SMALL_BYTES or messages.size == 1:
        return (yield from _recursive_doubling(messages, own, operation))
    result, bounds = np.empty_like(own), _bounds(own.size, messages.size)
    yield from _ring_reduce_scatter(messages, own, result, operation, bounds)
    yield from _ring_all_gather(messages, result, bounds)
    return result


def _reduce_small(messages: GroupMessages, own: NDArray[Any], operation: np.ufunc, root: int) -> Steps[NDArray[Any]]:
    """Reduces up a tree. The leaves only send; of two members, what they send goes with their openings."""
    if (messages.rank - root) % 2 == 0 and messages.size > 2:
        return (yield from opened(messages, _tree_reduce(messages, own, operation, root)))
    if messages.size > 2:
        opening = Opening(messages)
        yield from _tree_reduce(messages, own, operation, root)
    else:
        opening = Opening(messages, [] if messages.rank == root else [bytes_of(own)])
    if messages.rank != root:
        yield from opening.later()
        return own
    result = np.empty_like(own)
    operation(own, (yield from opening.heard()).view(own.dtype), out=result)
    yield [opening.sent]
    return result


def _reduce(messages: GroupMessages, own: NDArray[Any], operation: np.ufunc, root: int) -> Steps[NDArray[Any]]:
    if own.nbytes <= _SMALL_BYTES or messages.size == 1:
        return (yield from _tree_reduce(messages, own, operation, root))
    result, bounds = np.empty_like(own), _bounds(own.size, messages.size)
    yield from _ring_reduce_scatter(messages, own, result, operation, bounds)
    yield from _collect(messages, result, bounds, root)
    return result


def _two_levels(
    messages: GroupMessages, own: NDArray[Any], operation: np.ufunc, groups: Sequence[Sequence[int]]
) -> Steps[NDArray[Any]]:
    """Reduces inside hosts first, so that what crosses between them is as little as can be.

    With equally many members on all hosts, each reduces a share of its host's with its counterparts on the others.
    Otherwise the first of each host does it for all.
    """
    mine = next(group for group in groups if messages.rank in group)
    inside = messages.among(mine)
    if len({len(group) for group in groups}) == 1 and own.nbytes > _SMALL_BYTES:
        result, bounds = np.empty_like(own), _bounds(own.size, len(mine))
        yield from opened(inside, _ring_reduce_scatter(inside, own, result, operation, bounds))
        share = result[bounds[inside.rank] : bounds[inside.rank + 1]]
        across = messages.among([group[inside.rank] for group in groups])
        share[:] = yield from opened(across, _flat_all_reduce(across, share, operation))
        yield from _ring_all_gather(inside, result, bounds)
        return result
    result = yield from _tree_reduce(inside, own, operation, 0)
    if inside.rank == 0:
        across = messages.among([group[0] for group in groups])
        result = yield from opened(across, _flat_all_reduce(across, result, operation))
    return (yield from _tree_broadcast(inside, result))


def _recursive_doubling(messages: GroupMessages, own: NDArray[Any], operation: np.ufunc) -> Steps[NDArray[Any]]:
    """Exchanges with partners at doubling distances; members beyond the largest power of two lend theirs to others."""
    core = 1 << (messages.size.bit_length() - 1)
    extra = messages.size - core
    message, flat = headed(messages, own)
    if messages.rank >= core:
        yield [messages.send(messages.rank - core, message.data)]
        return (yield from _received(messages, messages.rank - core, own)).copy()
    if messages.rank < extra:
        incoming = yield from _received(messages, messages.rank + core, own)
        operation(flat, incoming, out=flat)
    distance = 1
    while distance < core:
        partner = messages.rank ^ distance
        incoming = yield from _received(messages, partner, own, messages.send(partner, message.data))
        # The lower rank's operand comes first on both sides, so that both get the same bits.
        first, second = (flat, incoming) if messages.rank < partner else (incoming, flat)
        operation(first, second, out=flat)
        distance *= 2
    if messages.rank < extra:
        yield [messages.send(messages.rank + core, message.data)]
    return flat


def _tree_reduce(messages: GroupMessages, own: NDArray[Any], operation: np.ufunc, root: int) -> Steps[NDArray[Any]]:
    place = (messages.rank - root) % messages.size
    message, flat = headed(messages, own)
    distance = 1
    while distance < messages.size:
        if place & distance:
            yield [messages.send((place - distance + root) % messages.size, message.data)]
            break
        if place + distance < messages.size:
            incoming = yield from _received(messages, (place + distance + root) % messages.size, own)
            operation(flat, incoming, out=flat)
        distance *= 2
    return flat


def _tree_broadcast(messages: GroupMessages, own: NDArray[Any]) -> Steps[NDArray[Any]]:
    """Returns the array of member 0."""
    distance = 1 << (messages.size - 1).bit_length()
    while distance > 1:
        distance //= 2
        if messages.rank % (2 * distance) == distance:
            own = (yield from _received(messages, messages.rank - distance, own)).copy()
        elif messages.rank % (2 * distance) == 0 and messages.rank + distance < messages.size:
            yield [messages.send(messages.rank + distance, headed(messages, own)[0].data)]
    return own


def _received(
    messages: GroupMessages, peer: int, like: NDArray[Any], sent: Operation | None = None
) -> Steps[NDArray[Any]]:
    """Returns an array of a member that brings the same. **Arguments:** `sent`: what else is waited for."""
    place = place_of(messages, like.nbytes)
    received = messages.receive(peer, place.data)
    yield [received] if sent is None else [received, sent]
    return messages.check_brings(received, place).view(like.dtype)


def _ring_reduce_scatter(
    messages: GroupMessages, own: NDArray[Any], result: NDArray[Any], operation: np.ufunc, bounds: Sequence[int]
) -> Steps[None]:
    """Leaves block `rank` of the result on each member: blocks travel once around, and each member adds its own.

    The other blocks of the result hold what is not whole yet. `own` is read only, unless it is the result as well.
    """
    after, before = (messages.rank + 1) % messages.size, (messages.rank - 1) % messages.size
    places = [scratch(own, _PIECE_BYTES // own.itemsize + 1) for _ in range(_AHEAD)]
    for step in range(messages.size - 1):
        outgoing = _pieces(result if step else own, bounds, (messages.rank - step - 1) % messages.size)
        block = (messages.rank - step - 2) % messages.size
        mine, sums = _pieces(own, bounds, block), _pieces(result, bounds, block)
        receives = deque(
            messages.receive_array(before, place[: piece.size]) for place, piece in zip(places, mine, strict=False)
        )
        sends = [messages.send_array(after, piece) for piece in outgoing]
        for index, (piece, total) in enumerate(zip(mine, sums, strict=True)):
            place = places[index % _AHEAD][: piece.size]
            received = receives.popleft()
            yield [received]
            messages.check_whole(received, place)
            operation(place, piece, out=total)
            if index + _AHEAD < len(mine):
                receives.append(messages.receive_array(before, place[: mine[index + _AHEAD].size]))
        yield sends


def _ring_all_gather(messages: GroupMessages, flat: NDArray[Any], bounds: Sequence[int]) -> Steps[None]:
    after, before = (messages.rank + 1) % messages.size, (messages.rank - 1) % messages.size
    for step in range(messages.size - 1):
        outgoing = _pieces(flat, bounds, (messages.rank - step) % messages.size)
        places = _pieces(flat, bounds, (messages.rank - step - 1) % messages.size)
        receives = [messages.receive_array(before, place) for place in places]
        yield [*receives, *(messages.send_array(after, piece) for piece in outgoing)]
        for received, place in zip(receives, places, strict=True):
            messages.check_whole(received, place)


def _pairwise_reduce_scatter(
    messages: GroupMessages, own: NDArray[Any], block: NDArray[Any], operation: np.ufunc, bounds: Sequence[int]
) -> Steps[None]:
    """Adds to a member's block what the others have for it."""
    peers = [peer for peer in range(messages.size) if peer != messages.rank]
    places = {peer: place_of(messages, block.nbytes) for peer in peers}
    receives = [messages.receive(peer, places[peer].data) for peer in peers]
    brings = memoryview(messages.brings)
    sends = [messages.send(peer, brings, bytes_of(own[bounds[peer] : bounds[peer + 1]])) for peer in peers]
    for received, peer in zip(receives, peers, strict=True):
        yield [received]
        operation(block, messages.check_brings(received, places[peer]).view(own.dtype), out=block)
    yield sends


def _collect(messages: GroupMessages, flat: NDArray[Any], bounds: Sequence[int], root: int) -> Steps[None]:
    """Brings every member's block to the root."""
    if messages.rank != root:
        yield [messages.send_array(root, flat[bounds[messages.rank] : bounds[messages.rank + 1]])]
        return
    peers = [peer for peer in range(messages.size) if peer != root]
    places = [flat[bounds[peer] : bounds[peer + 1]] for peer in peers]
    receives = [messages.receive_array(peer, place) for peer, place in zip(peers, places, strict=True)]
    yield receives
    for received, place in zip(receives, places, strict=True):
        messages.check_whole(received, place)


def _flat(array: NDArray[Any]) -> NDArray[Any]:
    """Returns the elements in row-major order: the array's own memory where it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1)


def _by_host(messages: GroupMessages) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for member, host in enumerate(messages.hosts):
        groups.setdefault(host, []).append(member)
    return list(groups.values())


def _bounds(num_elements: int, num_blocks: int) -> list[int]:
    return [num_elements * block // num_blocks for block in range(num_blocks + 1)]


def _pieces(flat: NDArray[Any], bounds: Sequence[int], block: int) -> list[NDArray[Any]]:
    """Returns a block in pieces, at least one, the same ones on every member."""
    part = flat[bounds[block] : bounds[block + 1]]
    length = max(1, _PIECE_BYTES // flat.itemsize)
    return [part[start : start + length] for start in range(0, max(1, part.size), length)]
