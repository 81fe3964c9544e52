"""The operations of a communicator, begun and not waited for."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from braidax.comm.group import BETWEEN_TWO, Group
from braidax.comm.group_messages import Steps
from braidax.comm.messages import Value
from braidax.comm.request import Request

T = TypeVar("T")


@final
class Starting:
    """Begins what the methods of `Communicator` with the same names do, and returns a `Request` of their result.

    **Arguments:** `group`: of the communicator. `limit`: returns its `timeout_seconds`.
    """

    def __init__(self, group: Group, limit: Callable[[], float]) -> None:
        self._group = group
        self._limit = limit

    def send(self, value: Value, dest: int, *, tag: int = 0) -> Request[None]:
        """Begins `Communicator.send`."""
        return self._begin("send", self._group.send, value, dest, tag)

    def recv(self, source: int, *, tag: int = 0) -> Request[Value]:
        """Begins `Communicator.recv`."""
        return self._begin("recv", self._group.recv, source, tag)

    def barrier(self) -> Request[None]:
        """Begins `Communicator.barrier`."""
        return self._begin("barrier", self._group.arrays.barrier)

    def broadcast(self, value: Value = b"", *, root: int = 0) -> Request[Value]:
        """Begins `Communicator.broadcast`."""
        return self._begin("broadcast", self._group.broadcast, value, root)

    def broadcast_into(self, array: Any, *, root: int = 0) -> Request[Any]:
        """Begins `Communicator.broadcast_into`."""
        return self._begin("broadcast_into", self._group.broadcast_into, array, root)

    def gather(self, value: Value, *, root: int = 0) -> Request[list[Value]]:
        """Begins `Communicator.gather`."""
        return self._begin("gather", self._group.gather, value, root)

    def all_gather(self, value: Value) -> Request[list[Value]]:
        """Begins `Communicator.all_gather`."""
        return self._begin("all_gather", self._group.all_gather, value)

    def reduce(self, array: Any, operation: np.ufunc = np.add, *, root: int = 0) -> Request[NDArray[Any]]:
        """Begins `Communicator.reduce`."""
        return self._begin("reduce", self._group.reduce, array, operation, root)

    def all_reduce(
        self, array: Any, operation: np.ufunc = np.add, *, out: NDArray[Any] | None = None
    ) -> Request[NDArray[Any]]:
        """Begins `Communicator.all_reduce`."""
        return self._begin("all_reduce", self._group.arrays.all_reduce, array, operation, out)

    def reduce_scatter(
        self, array: Any, operation: np.ufunc = np.add, *, out: NDArray[Any] | None = None
    ) -> Request[NDArray[Any]]:
        """Begins `Communicator.reduce_scatter`."""
        return self._begin("reduce_scatter", self._group.arrays.reduce_scatter, array, operation, out)

    def all_to_all_into(self, array: NDArray[Any], out: NDArray[Any]) -> Request[NDArray[Any]]:
        """Begins `Communicator.all_to_all_into`."""
        return self._begin("all_to_all_into", self._group.arrays.all_to_all_into, array, out)

    def all_gather_into(self, array: NDArray[Any], out: NDArray[Any]) -> Request[NDArray[Any]]:
        """Begins `Communicator.all_gather_into`."""
        return self._begin("all_gather_into", self._group.arrays.all_gather_into, array, out)

    def all_to_all(self, parts: Sequence[Value]) -> Request[list[Value]]:
        """Begins `Communicator.all_to_all`."""
        return self._begin("all_to_all", self._group.all_to_all, parts)

    def _begin(self, name: str, begin: Callable[..., Steps[T]], *arguments: Any) -> Request[T]:
        limit = self._limit()
        group = self._group

        def failed(error: BaseException) -> None:
            group.failed(name, error, limit)

        try:
            progress = group.progress if name in BETWEEN_TWO else group.domain
            return Request(progress, begin(*arguments), limit, failed)
        except BaseException as error:
            failed(error)
            raise
