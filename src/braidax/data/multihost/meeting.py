"""What the processes that load together tell each other before they load, on the host: that they mean the same.

JAX's coordination service carries it: for each place where all meet one counter, which every process raises, and one
verdict, which the last to come sets.
"""

import contextlib
import hashlib
import itertools
import json
import math
import threading
import time
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from typing import Any, NoReturn

import jax
from jax.errors import JaxRuntimeError

from braidax.errors import ArgumentError, BraidaxError, ProcessFailed, WaitTimeout
from braidax.program.coordination import CoordinationClient, busy, coordination_client

_SLICE_SECONDS = 0.1  # of a wait inside JAX, which neither Ctrl-C nor `close` can end
_GRACE_SECONDS = 2.0  # which others have to say that they too waited in vain
_NUMBERS: Counter[str] = Counter()  # of loaders made by the same processes, which they make in the same order


class ProcessGroup:
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

    def next_pass(self) -> int:
        """Returns the number of the pass that begins, the same on all processes."""
        return next(self._num_passes)

    def meet(
        self, name: str, facts: Mapping[str, str] | BaseException, words: str = "", *, timeout_seconds: float
    ) -> dict[int, str]:
        """Compares what the processes are about to do.

        **Arguments:** `name`: of the place, come to once. `facts`: by name, in words; or why this process can do
        nothing. `words`: which may differ.

        **Returns:** the words of all, by process.

        **Raises:** on all processes: `ArgumentError` showing what differs; `ProcessFailed` naming one that can do
        nothing, which raises its own error; `WaitTimeout` naming those that did not come.
        """
        if isinstance(facts, BaseException):
            told: dict[str, Any] = {"error": in_words(facts)}
        else:
            told = {"facts": dict(facts), "words": words}
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
        return {process: answer["words"] for process, answer in answers.items()}

    def gather(
        self, name: str, value: bytes, *, deadline: float, stop: threading.Event | None = None
    ) -> dict[int, bytes]:
        """Returns what every process gave under a name that is used once.

        **Arguments:** `deadline`: `time.monotonic` seconds; it is put off by as long again whenever it has come and
        one of those that are missing has said meanwhile that it is at work, at an index for instance. `stop`: ends the
        wait as the deadline does.

        **Raises:** `WaitTimeout` naming those that did not come.
        """
        folder = f"{self._prefix}/{name}"
        self._client.key_value_set_bytes(f"{folder}/said/{self.process}", value)
        try:
            if self._client.key_value_increment(f"{folder}/count", 1) == len(self.processes):
                self._client.key_value_set_bytes(f"{folder}/all", b"")
            elif not self._all_came(folder, deadline, stop or threading.Event()):
                self._late(folder)
        except JaxRuntimeError as error:
            raise BraidaxError(
                f"process {self.process} cannot talk to JAX's coordination service any more ({_first_line(error)}): "
                "process 0, or another one, has ended; its log says why"
            ) from error
        said = self._client.key_value_dir_get_bytes(f"{folder}/said/")
        return {int(key.rpartition("/")[2]): value for key, value in said}

    def forget(self, name: str) -> None:
        """Drops what was said at a place that all have left."""
        self._client.key_value_delete(f"{self._prefix}/{name}/")

    def _all_came(self, folder: str, deadline: float, stop: threading.Event) -> bool:
        """Waits for the last process; returns whether it came, or `stop` was set."""
        patience, said = deadline - time.monotonic(), None
        while not stop.is_set():
            left = deadline - time.monotonic()
            if left <= 0:
                now, before = busy(self._client), said or {}
                if all(now.get(process) == before.get(process) for process in self._missing(folder)):
                    return False
                deadline, said, left = time.monotonic() + patience, now, patience
            try:
                limit = math.ceil(1000 * min(left, _SLICE_SECONDS))
                self._client.blocking_key_value_get_bytes(f"{folder}/all", limit)
            except JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
                said = busy(self._client) if said is None else said
            else:
                return True
        return stop.is_set()

    def _missing(self, folder: str) -> list[int]:
        """Returns the processes that have not come."""
        came = {int(key.rpartition("/")[2]) for key, _ in self._client.key_value_dir_get_bytes(f"{folder}/said/")}
        return [process for process in self.processes if process not in came]

    def _late(self, folder: str) -> NoReturn:
        """Finds out who is late: those that do not say that they waited too."""
        self._client.key_value_set_bytes(f"{folder}/waited/{self.process}", b"")
        time.sleep(_GRACE_SECONDS)
        said = self._client.key_value_dir_get_bytes(f"{folder}/waited/")
        waited = {int(key.rpartition("/")[2]) for key, _ in said}
        raise come_too_late(self.process, [process for process in self.processes if process not in waited])


def process_group(devices: Sequence[Any]) -> ProcessGroup | None:
    """Returns the processes that own some devices, None where there is but one, or this one is none of them."""
    processes = {device.process_index for device in devices}
    client = coordination_client()
    process = jax.process_index()
    if client is None or len(processes) < 2 or process not in processes:
        return None
    return ProcessGroup(client, sorted(processes), process)


@contextlib.contextmanager
def agreeing(group: ProcessGroup | None, *, timeout_seconds: float) -> Generator[dict[str, str]]:
    """Lets all processes do the `with` block, which fills in facts, and compares these; an error is raised on all.

    **Raises:** as `ProcessGroup.meet`.
    """
    facts: dict[str, str] = {}
    try:
        yield facts
    except Exception as error:
        if group is not None:
            group.meet("start", error, timeout_seconds=timeout_seconds)
        raise
    if group is not None:
        group.meet("start", facts, timeout_seconds=timeout_seconds)


def come_too_late(process: int, missing: Sequence[int]) -> WaitTimeout:
    """Returns the error of a process that waited for others in vain."""
    others = ", ".join(map(str, missing)) or "(all came too late)"
    return WaitTimeout(
        f"process {process} waited for process {others} up to the limit; expected every process to load the same "
        "batches: does each make its loaders, and go through them, in the same order? If one is only slow, raise "
        "Knobs(timeout_seconds=...)"
    )


def in_words(error: BaseException) -> str:
    """Returns what the other processes are told of an error."""
    return f"{type(error).__name__}: {error}"


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]
