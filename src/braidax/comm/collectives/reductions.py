"""Algorithms that reduce arrays: trees for small ones, rings for large ones, two levels where there are several hosts.

All members get the same bits: every element is reduced in one order, once, or in the mirrored order of a commutative
operation.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from braidax.comm.port import Port, Steps, scratch

_SMALL_BYTES = 1 << 14  # up to here rounds count, beyond it bytes
_PAIRWISE_BYTES = 1 << 20  # of a reduce_scatter whose blocks are exchanged directly
_PIECE_BYTES = 1 << 19  # of a ring: one is reduced while the next ones are on their way
_AHEAD = 4  # pieces that are received into memory of their own


def all_reduce(port: Port, array: NDArray[Any], operation: np.ufunc) -> Steps[NDArray[Any]]:
    """Returns the reduction of all members' arrays on every member."""
    own = _flat(array)
    result = np.empty_like(own)
    groups = _by_host(port)
    if 1 < len(groups) < port.size:
        yield from _two_levels(port, own, result, operation, groups)
    else:
        yield from _flat_all_reduce(port, own, result, operation)
    return result.reshape(np.shape(array))


def reduce(port: Port, array: NDArray[Any], operation: np.ufunc, root: int) -> Steps[NDArray[Any]]:
    """Returns the reduction of all members' arrays on the root, an empty array elsewhere."""
    own = _flat(array)
    if own.nbytes <= _SMALL_BYTES or port.size == 1:
        result = own.copy()
        yield from _tree_reduce(port, result, operation, root)
    else:
        result, bounds = np.empty_like(own), _bounds(own.size, port.size)
        yield from _ring_reduce_scatter(port, own, result, operation, bounds)
        yield from _collect(port, result, bounds, root)
    return result.reshape(np.shape(array)) if port.rank == root else np.empty(0, result.dtype)


def reduce_scatter(port: Port, array: NDArray[Any], operation: np.ufunc) -> Steps[NDArray[Any]]:
    """Returns this member's block, of `size` equal ones along dim 0, of the reduction of all members' arrays."""
    own = _flat(array)
    bounds = _bounds(own.size, port.size)
    begin, end = bounds[port.rank], bounds[port.rank + 1]
    if own.nbytes <= _PAIRWISE_BYTES or port.size == 1:
        block = own[begin:end].copy()
        yield from _pairwise_reduce_scatter(port, own, block, operation, bounds)
    else:
        result = np.empty_like(own)
        yield from _ring_reduce_scatter(port, own, result, operation, bounds)
        block = result[begin:end].copy()
    return block.reshape(len(array) // port.size, *array.shape[1:])


def _flat_all_reduce(port: Port, own: NDArray[Any], result: NDArray[Any], operation: np.ufunc) -> Steps[None]:
    """Reduces what is this member's own, which may be where the result goes."""
    if own.nbytes <= _SMALL_BYTES or port.size == 1:
        result[:] = own
        yield from _recursive_doubling(port, result, operation)
    else:
        bounds = _bounds(own.size, port.size)
        yield from _ring_reduce_scatter(port, own, result, operation, bounds)
        yield from _ring_all_gather(port, result, bounds)


def _two_levels(
    port: Port, own: NDArray[Any], result: NDArray[Any], operation: np.ufunc, groups: Sequence[Sequence[int]]
) -> Steps[None]:
    """Reduces inside hosts first, so that what crosses between them is as little as can be.

    With equally many members on all hosts, each reduces a share of its host's with its counterparts on the others.
    Otherwise the first of each host does it for all.
    """
    mine = next(group for group in groups if port.rank in group)
    inside = port.among(mine)
    if len({len(group) for group in groups}) == 1 and own.nbytes > _SMALL_BYTES:
        bounds = _bounds(own.size, len(mine))
        yield from _ring_reduce_scatter(inside, own, result, operation, bounds)
        share = result[bounds[inside.rank] : bounds[inside.rank + 1]]
        yield from _flat_all_reduce(port.among([group[inside.rank] for group in groups]), share, share, operation)
        yield from _ring_all_gather(inside, result, bounds)
        return
    result[:] = own
    yield from _tree_reduce(inside, result, operation, 0)
    if inside.rank == 0:
        yield from _flat_all_reduce(port.among([group[0] for group in groups]), result, result, operation)
    yield from _tree_broadcast(inside, result)


def _recursive_doubling(port: Port, flat: NDArray[Any], operation: np.ufunc) -> Steps[None]:
    """Exchanges with partners at doubling distances; members beyond the largest power of two lend theirs to others."""
    core = 1 << (port.size.bit_length() - 1)
    extra = port.size - core
    incoming = scratch(flat, flat.size)
    if port.rank >= core:
        yield [port.send_array(port.rank - core, flat)]
        received = port.receive_array(port.rank - core, flat)
        yield [received]
        port.check_whole(received, flat)
        return
    if port.rank < extra:
        received = port.receive_array(port.rank + core, incoming)
        yield [received]
        port.check_whole(received, incoming)
        operation(flat, incoming, out=flat)
    distance = 1
    while distance < core:
        partner = port.rank ^ distance
        received = port.receive_array(partner, incoming)
        yield [received, port.send_array(partner, flat)]
        port.check_whole(received, incoming)
        # The lower rank's operand comes first on both sides, so that both get the same bits.
        first, second = (flat, incoming) if port.rank < partner else (incoming, flat)
        operation(first, second, out=flat)
        distance *= 2
    if port.rank < extra:
        yield [port.send_array(port.rank + core, flat)]


def _tree_reduce(port: Port, flat: NDArray[Any], operation: np.ufunc, root: int) -> Steps[None]:
    place = (port.rank - root) % port.size
    incoming = scratch(flat, flat.size)
    distance = 1
    while distance < port.size:
        if place & distance:
            yield [port.send_array((place - distance + root) % port.size, flat)]
            return
        if place + distance < port.size:
            received = port.receive_array((place + distance + root) % port.size, incoming)
            yield [received]
            port.check_whole(received, incoming)
            operation(flat, incoming, out=flat)
        distance *= 2


def _tree_broadcast(port: Port, flat: NDArray[Any]) -> Steps[None]:
    distance = 1 << (port.size - 1).bit_length()
    while distance > 1:
        distance //= 2
        if port.rank % (2 * distance) == distance:
            received = port.receive_array(port.rank - distance, flat)
            yield [received]
            port.check_whole(received, flat)
        elif port.rank % (2 * distance) == 0 and port.rank + distance < port.size:
            yield [port.send_array(port.rank + distance, flat)]


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
    places = {peer: scratch(own, block.size) for peer in peers}
    receives = [port.receive_array(peer, places[peer]) for peer in peers]
    sends = [port.send_array(peer, own[bounds[peer] : bounds[peer + 1]]) for peer in peers]
    yield [*receives, *sends]
    for received, peer in zip(receives, peers, strict=True):
        port.check_whole(received, places[peer])
        operation(block, places[peer], out=block)


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
