"""What the processes that load one batch tell each other, on the host: that they mean the same, and that all are ready.

A device collective with a process that has failed never ends, so none may begin before all are known to be ready: a
batch is handed out once every process has read its part. A thread finds that out ahead, while the step computes. JAX's
coordination service carries it: for each round one counter, which every process raises, and one verdict, which the last
to come sets, or the first to fail.
"""

import contextlib
import hashlib
import itertools
import json
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NoReturn

import jax
from jax.errors import JaxRuntimeError

from braidax.data.replicas import Replicas, Sums, compare, told
from braidax.data.threads import Threads
from braidax.errors import ArgumentError, BraidaxError, ProcessFailed, WaitTimeout
from braidax.program.coordination import CoordinationClient, coordination_client

_SLICE_SECONDS = 0.1  # of a wait inside JAX, which neither Ctrl-C nor `close` can end
_CLOSE_SECONDS = 5.0  # which a thread that waits there, or for a device, has to end
_GRACE_SECONDS = 2.0  # which others have to say that they too waited in vain
_NUMBERS: Counter[str] = Counter()  # of loaders made by the same processes, which they make in the same order
_VERDICT_BATCHES = 2  # after which a comparison has to be over
_FINE = b"fine"


class Together:
    """The processes of a loader.

    **Arguments:** `client`: of this process. `processes`: their indices, this one's among them. `process`: this one.
    """

    def __init__(self, client: CoordinationClient, processes: Sequence[int], process: int) -> None:
        self.processes = sorted(processes)
        self.process = process
        self._client = client
        among = hashlib.blake2b(str(self.processes).encode(), digest_size=8).hexdigest()
        self._prefix = f"braidax/loader/{among}/{_NUMBERS[among]}"
        _NUMBERS[among] += 1
        self._num_passes = itertools.count()

    def meet(self, name: str, facts: Mapping[str, str] | BaseException, *, timeout_seconds: float) -> None:
        """Compares what the processes are about to do.

        **Arguments:** `name`: of the place, come to once. `facts`: by name, in words; or why this process can do
        nothing.

        **Raises:** on all processes: `ArgumentError` showing what differs; `ProcessFailed` naming one that can do
        nothing, which raises its own error; `WaitTimeout` naming those that did not come.
        """
        told = {"error": _said(facts)} if isinstance(facts, BaseException) else {"facts": dict(facts)}
        found = self.gather(name, json.dumps(told).encode(), deadline=time.monotonic() + timeout_seconds)
        if isinstance(facts, BaseException):
            raise facts
        answers: dict[int, Any] = {process: json.loads(value) for process, value in found.items()}
        for process, answer in answers.items():
            if "error" in answer:
                raise ProcessFailed(f"process {process} cannot load this data: {answer['error']}", process)
        for fact in facts:
            values: dict[str, list[int]] = {}
            for process, answer in answers.items():
                values.setdefault(answer["facts"].get(fact, ""), []).append(process)
            if len(values) > 1:
                shown = "; ".join(f"process {', '.join(map(str, who))}: {value}" for value, who in values.items())
                raise ArgumentError(
                    f"the processes of this job differ in {fact}: {shown}; expected the same on all: give every "
                    "process the same arguments and the same files"
                )

    def gather(
        self, name: str, value: bytes, *, deadline: float, stop: threading.Event | None = None
    ) -> dict[int, bytes]:
        """Returns what every process gave under a name that is used once. **Arguments, Raises:** as `arrive`."""
        folder = f"{self._prefix}/{name}"
        self._client.key_value_set_bytes(f"{folder}/said/{self.process}", value)
        self.arrive(name, deadline=deadline, stop=stop)
        said = self._client.key_value_dir_get_bytes(f"{folder}/said/")
        return {int(key.rpartition("/")[2]): value for key, value in said}

    def arrive(self, name: str, *, deadline: float, stop: threading.Event | None = None) -> bool:
        """Returns once all processes have come to a place that is come to once.

        **Arguments:** `deadline`: `time.monotonic` seconds. `stop`: ends the wait as the deadline does.

        **Returns:** whether this process came last.

        **Raises:** `ProcessFailed` naming one that failed there, `WaitTimeout` naming those that did not come.
        """
        folder = f"{self._prefix}/{name}"
        try:
            is_last = self._client.key_value_increment(f"{folder}/count", 1) == len(self.processes)
            if is_last:  # so nobody has failed here: that one would not have been counted
                self._tell(name, _FINE)
                return True
            verdict = self._verdict(folder, deadline, stop or threading.Event())
        except JaxRuntimeError as error:
            raise BraidaxError(
                f"process {self.process} cannot talk to JAX's coordination service any more ({_first_line(error)}): "
                "process 0, or another one, has ended; its log says why"
            ) from error
        if stop is not None and stop.is_set():
            return False
        if verdict is None:
            self._late(name)
        if verdict != _FINE:
            failed: dict[str, Any] = json.loads(verdict)
            raise ProcessFailed(f"process {failed['process']} failed: {failed['error']}", failed["process"])
        return False

    def fail(self, name: str, error: BaseException) -> None:
        """Tells all that come to a place that this process failed there."""
        told = json.dumps({"process": self.process, "error": _said(error)}).encode()
        self._tell(name, told)

    def forget(self, name: str) -> None:
        """Drops what was said at a place that all have left."""
        self._client.key_value_delete(f"{self._prefix}/{name}/")

    def begin(self, cursor: str, timeout_seconds: float, replicas: Replicas | None = None) -> "Rounds":
        """Begins a pass over the data.

        **Arguments:** `cursor`: where it begins, in words. `timeout_seconds`: of the wait for one batch. `replicas`:
        what is compared of batches, if anything is.

        **Raises:** as `meet`.
        """
        number = next(self._num_passes)
        self.meet(f"pass-{number}/start", {"where they begin": cursor}, timeout_seconds=timeout_seconds)
        if number:
            self.forget(f"pass-{number - 1}")
        return Rounds(self, number, timeout_seconds, replicas)

    def _tell(self, name: str, verdict: bytes) -> None:
        try:
            self._client.key_value_set_bytes(f"{self._prefix}/{name}/verdict", verdict)
        except JaxRuntimeError as error:
            if "ALREADY_EXISTS" not in str(error):
                raise

    def _verdict(self, folder: str, deadline: float, stop: threading.Event) -> bytes | None:
        while not stop.is_set() and (left := deadline - time.monotonic()) > 0:
            try:
                limit = math.ceil(1000 * min(left, _SLICE_SECONDS))
                return self._client.blocking_key_value_get_bytes(f"{folder}/verdict", limit)
            except JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
        return None

    def _late(self, name: str) -> NoReturn:
        """Finds out who is late: those that do not say that they waited too."""
        folder = f"{self._prefix}/{name}/waited/"
        self._client.key_value_set_bytes(f"{folder}{self.process}", b"")
        time.sleep(_GRACE_SECONDS)
        waited = {int(key.rpartition("/")[2]) for key, _ in self._client.key_value_dir_get_bytes(folder)}
        missing = [process for process in self.processes if process not in waited]
        raise WaitTimeout(
            f"process {self.process} waited for process {', '.join(map(str, missing)) or '(all came too late)'} up to "
            "the limit; expected every process to load the same batches: does each make its loaders, and go through "
            "them, in the same order? If one is only slow, raise Knobs(timeout_seconds=...)"
        )


