"""What process 0 tells the others of when checkpoints are due."""

from typing import Protocol, final, runtime_checkable

from braidax.connections.coordination import Coordination
from braidax.errors import CheckpointError

_MAX_MESSAGES = 16  # that are kept for those that lag behind


@runtime_checkable
class Announcing(Protocol):
    """Messages from process 0 to all others, in order. **Fields:** `process`: this one."""

    process: int

    def tell(self, message: bytes) -> None:
        """Sends a message, on process 0, and does not wait. **Raises:** `CommError` where that cannot be."""
        ...

    def hear(self) -> list[bytes]:
        """Returns messages that have come since the last call, and does not wait.

        **Raises:** as `tell`; `CheckpointError` when this process has missed one.
        """
        ...

    def wait(self) -> bytes:
        """Waits for the next message. **Raises:** as `tell`; `WaitTimeout` at the limit."""
        ...


@final
class Announcements:
    """Such messages, through JAX's coordination service. A call that does not wait takes about as long as a ping.

    **Arguments:** `service`: a folder of its own, the same on all processes. `process`: this one. `timeout_seconds`:
    the limit of `wait`.
    """

    def __init__(self, service: Coordination, *, process: int, timeout_seconds: float) -> None:
        self.process = process
        self._messages = service
        self._timeout_seconds = timeout_seconds
        self._num_messages = 0

    def tell(self, message: bytes) -> None:
        """As of `Announcing`."""
        self._messages.set(str(self._num_messages), message)
        if self._num_messages >= _MAX_MESSAGES:
            self._messages.delete(str(self._num_messages - _MAX_MESSAGES))
        self._num_messages += 1

    def hear(self) -> list[bytes]:
        """As of `Announcing`."""
        messages = {int(number): message for number, message in self._messages.below().items()}
        heard: list[bytes] = []
        while self._num_messages in messages:
            heard.append(messages[self._num_messages])
            self._num_messages += 1
        if messages and max(messages) >= self._num_messages:
            raise CheckpointError(
                f"process {self.process} is too far behind process 0, which has told {max(messages) + 1} times when a "
                f"checkpoint is due while this one heard {self._num_messages}: expected all processes to call `update` "
                "after the same steps"
            )
        return heard

    def wait(self) -> bytes:
        """As of `Announcing`."""
        message = self._messages.get(
            str(self._num_messages),
            meaning="process 0, which it is ahead of, to say when the next checkpoint is due",
            remedy="expected all processes to call `update` after the same steps; has process 0 left the loop? If it "
            "is only slow, raise timeout_seconds=",
            timeout_seconds=self._timeout_seconds,
        )
        self._num_messages += 1
        return message
