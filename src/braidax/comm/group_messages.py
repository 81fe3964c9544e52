"""The messages of a group's members, which algorithms send and receive."""

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from braidax.comm.losing.domain import Domain
from braidax.comm.progress import Progress
from braidax.comm.transports.transport import Buffer, Operation, disagreeing, of_another_length

T = TypeVar("T")
Steps = Generator[Sequence[Operation], None, T]
"""An algorithm: it begins operations, yields those that must have ended before it goes on, and returns its result."""

POINT_TO_POINT, COLLECTIVE, BODY, BUFFER, STREAM, CREDIT, ASK, ANSWER = range(8)
"""Kinds of messages: first ones of values, those of collectives, second ones of values, those of `send_buffer`; of a
stream, and of its credits; of those who ask, and who answer."""
MAX_NUMBER = (1 << 30) - 1
MAX_GROUPS = 1 << 11
HEAD_BYTES = 128
"""Of what a member says it brings to a collective."""

_KIND_BITS = 33  # the lower ones of a tag: kind and number


@final
@dataclass(slots=True, eq=False)
class GroupMessages:
    """Sends to and receives from the ranks of a group, under one tag.

    **Arguments:** `progress`: moves the messages. `ranks`: of the members in the world, by rank in the group. `rank`:
    in the group. `tag`: see `tag_of`. `hosts`: a number for each member's host, the same for ranks on the same one.
    `brings`: what this member brings to the collective, `HEAD_BYTES` from `head_of`; nothing point to point.
    `unheard`: openings of the group's earlier collectives that this member has not heard yet.

    **Fields:** the arguments. `size`: the number of members.
    """

    progress: Progress | Domain
    ranks: Sequence[int]
    rank: int
    tag: int
    hosts: Sequence[int]
    brings: bytes = b""
    unheard: deque[Any] = field(default_factory=deque)
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = len(self.ranks)

    def send(self, peer: int, *buffers: Buffer) -> Operation:
        """Begins to send the concatenation of buffers to a member."""
        return self.progress.send(self.ranks[peer], self.tag, buffers)

    def receive(self, peer: int, buffer: Buffer) -> Operation:
        """Begins to receive from a member at most as many bytes as the buffer has."""
        return self.progress.receive(self.ranks[peer], self.tag, buffer)

    def send_body(self, peer: int, number: int, buffers: Sequence[Buffer]) -> Operation:
        """Begins to send the second message of a value, whose number its first one has told."""
        return self.progress.send(self.ranks[peer], self._body_tag(number), buffers)

    def receive_body(self, peer: int, number: int, buffer: Buffer) -> Operation:
        """Begins to receive the second message of a value."""
        return self.progress.receive(self.ranks[peer], self._body_tag(number), buffer)

    def check_whole(self, operation: Operation, array: NDArray[Any]) -> None:
        """Raises `CommError` when what has been received does not fill the array."""
        self.check_length(operation, array.nbytes)

    def check_length(self, operation: Operation, num_bytes: int) -> None:
        """Raises `CommError` when a message is not as long as was expected."""
        if operation.num_bytes != num_bytes and operation.error is None:
            raise of_another_length(self.progress.world, operation.peer, operation.num_bytes, num_bytes)

    def check_brings(self, operation: Operation, place: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Compares what a member brings, as its message says first, with what this one does.

        **Arguments:** `place`: where the message was received. **Returns:** the message behind that.

        **Raises:** `CommError` naming both.
        """
        theirs = bytes(place.data[: min(operation.num_bytes, HEAD_BYTES)])
        if theirs != self.brings:
            raise disagreeing(self.progress.world, operation.peer, theirs, self.brings)
        return place[HEAD_BYTES : operation.num_bytes]

    def _body_tag(self, number: int) -> int:
        return self.tag >> _KIND_BITS << _KIND_BITS | tag_of(0, BODY, number & MAX_NUMBER)


def tag_of(group: int, kind: int, number: int) -> int:
    """Returns the tag of a message: what keeps groups, point-to-point messages and collectives apart.

    **Arguments:** `group`: below `MAX_GROUPS`. `kind`: `POINT_TO_POINT` or another one. `number`: the user's tag,
    or which collective of its group this is; up to `MAX_NUMBER`.
    """
    return group << _KIND_BITS | kind << 30 | number


def head_of(operation: str) -> bytes:
    """Returns what a member brings to a collective, in words that are the same for what fits together.

    **Arguments:** `operation`: such as `all_reduce(add) of float32[3]`; a long one is cut, and ends with its hash.
    """
    words = operation.encode()
    if len(words) > HEAD_BYTES:
        words = words[: HEAD_BYTES - 20] + b" \xe2\x80\xa6" + blake2b(words, digest_size=8).hexdigest().encode()
    return words.ljust(HEAD_BYTES, b"\0")


def interleaved(parts: Sequence[Steps[Any]]) -> Steps[list[Any]]:
    """Runs algorithms side by side, each step of all of them at once, and returns their results in order."""
    results: list[Any] = [None] * len(parts)
    running = dict(enumerate(parts))
    while running:
        operations: list[Operation] = []
        for index, part in list(running.items()):
            try:
                operations += next(part)
            except StopIteration as stop:
                results[index] = stop.value
                del running[index]
        if operations:
            yield operations
    return results
