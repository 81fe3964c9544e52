"""What the processes that save together tell each other, over JAX's coordination service or messages of their own.

Process 0 leads: it tells the others what to do, hears from each how that went, and tells what came of it. Any thread
may wait here, within a limit; no device is involved.
"""

import contextlib
import json
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, final, runtime_checkable

import jax

from braidax.checkpoint.interval.adaptive_messages import Announcements, Announcing
from braidax.connections.coordination import Coordination
from braidax.connections.raised import Raised
from braidax.errors import BraidaxError, CheckpointError, PeerLost, WaitTimeout
from braidax.program.coordination import coordination

_SLICE_SECONDS = 0.2  # of a wait, which `leave` ends


@runtime_checkable
class Channel(Protocol):
    """Words by key. Process 0 writes for all others, and they write for process 0."""

    def write(self, key: str, value: bytes) -> None:
        """Leaves a word, and does not wait; the first one of a key counts. **Raises:** `CommError`."""
        ...

    def read(self, key: str, source: int, seconds: float) -> bytes:
        """Returns the word that a process left. **Raises:** `TimeoutError` after some seconds; `CommError`."""
        ...

    def forget(self, name: str) -> None:
        """Takes the words away whose keys begin with a name: all have read them."""
        ...

    def another(self) -> "Channel":
        """Returns a channel of the same processes for other words; all call this in the same order."""
        ...

    def announcements(self, name: str, timeout_seconds: float) -> Announcing:
        """Returns how process 0 tells the others things ahead. **Arguments:** `name`: is used once."""
        ...


@final
class CoordinationChannel:
    """A channel in JAX's coordination service. **Arguments:** `service`: of this process. `process`: its index."""

    def __init__(self, service: Coordination, process: int) -> None:
        self._service, self._process = service, process
        self._words = service.numbered("checkpoint")

    def write(self, key: str, value: bytes) -> None:
        """As of `Channel`."""
        self._words.set(key, value, known="keep")

    def read(self, key: str, source: int, seconds: float) -> bytes:
        """As of `Channel`."""
        found = self._words.find(key, timeout_seconds=seconds)
        if found is None:
            raise TimeoutError
        return found

    def forget(self, name: str) -> None:
        """As of `Channel`."""
        self._words.delete(name)

    def another(self) -> "CoordinationChannel":
        """As of `Channel`."""
        return CoordinationChannel(self._service, self._process)

    def announcements(self, name: str, timeout_seconds: float) -> Announcements:
        """As of `Channel`."""
        return Announcements(self._words.under(name), process=self._process, timeout_seconds=timeout_seconds)


@dataclass
class _Left:
    """Why processes wait for nobody any more, None as long as they do."""

    error: PeerLost | None = None


