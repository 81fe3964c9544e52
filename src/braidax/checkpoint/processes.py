"""What the processes that share a folder tell each other: host messages over JAX's coordination service.

Process 0 leads: it tells the others what to do, hears from each how that went, and tells what came of it. Any thread
may wait here, within a limit; no device is involved.
"""

import contextlib
import itertools
import json
import math
import time
from collections.abc import Callable, Generator, Mapping
from typing import Any, TypeVar

import jax
from jax.errors import JaxRuntimeError

from braidax.checkpoint.interval.adaptive_messages import Announcements
from braidax.errors import CheckpointError, WaitTimeout
from braidax.program.coordination import CoordinationClient, coordination_client

_SLICE_SECONDS = 0.2  # of a wait inside JAX, which Ctrl-C cannot end
_NUMBERS = itertools.count()  # of groups, which all processes make in the same order
_Result = TypeVar("_Result")


class _IsSet(Exception):
    """A key has a value, which nothing overwrites."""


class Processes:
    """The processes that share a folder; of one alone, all waits are over at once.

    **Arguments:** `client`: of this process, None where it is alone. `index`: of this one, of `count`.
    `timeout_seconds`: the limit of every wait.
    """

    def __init__(self, client: CoordinationClient | None, index: int, count: int, timeout_seconds: float) -> None:
        self.index = index
        self.count = count
        self.timeout_seconds = timeout_seconds
        self._client = client
        self._prefix = f"braidax/checkpoint/{next(_NUMBERS) if client is not None else 0}"
        self._over: str | None = None
        self._withdrawn: dict[str, str] = {}
        self._left: str | None = None

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
        if self._client is None:
            return
        if self.index:
            self.say(name, reason)
            return
        self._withdrawn[name] = f"process 0 takes no part in it any more: {reason}"
        for each in (f"{name}/begin", name):
            self.tell(each, error=CheckpointError(self._withdrawn[name]))

    def leave(self, reason: str) -> None:
        """Ends all waits of this process, on any thread, by `CheckpointError`: another process will not come."""
        self._left = reason

    def check(self, name: str) -> None:
        """Raises `CheckpointError` when this process has withdrawn from what goes by a name."""
        if name in self._withdrawn:
            raise CheckpointError(self._withdrawn[name])

    def tell(self, name: str, value: str = "", *, error: BaseException | None = None) -> None:
        """Tells the others a value, or what went wrong; for process 0. The first word of a name counts."""
        said = {"value": value} if error is None else {"error": _said(error)}
        self._set(f"{name}/told", json.dumps(said).encode())

    def follow(self, name: str) -> str:
        """Returns what process 0 tells; for the others. **Raises:** `CheckpointError`, `WaitTimeout`."""
        told = self._get(f"{name}/told", time.monotonic() + self.timeout_seconds)
        if told is None:
            raise WaitTimeout(
                f"process {self.index} heard nothing from process 0 for timeout_seconds={self.timeout_seconds:g}: "
                "expected every process to make the same calls of its Checkpointer, in the same order; the log of "
                "process 0 says what it did. If it is only slow, raise the limit"
            )
        content: dict[str, Any] = json.loads(told)
        if "error" in content:
            raise CheckpointError(content["error"])
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
            value = self._get(f"{name}/said/{process}", deadline)
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
        if self._client is not None and self._over is not None:
            self._client.key_value_delete(f"{self._prefix}/{self._over}/")
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
            with contextlib.suppress(CheckpointError):  # where nobody can be told, nobody waits
                self.withdraw(name, _said(error))
            raise

        def judge(words: Mapping[int, str]) -> str:
            for process, word in words.items():
                if word:
                    raise CheckpointError(f"process {process} takes no part in it any more: {word}")
            return ""

        self.conclude(name, "", judge)

    def announcements(self, name: str) -> Announcements | None:
        """Returns how process 0 tells the others things ahead, None where there are none. `name`: is used once."""
        if self._client is None:
            return None
        prefix = f"{self._prefix}/{name}"
        return Announcements(self._client, prefix, process=self.index, timeout_seconds=self.timeout_seconds)

    def _set(self, key: str, value: bytes) -> None:
        if self._client is not None:
            with contextlib.suppress(_IsSet):
                self._reach(lambda client: client.key_value_set_bytes(f"{self._prefix}/{key}", value))

    def _get(self, key: str, deadline: float) -> bytes | None:
        while True:
            if self._left is not None:
                raise CheckpointError(self._left)
            left = max(0.001, deadline - time.monotonic())
            limit = math.ceil(1000 * min(left, _SLICE_SECONDS))
            try:
                return self._reach(
                    lambda client, limit=limit: client.blocking_key_value_get_bytes(f"{self._prefix}/{key}", limit)
                )
            except TimeoutError:
                if time.monotonic() >= deadline:
                    return None

    def _reach(self, ask: Callable[[CoordinationClient], _Result]) -> _Result:
        assert self._client is not None
        try:
            return ask(self._client)
        except JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                raise TimeoutError from error
            if "ALREADY_EXISTS" in str(error):
                raise _IsSet from error
            reason = str(error).strip().splitlines()[0]
            raise CheckpointError(
                f"process {self.index} cannot talk to JAX's coordination service any more ({reason}): process 0, or "
                "another one, has ended; its log says why"
            ) from error


def all_processes(timeout_seconds: float) -> Processes:
    """Returns all processes of the job."""
    client = coordination_client()
    if client is None or jax.process_count() == 1:
        return alone(timeout_seconds)
    return Processes(client, jax.process_index(), jax.process_count(), timeout_seconds)


def alone(timeout_seconds: float) -> Processes:
    """Returns this process alone."""
    return Processes(None, 0, 1, timeout_seconds)


def _said(error: BaseException) -> str:
    return str(error) if isinstance(error, CheckpointError | WaitTimeout) else f"{type(error).__name__}: {error}"
