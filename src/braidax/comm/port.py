"""A rank's door to the others of its group, through which algorithms send and receive."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from braidax.comm.messages import bytes_of
from braidax.comm.progress import Progress
from braidax.comm.transports.transport import Buffer, Operation
from braidax.errors import CommError

T = TypeVar("T")
Steps = Generator[Sequence[Operation], None, T]
"""An algorithm: it begins operations, yields those that must have ended before it goes on, and returns its result."""

POINT_TO_POINT, COLLECTIVE = 0, 1
MAX_NUMBER = (1 << 30) - 1
MAX_GROUPS = 1 << 12


@final
@dataclass(frozen=True)
class Port:
    """Sends to and receives from the ranks of a group, under one tag.

    **Arguments:** `progress`: moves the messages. `ranks`: of the members in the world, by rank in the group. `rank`:
    in the group. `tag`: see `tag_of`. `hosts`: a number for each member's host, the same for ranks on the same one.
    """

    progress: Progress
    ranks: Sequence[int]
    rank: int
    tag: int
    hosts: Sequence[int]

    @property
    def size(self) -> int:
        """The number of members."""
        return len(self.ranks)

    def send(self, peer: int, *buffers: Buffer) -> Operation:
        """Begins to send the concatenation of buffers to a member."""
        return self.progress.send(self.ranks[peer], self.tag, buffers)

    def receive(self, peer: int, buffer: Buffer) -> Operation:
        """Begins to receive from a member at most as many bytes as the buffer has."""
        return self.progress.receive(self.ranks[peer], self.tag, buffer)

    def send_array(self, peer: int, array: NDArray[Any]) -> Operation:
        """Begins to send the bytes of a contiguous array."""
        return self.send(peer, bytes_of(array))

    def receive_array(self, peer: int, array: NDArray[Any]) -> Operation:
        """Begins to receive into a contiguous array, whole: see `check_whole`."""
        return self.receive(peer, bytes_of(array))

    def check_whole(self, operation: Operation, array: NDArray[Any]) -> None:
        """Raises `CommError` when what has been received does not fill the array."""
        if operation.num_bytes != array.nbytes and operation.error is None:
            raise CommError(
                f"{self.progress.world.describe(operation.peer)} sent {operation.num_bytes:,} bytes where "
                f"{array.nbytes:,} were expected; do all ranks call the same operations in the same order, with the "
                "same shapes and dtypes?"
            )

    def among(self, members: Sequence[int]) -> "Port":
        """Returns the door to some members only, this rank among them, by their ranks in this group."""
        return Port(
            self.progress,
            [self.ranks[member] for member in members],
            members.index(self.rank),
            self.tag,
            [self.hosts[member] for member in members],
        )


def tag_of(group: int, kind: int, number: int) -> int:
    """Returns the tag of a message: what keeps groups, point-to-point messages and collectives apart.

    **Arguments:** `group`: below `MAX_GROUPS`. `kind`: `POINT_TO_POINT` or `COLLECTIVE`. `number`: the user's tag, or
    which collective of its group this is; up to `MAX_NUMBER`.
    """
    return group << 32 | kind << 30 | number


def together(parts: Sequence[Steps[Any]]) -> Steps[list[Any]]:
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


def scratch(like: NDArray[Any], num_elements: int) -> NDArray[Any]:
    """Returns memory for some elements of an array's dtype."""
    return np.empty(num_elements, like.dtype)