def meeting(devices: Sequence[Any]) -> Together | None:
    """Returns the processes that own some devices, None where there is but one, or this one is none of them."""
    processes = {device.process_index for device in devices}
    client = coordination_client()
    process = jax.process_index()
    if client is None or len(processes) < 2 or process not in processes:
        return None
    return Together(client, sorted(processes), process)


@contextlib.contextmanager
def agreeing(together: Together | None, *, timeout_seconds: float) -> Generator[dict[str, str]]:
    """Lets all processes do the `with` block, which fills in facts, and compares these; an error is raised on all.

    **Raises:** as `Together.meet`.
    """
    facts: dict[str, str] = {}
    try:
        yield facts
    except Exception as error:
        if together is not None:
            together.meet("start", error, timeout_seconds=timeout_seconds)
        raise
    if together is not None:
        together.meet("start", facts, timeout_seconds=timeout_seconds)


class Rounds:
    """One pass: a round for each batch, in order. **Arguments:** as of `Together.begin`, and the pass's number."""

    def __init__(self, together: Together, number: int, timeout_seconds: float, replicas: Replicas | None) -> None:
        self._replicas = replicas
        self._num_checked = 0
        self._comparisons: deque[tuple[int, Future[None]]] = deque()
        self._together = together
        self._number = number
        self._rounds = itertools.count()
        self._timeout_seconds = timeout_seconds
        self._threads = Threads(1, "braidax-together")
        self._stop = threading.Event()

    def confirm(self, local: "Future[Any]") -> "Future[None]":
        """Returns the future of all processes having read their part of the next batch.

        **Arguments:** `local`: this process's part.
        """
        return self._threads.submit(self._confirm, next(self._rounds), local)

    def check(self, batch: Any) -> None:
        """Begins to compare the replicas in the next batch, if it is its turn; raises what an earlier one showed.

        That is raised some batches later, on all processes at the same one: nobody waits for a device.

        **Raises:** `DataError` as `replicas.compare`; as `Together.arrive`.
        """
        number, self._num_checked = self._num_checked, self._num_checked + 1
        if self._comparisons and self._comparisons[0][0] <= number - _VERDICT_BATCHES:
            self._settle()
        if self._replicas is not None and number % self._replicas.every == 0:
            sums = self._replicas.sums(batch)
            self._comparisons.append((number, self._threads.submit(self._compare, number, sums)))

    def finish(self) -> None:
        """Waits for the comparisons that are under way. **Raises:** as `check`."""
        while self._comparisons:
            self._settle()

    def _settle(self) -> None:
        number, comparison = self._comparisons.popleft()
        try:
            comparison.result(timeout=self._timeout_seconds + 2 * _GRACE_SECONDS)
        except TimeoutError as error:
            if comparison.done():
                raise
            raise WaitTimeout(
                f"the checksums of batch {number} of this pass did not come within {self._timeout_seconds:g} s; a "
                "device that computes them does not answer: does every process run the same steps?"
            ) from error

    def close(self) -> None:
        """Stops asking: the thread ends, also where others have not answered. **Raises:** `WaitTimeout`."""
        self._stop.set()
        self._threads.close(timeout_seconds=_CLOSE_SECONDS)

    def _confirm(self, number: int, local: "Future[Any]") -> None:
        deadline = time.monotonic() + self._timeout_seconds
        name = f"pass-{self._number}/{number}"
        try:
            self._await(local, deadline)
        except BaseException as error:
            self._together.fail(name, error)
            raise
        if self._stop.is_set():
            return
        is_last = self._together.arrive(name, deadline=max(deadline, time.monotonic() + 1.0), stop=self._stop)
        if is_last and number:  # all have left the round before
            self._together.forget(f"pass-{self._number}/{number - 1}")

    def _await(self, local: "Future[Any]", deadline: float) -> None:
        """Waits for this process's part, or until `close`. **Raises:** what it raised; `TimeoutError`."""
        while not self._stop.is_set():
            try:
                local.result(timeout=min(_SLICE_SECONDS, max(0.0, deadline - time.monotonic())))
                return
            except TimeoutError:
                if local.done() or time.monotonic() >= deadline:
                    raise

    def _compare(self, number: int, sums: Sums) -> None:
        name = f"pass-{self._number}/sums-{number}"
        deadline = time.monotonic() + self._timeout_seconds
        messages = self._together.gather(name, told(sums), deadline=deadline, stop=self._stop)
        if self._stop.is_set():
            return
        compare(messages, f"batch {number} of this pass")
        if self._replicas is not None and number:
            self._together.forget(f"pass-{self._number}/sums-{number - self._replicas.every}")


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]
