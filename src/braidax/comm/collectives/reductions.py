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
from braidax.comm.messages import bytes_of
from braidax.comm.port import Port, Steps, scratch
from braidax.comm.transports.transport import Operation

_SMALL_BYTES = OPENING_BYTES  # up to here rounds count, beyond it bytes
_PAIRWISE_BYTES = 1 << 20  # of a reduce_scatter whose blocks are exchanged directly
_PIECE_BYTES = 1 << 19  # of a ring: one is reduced while the next ones are on their way
_AHEAD = 4  # pieces that are received into memory of their own


def all_reduce(port: Port, array: NDArray[Any], operation: np.ufunc) -> Steps[NDArray[Any]]:
    """Returns the reduction of all members' arrays on every member."""
    own = _flat(array)
    if port.size == 2 and own.nbytes <= _SMALL_BYTES:
        return (yield from _exchange(port, own, operation)).reshape(array.shape)
    groups = _by_host(port)
    if 1 < len(groups) < port.size:
        result = yield from opened(port, _two_levels(port, own, operation, groups))
    else:
        result = yield from opened(port, _flat_all_reduce(port, own, operation))
    return result.reshape(np.shape(array))


def reduce(port: Port, array: NDArray[Any], operation: np.ufunc, root: int) -> Steps[NDArray[Any]]:
    """Returns the reduction of all members' arrays on the root, an empty array elsewhere."""
    own = _flat(array)
    result = yield from opened(port, _reduce(port, own, operation, root))
    return result.reshape(np.shape(array)) if port.rank == root else np.empty(0, own.dtype)


