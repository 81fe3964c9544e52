"""What a rank can do in a group, as algorithms that have been checked and not yet begun."""

from collections.abc import Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from braidax.comm.collectives import reductions, values
from braidax.comm.messages import Value
from braidax.comm.port import COLLECTIVE, MAX_NUMBER, POINT_TO_POINT, Port, Steps, tag_of
from braidax.comm.progress import Progress
from braidax.errors import ArgumentError


@final
class Group:
    """Some ranks of a world, seen from one of them. Its methods are those of `Communicator`.

    **Arguments:** `progress`: moves the messages. `number`: of the group in the world. `ranks`: of the members in the
    world, by rank in the group. `rank`: in the group. `hosts`: a number for each member's host.
    """

    def __init__(
        self, progress: Progress, *, number: int, ranks: Sequence[int], rank: int, hosts: Sequence[int]
    ) -> None:
        self.progress = progress
        self.number = number
        self.ranks = ranks
        self.rank = rank
        self.size = len(ranks)
        self.hosts = hosts
        self._num_collectives = 0

    def send(self, value: Value, dest: int, tag: int) -> Steps[None]:
        """Returns the algorithm of `Communicator.send`."""
        return values.send(self._point(dest, "dest", tag), dest, value)

    def recv(self, source: int, tag: int) -> Steps[Value]:
        """Returns the algorithm of `Communicator.recv`."""
        return values.receive(self._point(source, "source", tag), source)

    def barrier(self) -> Steps[None]:
        """Returns the algorithm of `Communicator.barrier`."""
        return values.barrier(self._next())

    def broadcast(self, value: Value, root: int) -> Steps[Value]:
        """Returns the algorithm of `Communicator.broadcast`."""
        self.check_rank(root, "root")
        return values.broadcast(self._next(), value, root)

    def gather(self, value: Value, root: int) -> Steps[list[Value]]:
        """Returns the algorithm of `Communicator.gather`."""
        self.check_rank(root, "root")
        return values.gather(self._next(), value, root)

    def all_gather(self, value: Value) -> Steps[list[Value]]:
        """Returns the algorithm of `Communicator.all_gather`."""
        return values.all_gather(self._next(), value)

    def reduce(self, array: NDArray[Any], operation: np.ufunc, root: int) -> Steps[NDArray[Any]]:
        """Returns the algorithm of `Communicator.reduce`."""
        self.check_rank(root, "root")
        _check_operands(array, operation)
        return reductions.reduce(self._next(), array, operation, root)

    def all_reduce(self, array: NDArray[Any], operation: np.ufunc) -> Steps[NDArray[Any]]:
        """Returns the algorithm of `Communicator.all_reduce`."""
        _check_operands(array, operation)
        return reductions.all_reduce(self._next(), array, operation)

    def reduce_scatter(self, array: NDArray[Any], operation: np.ufunc) -> Steps[NDArray[Any]]:
        """Returns the algorithm of `Communicator.reduce_scatter`."""
        _check_operands(array, operation)
        if not array.ndim or len(array) % self.size:
            raise ArgumentError(
                f"array= has shape {array.shape}: expected dim 0 to be a multiple of the {self.size} ranks; pad it"
            )
        return reductions.reduce_scatter(self._next(), array, operation)

    def all_to_all(self, parts: Sequence[Value]) -> Steps[list[Value]]:
        """Returns the algorithm of `Communicator.all_to_all`."""
        if len(parts) != self.size:
            raise ArgumentError(f"parts= has {len(parts)} values: expected one for each of the {self.size} ranks")
        return values.all_to_all(self._next(), parts)

    def check_rank(self, peer: int, name: str) -> None:
        """Raises `ArgumentError` for what is no rank of the group. **Arguments:** `name`: of the parameter."""
        if not 0 <= peer < self.size:
            raise ArgumentError(f"{name}={peer!r}: expected a rank from 0 to {self.size - 1}")

    def point_tag(self, tag: int) -> int:
        """Returns the tag of point-to-point messages. **Raises:** `ArgumentError` for a `tag` that is out of range."""
        if not 0 <= tag <= MAX_NUMBER:
            raise ArgumentError(f"tag={tag!r}: expected a whole number from 0 to {MAX_NUMBER:,}")
        return tag_of(self.number, POINT_TO_POINT, tag)

    def _point(self, peer: int, name: str, tag: int) -> Port:
        self.check_rank(peer, name)
        return Port(self.progress, self.ranks, self.rank, self.point_tag(tag), self.hosts)

    def _next(self) -> Port:
        """Returns the door for the next collective."""
        self._num_collectives = (self._num_collectives + 1) & MAX_NUMBER
        tag = tag_of(self.number, COLLECTIVE, self._num_collectives)
        return Port(self.progress, self.ranks, self.rank, tag, self.hosts)


def _check_operands(array: NDArray[Any], operation: np.ufunc) -> None:
    if operation.nin != 2 or operation.nout != 1:
        raise ArgumentError(
            f"operation={operation.__name__}: expected a ufunc of two operands and one result, such as numpy.add"
        )
    if array.dtype.hasobject:
        raise ArgumentError(f"array= has dtype={array.dtype}: expected numbers; Python objects do not travel")
