"""What may be assumed of who carries messages between the processes of a job."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Messages(Protocol):
    """Host messages among the processes of a job; `braidax.comm.Communicator` is one.

    A value is a buffer of bytes. All processes call `all_gather` and `all_to_all` in the same order. Messages of one
    tag from one process to another arrive in the order in which they were sent, and those of another tag wait for
    whoever receives them, on any thread. A wait that takes longer than `timeout_seconds`, which may be set, and the
    loss of a process are errors.
    """

    timeout_seconds: float

    @property
    def rank(self) -> int:
        """Of this process."""
        ...

    @property
    def size(self) -> int:
        """The number of processes."""
        ...

    @property
    def hosts(self) -> Sequence[Any]:
        """The host of each process, in their order: equal for processes on the same one."""
        ...

    def send(self, value: Any, dest: int, *, tag: int = 0) -> None:
        """Sends a value to a process; returns when the value may be changed, of a few KiB at once."""
        ...

    def recv(self, source: int, *, tag: int = 0) -> Any:
        """Returns the next value that a process sent under a tag."""
        ...

    def all_gather(self, value: Any) -> list[Any]:
        """Returns the values of all processes in their order."""
        ...

    def all_to_all(self, parts: Sequence[Any]) -> list[Any]:
        """Returns what every process has for this one, in their order. **Arguments:** `parts`: one for each process."""
        ...
