"""Algorithms that reduce arrays: trees for small ones, rings for large ones, two levels where there are several hosts.

All members get the same bits: every element is reduced in one order, once, or in the mirrored order of a commutative
operation.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from braidax.comm.port import Port, Steps, scratch

_SMALL_BYTES = 1 << 14  # up to here rounds count, beyond it bytes
_PAIRWISE_BYTES = 1 << 20  # of a reduce_scatter whose blocks are exchanged directly
_PIECE_BYTES = 1 << 19  # of a ring: one is reduced while the next is on its way


def all_reduce(port: Port, array: NDArray[Any], operation: np.ufunc) -> Steps[NDArray[Any]]:
    """Returns the reduction of all members' arrays on every member."""
    result = np.array(array, order="C", ndmin=1)
    flat = result.reshape(-1)
    groups = _by_host(port)
    if 1 < len(groups) < port.size:
        yield from _two_levels(port, flat, operation, groups)
    else:
        yield from _flat_all_reduce(port, flat, operation)
    return result.reshape(np.shape(array))


def reduce(port: Port, array: NDArray[Any], operation: np.ufunc, root: int) -> Steps[NDArray[Any]]:
    """Returns the reduction of all members' arrays on the root, an empty array elsewhere."""
    result = np.array(array, order="C", ndmin=1)
    flat = result.reshape(-1)
    if flat.nbytes <= _SMALL_BYTES or port.size == 1:
        yield from _tree_reduce(port, flat, operation, root)
    else:
        bounds = _bounds(flat.size, port.size)
        yield from _ring_reduce_scatter(port, flat, operation, bounds)
        yield from _collect(port, flat, bounds, root)
    return result.reshape(np.shape(array)) if port.rank == root else np.empty(0, result.dtype)


def reduce_scatter(port: Port, array: NDArray[Any], operation: np.ufunc) -> Steps[NDArray[Any]]:
    """Returns this member's block, of `size` equal ones along dim 0, of the reduction of all members' arrays."""
    work = np.array(array, order="C")
    flat = work.reshape(-1)
    bounds = _bounds(flat.size, port.size)
    if flat.nbytes <= _PAIRWISE_BYTES:
        yield from _pairwise_reduce_scatter(port, flat, operation, bounds)
    else:
        yield from _ring_reduce_scatter(port, flat, operation, bounds)
    begin, end = bounds[port.rank], bounds[port.rank + 1]
    return flat[begin:end].copy().reshape(len(work) // port.size, *work.shape[1:])


def _flat_all_reduce(port: Port, flat: NDArray[Any], operation: np.ufunc) -> Steps[None]:
    if port.size == 1:
        return
    if flat.nbytes <= _SMALL_BYTES:
        yield from _recursive_doubling(port, flat, operation)
    else:
        bounds = _bounds(flat.size, port.size)
        yield from _ring_reduce_scatter(port, flat, operation, bounds)
        yield from _ring_all_gather(port, flat, bounds)


def _two_levels(port: Port, flat: NDArray[Any], operation: np.ufunc, groups: Sequence[Sequence[int]]) -> Steps[None]:
    """Reduces inside hosts first, so that what crosses between them is as little as can be.

    With equally many members on all hosts, each reduces a share of its host's with its counterparts on the others.
    Otherwise the first of each host does it for all.
    """
    mine = next(group for group in groups if port.rank in group)
    inside = port.among(mine)
    if len({len(group) for group in groups}) == 1 and flat.nbytes > _SMALL_BYTES:
        bounds = _bounds(flat.size, len(mine))
        yield from _ring_reduce_scatter(inside, flat, operation, bounds)
        share = flat[bounds[inside.rank] : bounds[inside.rank + 1]]
        yield from _flat_all_reduce(port.among([group[inside.rank] for group in groups]), share, operation)
        yield from _ring_all_gather(inside, flat, bounds)
        return
    yield from _tree_reduce(inside, flat, operation, 0)
    if inside.rank == 0:
        yield from _flat_all_reduce(port.among([group[0] for group in groups]), flat, operation)
    yield from _tree_broadcast(inside, flat)


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


def _ring_reduce_scatter(port: Port, flat: NDArray[Any], operation: np.ufunc, bounds: Sequence[int]) -> Steps[None]:
    """Leaves block `rank` reduced on each member: blocks travel once around, and each member adds its own."""
    after, before = (port.rank + 1) % port.size, (port.rank - 1) % port.size
    for step in range(port.size - 1):
        outgoing = _pieces(flat, bounds, (port.rank - step - 1) % port.size)
        own = _pieces(flat, bounds, (port.rank - step - 2) % port.size)
        places = [scratch(flat, piece.size) for piece in own]
        receives = [port.receive_array(before, place) for place in places]
        sends = [port.send_array(after, piece) for piece in outgoing]
        for received, place, piece in zip(receives, places, own, strict=True):
            yield [received]
            port.check_whole(received, place)
            operation(place, piece, out=piece)
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


def _pairwise_reduce_scatter(port: Port, flat: NDArray[Any], operation: np.ufunc, bounds: Sequence[int]) -> Steps[None]:
    own = flat[bounds[port.rank] : bounds[port.rank + 1]]
    peers = [peer for peer in range(port.size) if peer != port.rank]
    places = {peer: scratch(flat, own.size) for peer in peers}
    receives = [port.receive_array(peer, places[peer]) for peer in peers]
    sends = [port.send_array(peer, flat[bounds[peer] : bounds[peer + 1]]) for peer in peers]
    yield [*receives, *sends]
    for received, peer in zip(receives, peers, strict=True):
        port.check_whole(received, places[peer])
        operation(own, places[peer], out=own)


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
