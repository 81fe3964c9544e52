"""JAX's coordination service, through which the processes of `jax.distributed` talk on the host."""

import contextlib
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from jax._src.distributed import global_state
from jax.errors import JaxRuntimeError

_BUSY = "braidax/busy/"


@runtime_checkable
class CoordinationClient(Protocol):
    """What is used of this process's client. JAX has no public name for it yet."""

    def key_value_set_bytes(self, key: str, value: bytes, allow_overwrite: bool = False) -> None:
        """Sets a value."""
        ...

    def key_value_dir_get_bytes(self, key: str) -> Sequence[tuple[str, bytes]]:
        """Returns the keys below a folder, and their values."""
        ...

    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes:
        """Waits for a value; raises `JaxRuntimeError` with DEADLINE_EXCEEDED."""
        ...

    def key_value_increment(self, key: str, increment: int) -> int:
        """Adds to a counter, and returns the sum."""
        ...

    def key_value_delete(self, key: str) -> None:
        """Forgets a key, and those below it."""
        ...


def coordination_client() -> CoordinationClient | None:
    """Returns the client, or None in a process that has not called `jax.distributed.initialize`."""
    client: CoordinationClient | None = global_state.client
    return client


def say_busy(words: str) -> None:
    """Lets the other processes of the job know that this one is at work, though it does not come to where they wait."""
    client = coordination_client()
    if client is not None:
        with contextlib.suppress(JaxRuntimeError):  # a service that has ended is told of by those who need it
            client.key_value_set_bytes(f"{_BUSY}{global_state.process_id}", words.encode(), allow_overwrite=True)


def busy(client: CoordinationClient) -> dict[int, bytes]:
    """Returns what each process said last of its work; what a process is at has moved on where that has changed."""
    return {int(key.rpartition("/")[2]): words for key, words in client.key_value_dir_get_bytes(_BUSY)}
