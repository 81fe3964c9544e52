"""Where processes leave words for one another: JAX's coordination service, or messages of their own."""

import itertools
import json
import math
from collections.abc import Iterator
from typing import Protocol, final, runtime_checkable

from jax.errors import JaxRuntimeError

from braidax.checkpoint.interval.adaptive_messages import Announcements, Announcing
from braidax.checkpoint.messages import Messages
from braidax.errors import CheckpointError
from braidax.program.coordination import CoordinationClient

_NUMBERS = itertools.count()  # of boards, which all processes make in the same order
_FIRST_TAG = 1 << 20  # of messages; those below are for whoever else sends some


@runtime_checkable
class Board(Protocol):
    """Words by key. Process 0 writes for all others, and they write for process 0."""

    def write(self, key: str, value: bytes) -> None:
        """Leaves a word, and does not wait; the first one of a key counts. **Raises:** `CheckpointError`."""
        ...

    def read(self, key: str, source: int, seconds: float) -> bytes:
        """Returns the word that a process left. **Raises:** `TimeoutError` after some seconds; `CheckpointError`."""
        ...

    def forget(self, name: str) -> None:
        """Takes the words away whose keys begin with a name: all have read them."""
        ...

    def another(self) -> "Board":
        """Returns a board of the same processes for other words; all call this in the same order."""
        ...

    def announcements(self, name: str, timeout_seconds: float) -> Announcing:
        """Returns how process 0 tells the others things ahead. **Arguments:** `name`: is used once."""
        ...


@final
class CoordinationBoard:
    """A board in JAX's coordination service.

    **Arguments:** `client`: of this process. `process`: its index.
    """

    def __init__(self, client: CoordinationClient, process: int) -> None:
        self._client = client
        self._process = process
        self._prefix = f"braidax/checkpoint/{next(_NUMBERS)}"

    def write(self, key: str, value: bytes) -> None:
        """As of `Board`."""
        try:
            self._client.key_value_set_bytes(f"{self._prefix}/{key}", value)
        except JaxRuntimeError as error:
            if "ALREADY_EXISTS" not in str(error):
                raise self._lost(error) from error

    def read(self, key: str, source: int, seconds: float) -> bytes:
        """As of `Board`."""
        try:
            return self._client.blocking_key_value_get_bytes(f"{self._prefix}/{key}", math.ceil(1000 * seconds))
        except JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                raise TimeoutError from error
            raise self._lost(error) from error

    def forget(self, name: str) -> None:
        """As of `Board`."""
        self._client.key_value_delete(f"{self._prefix}/{name}/")

    def another(self) -> "CoordinationBoard":
        """As of `Board`."""
        return CoordinationBoard(self._client, self._process)

    def announcements(self, name: str, timeout_seconds: float) -> Announcements:
        """As of `Board`."""
        prefix = f"{self._prefix}/{name}"
        return Announcements(self._client, prefix, process=self._process, timeout_seconds=timeout_seconds)

    def _lost(self, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"process {self._process} cannot talk to JAX's coordination service any more "
            f"({str(error).strip().splitlines()[0]}): process 0, or another one, has ended; its log says why"
        )


@final
class MessageBoard:
    """A board whose words are messages, from process 0 to each other one and from them to it.

    A wait has the limit of the messages, not that of `read`.

    **Arguments:** `messages`: of this process. `tags`: of the boards that follow, the first ones for this.
    """

    def __init__(self, messages: Messages, tags: "Iterator[int] | None" = None) -> None:
        self._messages = messages
        self._tags = itertools.count(_FIRST_TAG) if tags is None else tags
        self._words, self._ahead = (_Line(messages, next(self._tags)) for _ in range(2))

    def write(self, key: str, value: bytes) -> None:
        """As of `Board`."""
        self._words.write(key, value)

    def read(self, key: str, source: int, seconds: float) -> bytes:
        """As of `Board`."""
        return self._words.read(key, source)

    def forget(self, name: str) -> None:
        """Does nothing: what was read is gone."""

    def another(self) -> "MessageBoard":
        """As of `Board`."""
        return MessageBoard(self._messages, self._tags)

    def announcements(self, name: str, timeout_seconds: float) -> "AnnouncedByMessage":
        """As of `Board`."""
        return AnnouncedByMessage(self._ahead, name, self._messages.rank)


class _Line:
    """Messages of one tag, each with a key."""

    def __init__(self, messages: Messages, tag: int) -> None:
        self._messages = messages
        self._tag = tag

    def write(self, key: str, value: bytes) -> None:
        """Sends a value from process 0 to all others, or from another one to it."""
        word = json.dumps(key).encode() + b"\0" + value
        for process in [0] if self._messages.rank else range(1, self._messages.size):
            self._messages.send(word, process, tag=self._tag)

    def read(self, key: str, source: int) -> bytes:
        """Waits for the first message of a key; those before it nobody has asked for, and they go."""
        while True:
            found, _, value = bytes(self._messages.recv(source, tag=self._tag)).partition(b"\0")
            if json.loads(found) == key:
                return value


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
