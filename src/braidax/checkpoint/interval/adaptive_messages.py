"""What process 0 tells the others of when checkpoints are due."""

import math
import time
from typing import NoReturn, Protocol, final, runtime_checkable

from jax.errors import JaxRuntimeError

from braidax.errors import CheckpointError, WaitTimeout
from braidax.program.coordination import CoordinationClient

_MAX_MESSAGES = 16  # that are kept for those that lag behind
_SLICE_SECONDS = 0.1  # of a wait inside JAX, which Ctrl-C cannot end


@runtime_checkable
class Announcing(Protocol):
    """Messages from process 0 to all others, in order. **Fields:** `process`: this one."""

    process: int

    def tell(self, message: bytes) -> None:
        """Sends a message, on process 0, and does not wait. **Raises:** `CheckpointError` where that cannot be."""
        ...

    def hear(self) -> list[bytes]:
        """Returns messages that have come since the last call, and does not wait. **Raises:** as `tell`."""
        ...

    def wait(self) -> bytes:
        """Waits for the next message. **Raises:** as `tell`; `WaitTimeout` at the limit."""
        ...


@final
class Announcements:
    """Such messages, through JAX's coordination service. A call that does not wait takes about as long as a ping.

    **Arguments:** `client`: of this process. `prefix`: of the keys, the same on all processes and used once.
    `process`: this one. `timeout_seconds`: the limit of `wait`.
    """

    def __init__(self, client: CoordinationClient, prefix: str, *, process: int, timeout_seconds: float) -> None:
        self.process = process
        self._client = client
        self._prefix = prefix
        self._timeout_seconds = timeout_seconds
        self._num_messages = 0

    def tell(self, message: bytes) -> None:
        """Sends a message, on process 0. **Raises:** `CheckpointError` when the service does not answer."""
        try:
            self._client.key_value_set_bytes(self._key(self._num_messages), message)
            if self._num_messages >= _MAX_MESSAGES:
                self._client.key_value_delete(self._key(self._num_messages - _MAX_MESSAGES))
        except JaxRuntimeError as error:
            self._lost(error)
        self._num_messages += 1

    def hear(self) -> list[bytes]:
        """Returns the messages that have come since the last call. **Raises:** as `tell`; also when it missed one."""
        try:
            found = dict(self._client.key_value_dir_get_bytes(f"{self._prefix}/"))
        except JaxRuntimeError as error:
            self._lost(error)
        messages = {int(key.rpartition("/")[2]): message for key, message in found.items()}
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
        """Waits for the next message. **Raises:** as `tell`; `WaitTimeout` at the limit."""
        deadline = time.monotonic() + self._timeout_seconds
        while (left := deadline - time.monotonic()) > 0:
            try:
                limit = math.ceil(1000 * min(left, _SLICE_SECONDS))
                message = self._client.blocking_key_value_get_bytes(self._key(self._num_messages), limit)
            except JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    self._lost(error)
                continue
            self._num_messages += 1
            return message
        raise WaitTimeout(
            f"process {self.process} is ahead of process 0, and has waited timeout_seconds="
            f"{self._timeout_seconds:g} for it to say when the next checkpoint is due: expected all processes to call "
            "`update` after the same steps; has process 0 left the loop? If it is only slow, raise the limit"
        )

    def _key(self, number: int) -> str:
        return f"{self._prefix}/{number}"

    def _lost(self, error: Exception) -> NoReturn:
        raise CheckpointError(
            f"process {self.process} cannot talk to JAX's coordination service any more "
            f"({str(error).strip().splitlines()[0]}): process 0, or another one, has ended; its log says why"
        ) from error
