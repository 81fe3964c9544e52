"""What the processes that load together tell each other before they load, on the host: that they mean the same.

JAX's coordination service carries it: for each place where all meet one counter, which every process raises, and one
verdict, which the last to come sets.
"""

import contextlib
import hashlib
import itertools
import json
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from typing import Any, NoReturn

import jax

from braidax.connections.coordination import Coordination
from braidax.connections.raised import Raised
from braidax.errors import ArgumentError, WaitTimeout
from braidax.program.coordination import busy, coordination

_GRACE_SECONDS = 2.0  # which others have to say that they too waited in vain


class ProcessGroup:
    """The processes of a loader, which all make their loaders in the same order.

    **Arguments:** `service`: of this process. `processes`: their indices, this one's among them. `process`: this one.
    """

    def __init__(self, service: Coordination, processes: Sequence[int], process: int) -> None:
        self.processes = sorted(processes)
        self.process = process
        self._service = service
        among = hashlib.blake2b(str(self.processes).encode(), digest_size=8).hexdigest()
        self._places = service.numbered(f"loader/{among}")
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

        **Raises:** on all processes: `ArgumentError` showing what differs; `CallFailed` naming one that can do
        nothing, which raises its own error; `WaitTimeout` naming those that did not come.
        """
        if isinstance(facts, BaseException):
            told: dict[str, Any] = {"error": Raised.of(facts).to_text()}
        else:
            told = {"facts": dict(facts), "words": words}
        found = self.gather(name, json.dumps(told).encode(), deadline=time.monotonic() + timeout_seconds)
        if isinstance(facts, BaseException):
            raise facts
        answers: dict[int, Any] = {process: json.loads(value) for process, value in found.items()}
        for process, answer in answers.items():
            if "error" in answer:
                raised = Raised.from_text(answer["error"])
                raise raised.error(f"process {process} cannot load this data: {raised.words}", process)
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

        **Raises:** `WaitTimeout` naming those that did not come; `CommError` when the service has ended.
        """
        place = self._places.under(name)
        place.set(f"said/{self.process}", value)
        if place.add("count") == len(self.processes):
            place.set("all", b"")
        elif not self._all_came(place, deadline, stop or threading.Event()):
            self._late(place)
        return {int(process): said for process, said in place.below("said").items()}

    def forget(self, name: str) -> None:
        """Drops what was said at a place that all have left."""
        self._places.delete(name)

    def _all_came(self, place: Coordination, deadline: float, stop: threading.Event) -> bool:
        """Waits for the last process; returns whether it came, or `stop` was set."""
        patience, said = deadline - time.monotonic(), None

        def check() -> None:
            nonlocal said
            if stop.is_set():
                raise _Stopped
            said = busy(self._service) if said is None else said

        with contextlib.suppress(_Stopped):
            while place.find("all", timeout_seconds=deadline - time.monotonic(), check=check) is None:
                now, before = busy(self._service), said or {}
                if all(now.get(process) == before.get(process) for process in self._missing(place)):
                    return False
                deadline, said = time.monotonic() + patience, now
        return True

    def _missing(self, place: Coordination) -> list[int]:
        """Returns the processes that have not come."""
        came = {int(process) for process in place.below("said")}
        return [process for process in self.processes if process not in came]

    def _late(self, place: Coordination) -> NoReturn:
        """Finds out who is late: those that do not say that they waited too."""
        place.set(f"waited/{self.process}", b"")
        time.sleep(_GRACE_SECONDS)
        waited = {int(process) for process in place.below("waited")}
        raise come_too_late(self.process, [process for process in self.processes if process not in waited])


class _Stopped(Exception):
    """A wait is over since nobody wants its end any more. Never leaves this module."""


def process_group(devices: Sequence[Any]) -> ProcessGroup | None:
    """Returns the processes that own some devices, None where there is but one, or this one is none of them."""
    processes = {device.process_index for device in devices}
    service = coordination()
    process = jax.process_index()
    if service is None or len(processes) < 2 or process not in processes:
        return None
    return ProcessGroup(service, sorted(processes), process)


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