class Processes:
    """The processes that save together; of one alone, all waits are over at once.

    **Arguments:** `channel`: of this process, None where it is alone. `index`: of this one, of `count`.
    `timeout_seconds`: the limit of every wait.
    """

    def __init__(self, channel: Channel | None, index: int, count: int, timeout_seconds: float) -> None:
        self.index = index
        self.count = count
        self.timeout_seconds = timeout_seconds
        self._channel = channel
        self._over: str | None = None
        self._withdrawn: dict[str, str] = {}
        self._left = _Left()

    def another(self) -> "Processes":
        """Returns the same processes, for messages of their own; all call this in the same order."""
        channel = None if self._channel is None else self._channel.another()
        found = Processes(channel, self.index, self.count, self.timeout_seconds)
        found._left = self._left
        return found

    def lead(self, name: str, make: Callable[[], str]) -> str:
        """Lets process 0 make a value, and returns it on all.

        **Arguments:** `name`: of the message, used once. `make`: is called on process 0 only.

        **Raises:** what `make` raised, on the others as `CheckpointError`; `WaitTimeout`.
        """
        if self.index:
            return self.follow(name)
        try:
            self.check(name)
            value = make()
        except BaseException as error:
            self.tell(name, error=error)
            raise
        self.tell(name, value)
        return value

    def withdraw(self, name: str, reason: str) -> None:
        """Ends the others' wait for this process in what goes by a name, to which it has nothing to say any more.

        What it has said of that before stands. On process 0 nothing can come of it any more.
        """
        if self._channel is None:
            return
        if self.index:
            self.say(name, reason)
            return
        self._withdrawn[name] = f"process 0 takes no part in it any more: {reason}"
        for each in (f"{name}/begin", name):
            self.tell(each, error=CheckpointError(self._withdrawn[name]))

    def leave(self, error: PeerLost) -> None:
        """Ends all waits of this process, on any thread, by `CheckpointError` from this error: its process is gone.

        Those that were made of these by `another` are meant as well.
        """
        self._left.error = error

    def check(self, name: str) -> None:
        """Raises `CheckpointError` when this process has withdrawn from what goes by a name."""
        if name in self._withdrawn:
            raise CheckpointError(self._withdrawn[name])

    def tell(self, name: str, value: str = "", *, error: BaseException | None = None) -> None:
        """Tells the others a value, or what went wrong; for process 0. The first word of a name counts."""
        said = {"value": value} if error is None else {"error": said_of(error).to_text()}
        self._set(f"{name}/told", json.dumps(said).encode())

    def follow(self, name: str) -> str:
        """Returns what process 0 tells; for the others. **Raises:** `CheckpointError`, `WaitTimeout`."""
        told = self._get(f"{name}/told", 0, time.monotonic() + self.timeout_seconds)
        if told is None:
            raise WaitTimeout(
                f"process {self.index} heard nothing from process 0 for timeout_seconds={self.timeout_seconds:g}: "
                "expected every process to make the same calls of its Checkpointer, in the same order; the log of "
                "process 0 says what it did. If it is only slow, raise the limit"
            )
        content: dict[str, Any] = json.loads(told)
        if "error" in content:
            raised = Raised.from_text(content["error"])
            raise CheckpointError(raised.words) from raised.error(f"process 0: {raised.words}", 0)
        return content["value"]

    def say(self, name: str, value: str) -> None:
        """Says to process 0 how it went here; for the others. The first word of a name counts."""
        self._set(f"{name}/said/{self.index}", value.encode())

    def hear(self, name: str, own: str) -> dict[int, str]:
        """Returns what each process says, `own` of this one; for process 0.

        **Raises:** `WaitTimeout` naming those that say nothing.
        """
        deadline = time.monotonic() + self.timeout_seconds
        found = {0: own}
        for process in range(1, self.count):
            value = self._get(f"{name}/said/{process}", process, deadline)
            if value is not None:
                found[process] = value.decode()
        missing = [process for process in range(self.count) if process not in found]
        if missing:
            raise WaitTimeout(
                f"process 0 heard nothing from process {', '.join(map(str, missing))} for timeout_seconds="
                f"{self.timeout_seconds:g}: expected every process to make the same calls of its Checkpointer, in the "
                "same order; its log says what it did. If it is only slow, raise the limit"
            )
        # Whoever speaks here has left the message before, whose keys can go.
        if self._channel is not None and self._over is not None:
            self._channel.forget(self._over)
        self._over = name
        return found

    def conclude(self, name: str, own: str, judge: Callable[[Mapping[int, str]], str]) -> str:
        """Lets every process say something, and process 0 judge it. **Returns:** the judgment, on all.

        **Raises:** as `lead`, and `WaitTimeout` naming those that say nothing.
        """
        if self.index:
            self.say(name, own)
        return self.lead(name, lambda: judge(self.hear(name, own)))

    @contextlib.contextmanager
    def agreeing(self, name: str) -> Generator[None]:
        """Runs what is inside on all processes, and raises on all at once what it raised on one.

        **Arguments:** `name`: of the messages about it, used once.

        **Raises:** what was raised inside, on the others as `CheckpointError`; as `conclude`.
        """
        try:
            yield
        except BaseException as error:
            with contextlib.suppress(BraidaxError):  # where nobody can be told, nobody waits
                self.withdraw(name, said_of(error).words)
            raise

        def judge(words: Mapping[int, str]) -> str:
            for process, word in words.items():
                if word:
                    raise CheckpointError(f"process {process} takes no part in it any more: {word}")
            return ""

        self.conclude(name, "", judge)

    def announcements(self, name: str) -> Announcing | None:
        """Returns how process 0 tells the others things ahead, None where there are none. `name`: is used once."""
        return None if self._channel is None else self._channel.announcements(name, self.timeout_seconds)

    def _set(self, key: str, value: bytes) -> None:
        if self._channel is not None:
            self._channel.write(key, value)

    def _get(self, key: str, source: int, deadline: float) -> bytes | None:
        assert self._channel is not None
        while True:
            if self._left.error is not None:
                raise CheckpointError(str(self._left.error)) from self._left.error
            left = max(0.001, deadline - time.monotonic())
            try:
                return self._channel.read(key, source, min(left, _SLICE_SECONDS))
            except TimeoutError as error:
                if isinstance(error, WaitTimeout):
                    raise
                if time.monotonic() >= deadline:
                    return None


def all_processes(timeout_seconds: float) -> Processes:
    """Returns all processes of JAX."""
    service = coordination()
    if service is None or jax.process_count() == 1:
        return alone(timeout_seconds)
    index = jax.process_index()
    return Processes(CoordinationChannel(service, index), index, jax.process_count(), timeout_seconds)


def alone(timeout_seconds: float) -> Processes:
    """Returns this process alone."""
    return Processes(None, 0, 1, timeout_seconds)


def said_of(error: BaseException) -> Raised:
    """Returns what other processes are told of an error; what is of checkpoints says so itself."""
    return Raised.of(error, words=str(error) if isinstance(error, CheckpointError | WaitTimeout) else None)
