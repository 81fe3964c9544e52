"""One pass of processes that load together: no batch is handed out before all have read their part of it."""

import contextlib
import itertools
import json
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from braidax.connections.raised import Raised
from braidax.data.fetching.batch import Batch, Confirmation, Part
from braidax.data.multihost.hub import Door, Hub, Verdict
from braidax.data.multihost.meeting import ProcessGroup, come_too_late
from braidax.data.multihost.replicas import Replicas, Sums, compare, told
from braidax.data.workers.threads import Threads
from braidax.errors import CommError, PeerLost, WaitTimeout

_SLICE_SECONDS = 0.1  # of a wait, which `close` ends
_CLOSE_SECONDS = 5.0  # which a thread that waits there, or for a device, has to end
_VERDICT_BATCHES = 2  # after which a comparison has to be over
_LEAST_SECONDS = 1.0  # which others have when this process was slow itself
_MAX_CHARACTERS = 4000  # of an error, as many as the hub tells
_ANSWER_SECONDS = 4.0  # which others have, beyond the limit, to say who is late


class Rounds:
    """One pass: a round for each batch, in order.

    A thread takes part in them ahead, while the step computes. What it says and hears is about all batches that are
    read by then, so that those that come quickly take fewer messages.

    **Arguments:** `group`: the processes. `name`: of the pass. `hub`: is owned, and closed. `timeout_seconds`: of
    a comparison. `replicas`: what is compared of batches, if anything is. `hosts`: names of those of the processes.
    """

    def __init__(
        self,
        group: ProcessGroup,
        name: str,
        hub: Hub,
        timeout_seconds: float,
        replicas: Replicas | None,
        *,
        hosts: Mapping[int, str],
    ) -> None:
        self._replicas = replicas
        self._hosts = hosts
        self._num_checked = 0
        self._comparisons: deque[tuple[int, Future[None]]] = deque()
        self._group = group
        self._name = name
        self._hub = hub
        self._numbers = itertools.count()
        self._coming: deque[Batch | Part] = deque()  # whose rounds have yet to begin
        self._timeout_seconds = timeout_seconds
        self._threads = Threads(1, "braidax-rounds")
        self._stop = threading.Event()

    def confirm(self, batches: Sequence[Batch | Part]) -> None:
        """Begins to find out whether all processes have read their part of the next batches: `confirmed` of each."""
        for batch in batches:
            batch.confirmed = Confirmation()
        self._coming.extend(batches)
        self._threads.run(self._confirm_each, list(batches))

    def check(self, batch: Any) -> None:
        """Begins to compare the replicas in the next batch, if it is its turn; raises what an earlier one showed.

        That is raised some batches later, on all processes at the same one: nobody waits for a device.

        **Raises:** `DataError` as `replicas.compare`; as `ProcessGroup.gather`.
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
            comparison.result(timeout=self._timeout_seconds + _ANSWER_SECONDS)
        except TimeoutError as error:
            if comparison.done():
                raise
            raise WaitTimeout(
                f"the checksums of batch {number} of this pass did not come within {self._timeout_seconds:g} s; a "
                "device that computes them does not answer: does every process run the same steps?"
            ) from error

    def forget(self, name: str) -> None:
        """Drops what was said at a place that all have left, while this process goes on."""
        self._threads.run(self._forget, name)

    def _forget(self, name: str) -> None:
        with contextlib.suppress(CommError):  # a service that has ended is told of by those who need it
            self._group.forget(name)

    def close(self) -> None:
        """Stops taking part: the thread ends, also where others have not answered. **Raises:** `WaitTimeout`."""
        self._stop.set()
        try:
            self._threads.close(timeout_seconds=_CLOSE_SECONDS)
        finally:
            self._hub.close()

    def _confirm_each(self, batches: Sequence[Batch | Part]) -> None:
        for batch in batches:
            confirmation = batch.confirmed
            assert confirmation is not None, "it was made before"
            self._coming.popleft()
            try:
                self._confirm(confirmation, next(self._numbers), batch)
            except BaseException as raised:  # noqa: BLE001 (it is raised again on the consumer's thread)
                confirmation.future.set_exception(raised)
            else:
                confirmation.future.set_result(None)

    def _confirm(self, confirmation: Confirmation, number: int, batch: Batch | Part) -> None:
        try:
            self._await(batch, confirmation)
        except BaseException as error:
            told = Raised.of(error).to_text(max_characters=_MAX_CHARACTERS)
            self._hub.fail(number, self._group.process, told)
            raise
        if self._stop.is_set():
            return
        earliest = time.monotonic() + _LEAST_SECONDS
        verdict = self._hub.agree(
            number,
            ready=lambda: number + self._num_read(),
            deadline=lambda: max(confirmation.deadline, earliest),
            stop=self._stop,
        )
        if verdict is not None and verdict.kind != "fine":
            raise self._error(verdict)

    def _num_read(self) -> int:
        """Returns how many parts that come next this process has read already."""
        reads = (batch.local for batch in [*self._coming])
        is_read = (read.done() and not read.cancelled() and read.exception() is None for read in reads)
        return sum(itertools.takewhile(bool, is_read))

    def _error(self, verdict: Verdict) -> Exception:
        if verdict.kind == "late":
            return come_too_late(self._group.process, verdict.processes)
        first, named = verdict.processes[0], ", ".join(map(str, verdict.processes))
        if verdict.kind == "failed":
            raised = Raised.from_text(verdict.words)
            return raised.error(f"process {first} failed: {raised.words}", first)
        return PeerLost(
            f"process {named} has left this pass over the data, or has ended; expected every process to take the same "
            "batches: its log says why",
            first,
            self._hosts.get(first, ""),
        )

    def _await(self, batch: Batch | Part, confirmation: Confirmation) -> None:
        """Waits for this process's part, or until `close`. **Raises:** what it raised; `TimeoutError`."""
        while not self._stop.is_set():
            read = batch.local
            try:
                read.result(timeout=min(_SLICE_SECONDS, max(0.0, confirmation.deadline - time.monotonic())))
            except TimeoutError:
                if read.done() or time.monotonic() >= confirmation.deadline:
                    raise
            else:
                if batch.local is read:
                    return

    def _compare(self, number: int, sums: Sums) -> None:
        name = f"{self._name}/sums-{number}"
        deadline = time.monotonic() + self._timeout_seconds
        messages = self._group.gather(name, told(sums), deadline=deadline, stop=self._stop)
        if self._stop.is_set():
            return
        compare(messages, f"batch {number} of this pass")
        if self._replicas is not None and number:
            self._group.forget(f"{self._name}/sums-{number - self._replicas.every}")


