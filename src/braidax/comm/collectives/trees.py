"""Reduces small arrays to a root by a tree, whose leaves only send and do not wait."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from braidax.comm.collectives.opening import Opening, headed, opened, place_of
from braidax.comm.group_messages import GroupMessages, Steps
from braidax.comm.messages import bytes_of


def reduce_small(messages: GroupMessages, array: NDArray[Any], operation: np.ufunc, root: int) -> Steps[NDArray[Any]]:
    """Returns the reduction of all members' arrays on the root, an empty array elsewhere.

    **Arguments:** `array`: up to `OPENING_BYTES`, of two members or more.
    """
    own = np.ascontiguousarray(array).reshape(-1)
    result = yield from _reduce(messages, own, operation, root)
    return result.reshape(np.shape(array)) if messages.rank == root else np.empty(0, own.dtype)


def _reduce(messages: GroupMessages, own: NDArray[Any], operation: np.ufunc, root: int) -> Steps[NDArray[Any]]:
    """Reduces up a tree. Of two members, what the leaf sends goes with its opening."""
    if (messages.rank - root) % 2 == 0 and messages.size > 2:
        return (yield from opened(messages, _up(messages, own, operation, root)))
    if messages.size > 2:
        opening = Opening(messages)
        yield from _up(messages, own, operation, root)
    else:
        opening = Opening(messages, [] if messages.rank == root else [bytes_of(own)])
    if messages.rank != root:
        yield from opening.later()
        return own
    result = np.empty_like(own)
    operation(own, (yield from opening.heard()).view(own.dtype), out=result)
    yield [opening.sent]
    return result


def _up(messages: GroupMessages, own: NDArray[Any], operation: np.ufunc, root: int) -> Steps[NDArray[Any]]:
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


def _received(messages: GroupMessages, peer: int, like: NDArray[Any]) -> Steps[NDArray[Any]]:
    """Returns an array of a member that brings the same."""
    place = place_of(messages, like.nbytes)
    received = messages.receive(peer, place.data)
    yield [received]
    return messages.check_brings(received, place).view(like.dtype)