def reduce_scatter(port: Port, array: NDArray[Any], operation: np.ufunc) -> Steps[NDArray[Any]]:
    """Returns this member's block, of `size` equal ones along dim 0, of the reduction of all members' arrays."""
    own = _flat(array)
    bounds = _bounds(own.size, port.size)
    begin, end = bounds[port.rank], bounds[port.rank + 1]
    if own.nbytes <= _PAIRWISE_BYTES or port.size == 1:
        block = own[begin:end].copy()
        yield from opened(port, _pairwise_reduce_scatter(port, own, block, operation, bounds))
    else:
        result = np.empty_like(own)
        yield from opened(port, _ring_reduce_scatter(port, own, result, operation, bounds))
        block = result[begin:end].copy()
    return block.reshape(len(array) // port.size, *array.shape[1:])


def _exchange(port: Port, own: NDArray[Any], operation: np.ufunc) -> Steps[NDArray[Any]]:
    """Reduces a small array with the only other member, in one message each way."""
    opening = Opening(port, [bytes_of(own)])
    other = (yield from opening.heard()).view(own.dtype)
    result = np.empty_like(own)
    first, second = (own, other) if port.rank == 0 else (other, own)  # so that both get the same bits
    operation(first, second, out=result)
    yield [opening.sent]
    return result


def _flat_all_reduce(port: Port, own: NDArray[Any], operation: np.ufunc) -> Steps[NDArray[Any]]:
    if own.nbytes <= _SMALL_BYTES or port.size == 1:
        return (yield from _recursive_doubling(port, own, operation))
    result, bounds = np.empty_like(own), _bounds(own.size, port.size)
    yield from _ring_reduce_scatter(port, own, result, operation, bounds)
    yield from _ring_all_gather(port, result, bounds)
    return result


def _reduce(port: Port, own: NDArray[Any], operation: np.ufunc, root: int) -> Steps[NDArray[Any]]:
    if own.nbytes <= _SMALL_BYTES or port.size == 1:
        return (yield from _tree_reduce(port, own, operation, root))
    result, bounds = np.empty_like(own), _bounds(own.size, port.size)
    yield from _ring_reduce_scatter(port, own, result, operation, bounds)
    yield from _collect(port, result, bounds, root)
    return result


def _two_levels(
    port: Port, own: NDArray[Any], operation: np.ufunc, groups: Sequence[Sequence[int]]
) -> Steps[NDArray[Any]]:
    """Reduces inside hosts first, so that what crosses between them is as little as can be.

    With equally many members on all hosts, each reduces a share of its host's with its counterparts on the others.
    Otherwise the first of each host does it for all.
    """
    mine = next(group for group in groups if port.rank in group)
    inside = port.among(mine)
    if len({len(group) for group in groups}) == 1 and own.nbytes > _SMALL_BYTES:
        result, bounds = np.empty_like(own), _bounds(own.size, len(mine))
        yield from opened(inside, _ring_reduce_scatter(inside, own, result, operation, bounds))
        share = result[bounds[inside.rank] : bounds[inside.rank + 1]]
        across = port.among([group[inside.rank] for group in groups])
        share[:] = yield from opened(across, _flat_all_reduce(across, share, operation))
        yield from _ring_all_gather(inside, result, bounds)
        return result
    result = yield from _tree_reduce(inside, own, operation, 0)
    if inside.rank == 0:
        across = port.among([group[0] for group in groups])
        result = yield from opened(across, _flat_all_reduce(across, result, operation))
    return (yield from _tree_broadcast(inside, result))


def _recursive_doubling(port: Port, own: NDArray[Any], operation: np.ufunc) -> Steps[NDArray[Any]]:
    """Exchanges with partners at doubling distances; members beyond the largest power of two lend theirs to others."""
    core = 1 << (port.size.bit_length() - 1)
    extra = port.size - core
    message, flat = headed(port, own)
    if port.rank >= core:
        yield [port.send(port.rank - core, message.data)]
        return (yield from _received(port, port.rank - core, own)).copy()
    if port.rank < extra:
        incoming = yield from _received(port, port.rank + core, own)
        operation(flat, incoming, out=flat)
    distance = 1
    while distance < core:
        partner = port.rank ^ distance
        incoming = yield from _received(port, partner, own, port.send(partner, message.data))
        # The lower rank's operand comes first on both sides, so that both get the same bits.
        first, second = (flat, incoming) if port.rank < partner else (incoming, flat)
        operation(first, second, out=flat)
        distance *= 2
    if port.rank < extra:
        yield [port.send(port.rank + core, message.data)]
    return flat


def _tree_reduce(port: Port, own: NDArray[Any], operation: np.ufunc, root: int) -> Steps[NDArray[Any]]:
    place = (port.rank - root) % port.size
    message, flat = headed(port, own)
    distance = 1
    while distance < port.size:
        if place & distance:
            yield [port.send((place - distance + root) % port.size, message.data)]
            break
        if place + distance < port.size:
            incoming = yield from _received(port, (place + distance + root) % port.size, own)
            operation(flat, incoming, out=flat)
        distance *= 2
    return flat


def _tree_broadcast(port: Port, own: NDArray[Any]) -> Steps[NDArray[Any]]:
    """Returns the array of member 0."""
    distance = 1 << (port.size - 1).bit_length()
    while distance > 1:
        distance //= 2
        if port.rank % (2 * distance) == distance:
            own = (yield from _received(port, port.rank - distance, own)).copy()
        elif port.rank % (2 * distance) == 0 and port.rank + distance < port.size:
            yield [port.send(port.rank + distance, headed(port, own)[0].data)]
    return own


def _received(port: Port, peer: int, like: NDArray[Any], sent: Operation | None = None) -> Steps[NDArray[Any]]:
    """Returns an array of a member that brings the same. **Arguments:** `sent`: what else is waited for."""
    place = place_of(port, like.nbytes)
    received = port.receive(peer, place.data)
    yield [received] if sent is None else [received, sent]
    return port.check_brings(received, place).view(like.dtype)


def _ring_reduce_scatter(
    port: Port, own: NDArray[Any], result: NDArray[Any], operation: np.ufunc, bounds: Sequence[int]
) -> Steps[None]:
    """Leaves block `rank` of the result on each member: blocks travel once around, and each member adds its own.

    The other blocks of the result hold what is not whole yet. `own` is read only, unless it is the result as well.
    """
    after, before = (port.rank + 1) % port.size, (port.rank - 1) % port.size
    places = [scratch(own, _PIECE_BYTES // own.itemsize + 1) for _ in range(_AHEAD)]
    for step in range(port.size - 1):
        outgoing = _pieces(result if step else own, bounds, (port.rank - step - 1) % port.size)
        block = (port.rank - step - 2) % port.size
        mine, sums = _pieces(own, bounds, block), _pieces(result, bounds, block)
        receives = deque(
            port.receive_array(before, place[: piece.size]) for place, piece in zip(places, mine, strict=False)
        )
        sends = [port.send_array(after, piece) for piece in outgoing]
        for index, (piece, total) in enumerate(zip(mine, sums, strict=True)):
            place = places[index % _AHEAD][: piece.size]
            received = receives.popleft()
            yield [received]
            port.check_whole(received, place)
            operation(place, piece, out=total)
            if index + _AHEAD < len(mine):
                receives.append(port.receive_array(before, place[: mine[index + _AHEAD].size]))
        yield sends


def _ring_all_gather(port: Port, flat: NDArray[Any], bounds: Sequence[int]) -> Steps[None]:
    after, before = (port.rank + 1) % port.size, (port.rank - 1) % port.size
    for step in range(port.size - 1):
        outgoing = _pieces(flat, bounds, (port.rank - step) % port.size)
        places = _pieces(flat, bounds, (port.rank - step - 1) % port.size)
        receives = [port.receive_array(before, place) for place in places]
        yield [*receives, *(port.send_array(after, piece) for piece in outgoing)]
        for received, place in zip(receives, places, strict=True):
            port.check_whole(received, place)


def _pairwise_reduce_scatter(
    port: Port, own: NDArray[Any], block: NDArray[Any], operation: np.ufunc, bounds: Sequence[int]
) -> Steps[None]:
    """Adds to a member's block what the others have for it."""
    peers = [peer for peer in range(port.size) if peer != port.rank]
    places = {peer: place_of(port, block.nbytes) for peer in peers}
    receives = [port.receive(peer, places[peer].data) for peer in peers]
    brings = memoryview(port.brings)
    sends = [port.send(peer, brings, bytes_of(own[bounds[peer] : bounds[peer + 1]])) for peer in peers]
    for received, peer in zip(receives, peers, strict=True):
        yield [received]
        operation(block, port.check_brings(received, places[peer]).view(own.dtype), out=block)
    yield sends


def _collect(port: Port, flat: NDArray[Any], bounds: Sequence[int], root: int) -> Steps[None]:
    """Brings every member's block to the root."""
    if port.rank != root:
        yield [port.send_array(root, flat[bounds[port.rank] : bounds[port.rank + 1]])]
        return
    peers = [peer for peer in range(port.size) if peer != root]
    places = [flat[bounds[peer] : bounds[peer + 1]] for peer in peers]
    receives = [port.receive_array(peer, place) for peer, place in zip(peers, places, strict=True)]
    yield receives
    for received, place in zip(receives, places, strict=True):
        port.check_whole(received, place)


def _flat(array: NDArray[Any]) -> NDArray[Any]:
    """Returns the elements in row-major order: the array's own memory where it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1)


def _by_host(port: Port) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for member, host in enumerate(port.hosts):
        groups.setdefault(host, []).append(member)
    return list(groups.values())


def _bounds(num_elements: int, num_blocks: int) -> list[int]:
    return [num_elements * block // num_blocks for block in range(num_blocks + 1)]


def _pieces(flat: NDArray[Any], bounds: Sequence[int], block: int) -> list[NDArray[Any]]:
    """Returns a block in pieces, at least one, the same ones on every member."""
    part = flat[bounds[block] : bounds[block + 1]]
    length = max(1, _PIECE_BYTES // flat.itemsize)
    return [part[start : start + length] for start in range(0, max(1, part.size), length)]
