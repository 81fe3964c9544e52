"""Messages between the processes of a job: what may be assumed of who carries them, and a channel of them."""

import itertools
import secrets
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, final, runtime_checkable

import jax

from braidax.checkpoint.processes import Processes, alone
from braidax.errors import ArgumentError

_FIRST_TAG = 1 << 20  # of messages; those below are for whoever else sends some


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


def processes_of(messages: Messages, timeout_seconds: float) -> Processes:
    """Returns the processes that send one another messages, which need not be JAX's.

    **Raises:** `ArgumentError` where those of JAX have other ranks than their indices.
    """
    rank, size = messages.rank, messages.size
    if jax.distributed.is_initialized() and (jax.process_index() != rank or jax.process_count() > size):
        raise ArgumentError(
            f"processes= has rank {rank} of {size}, but this is process {jax.process_index()} of "
            f"{jax.process_count()} of JAX: expected the processes of JAX to have the ranks of their indices, and "
            "others the ranks that follow; connect them in that order"
        )
    if size == 1:
        return alone(timeout_seconds)
    session = secrets.token_bytes(8)  # so that nothing is heard that others left who had these messages before
    for process in range(1, size) if rank == 0 else ():
        messages.send(session, process, tag=_FIRST_TAG)
    session = bytes(session if rank == 0 else messages.recv(0, tag=_FIRST_TAG))
    return Processes(MessageChannel(messages, session), rank, size, timeout_seconds)


@final
class MessageChannel:
    """A channel whose words are messages, from process 0 to each other one and from them to it.

    A wait has the limit of the messages, not that of `read`.

    **Arguments:** `messages`: of this process. `session`: what all words begin with, the same on all processes and
    used once. `tags`: of the channels that follow, the first ones for this.
    """

    def __init__(self, messages: Messages, session: bytes, tags: "Iterator[int] | None" = None) -> None:
        self._messages = messages
        self._session = session
        self._tags = itertools.count(_FIRST_TAG + 1) if tags is None else tags
        self._words, self._ahead = (_Line(messages, session, next(self._tags)) for _ in range(2))

    def write(self, key: str, value: bytes) -> None:
        """As of `Channel`."""
        self._words.write(key, value)

    def read(self, key: str, source: int, seconds: float) -> bytes:
        """As of `Channel`."""
        return self._words.read(key, source)

    def forget(self, name: str) -> None:
        """Does nothing: what was read is gone."""

    def another(self) -> "MessageChannel":
        """As of `Channel`."""
        return MessageChannel(self._messages, self._session, self._tags)

    def announcements(self, name: str, timeout_seconds: float) -> "AnnouncedByMessage":
        """As of `Channel`."""
        return AnnouncedByMessage(self._ahead, name, self._messages.rank)


class _Line:
    """Messages of one tag, each with a key."""

    def __init__(self, messages: Messages, session: bytes, tag: int) -> None:
        self._messages = messages
        self._session = session
        self._tag = tag

    def write(self, key: str, value: bytes) -> None:
        """Sends a value from process 0 to all others, or from another one to it."""
        word = self._begun(key) + value
        for process in [0] if self._messages.rank else range(1, self._messages.size):
            self._messages.send(word, process, tag=self._tag)

    def read(self, key: str, source: int) -> bytes:
        """Waits for the first message of a key; those before it nobody has asked for, and they go."""
        begun = self._begun(key)
        while True:
            word = bytes(self._messages.recv(source, tag=self._tag))
            if word.startswith(begun):
                return word.removeprefix(begun)

    def _begun(self, key: str) -> bytes:
        return self._session + key.encode() + b"\0"


@final
class AnnouncedByMessage:
    """Messages from process 0 to all others, in order; they are not seen before somebody waits for them.

    **Arguments:** `line`: what they come by. `name`: theirs, used once. `process`: this one.
    """

    def __init__(self, line: _Line, name: str, process: int) -> None:
        self.process = process
        self._line = line
        self._name = name
        self._num_messages = 0

    def tell(self, message: bytes) -> None:
        """As of `Announcing`."""
        self._line.write(self._key(), message)

    def hear(self) -> list[bytes]:
        """Returns nothing: whoever comes to where it needs a message waits for it, and it came long ago."""
        return []

    def wait(self) -> bytes:
        """As of `Announcing`."""
        return self._line.read(self._key(), 0)

    def _key(self) -> str:
        self._num_messages += 1
        return f"{self._name}/{self._num_messages}"