def begin(group: ProcessGroup, cursor: str, timeout_seconds: float, replicas: Replicas | None = None) -> Rounds:
    """Begins a pass over the data. **Arguments:** `cursor`: where it begins, in words; the others as of `Rounds`.

    **Raises:** as `ProcessGroup.meet` and `Door.connect`.
    """
    number = group.next_pass()
    start = f"pass-{number}/start"
    deadline = time.monotonic() + timeout_seconds
    try:
        door = Door(group.processes, group.process)
    except Exception as error:
        group.meet(start, error, timeout_seconds=timeout_seconds)
        raise
    with door:
        words = group.meet(start, {"where they begin": cursor}, door.words, timeout_seconds=timeout_seconds)
        try:
            hub = door.connect(words, deadline=max(deadline, time.monotonic() + _ANSWER_SECONDS))
        except PeerLost as error:  # which counts these processes from 0
            process = group.processes[error.rank]
            raise PeerLost(f"process {process} has left before it was reached: {error}", process, error.host) from error
    with contextlib.ExitStack() as undo:
        undo.callback(hub.close)
        hosts = {process: json.loads(said)["host"] for process, said in words.items()}
        rounds = Rounds(group, f"pass-{number}", hub, timeout_seconds, replicas, hosts=hosts)
        undo.pop_all()
    if number and group.process == group.processes[0]:  # all have left the pass before
        rounds.forget(f"pass-{number - 1}")
    return rounds
