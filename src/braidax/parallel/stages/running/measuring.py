"""When each operation of a pipeline began and ended on its device."""

import contextlib
import functools
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, final

import jax

from braidax.parallel.stages.schedules import Costs, Kind, Operation, Schedule, Simulation, Timed
from braidax.parallel.stages.schedules.dependencies import Dependencies
from braidax.spans import Span, Trace

from .executor import Pipelined
from .run import Observer

_COMPUTING = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT)
_RECEIVING = (Kind.RECV_F, Kind.RECV_B)
_EVERY, _MEASURED = 100, 4
"""Of so many updates the fourth is measured."""


def measured_run(run: Pipelined, costs: Costs, compute: Callable[[], Any], trace: Trace | None = None) -> Simulation:
    """Computes something twice, and returns when operations of the second time began and ended on their devices.

    **Arguments:** `costs`: of what lives on devices meanwhile. `compute`: with `run`; what notes the times is compiled
    in the first run. `trace`: gets a lane for each stage.
    """
    measuring = Measuring(run.schedule, costs)
    for _ in range(2):
        run.observe = measuring.begin()
        try:
            compute()
        finally:
            run.observe = None
            measuring.wait()
    found = measuring.timed()
    if trace is not None:
        _record(found, measuring.begun, trace)
    return found


def _record(found: Simulation, begun: float, trace: Trace) -> None:
    for each in (each for timed in found.timed for each in timed):
        lane, name = f"stage {each.operation.stage}", f"{each.operation.kind}{each.operation.microbatch}"
        trace.record(Span(lane, name, f"device {each.device}", begun + each.start, each.end - each.start, 0))


@final
class StageLanes:
    """Gives a trace a lane for each stage: what devices did in one update of a hundred, beginning with the fourth.

    When an operation was dispatched says nothing of when it ran, and the loop may not wait for devices: threads do, for
    numbers that are taken of what operations give, and tell the trace when all is over. The update before, the third,
    compiles what takes them.

    **Arguments:** `run`: the pipeline. `costs`: of what lives on devices meanwhile.
    """

    def __init__(self, run: Pipelined, costs: Costs) -> None:
        self._run, self._costs, self._updates = run, costs, 0
        self._recording: list[Future[None]] = []

    @contextlib.contextmanager
    def watching(self, trace: Trace | None) -> Generator[None, None, None]:
        """An update is made in the block. **Arguments:** `trace`: None is told nothing, nor is anything noted."""
        self._updates += 1
        place = self._updates % _EVERY
        if trace is None or place not in (_MEASURED - 1, _MEASURED):
            yield
            return
        measuring = Measuring(self._run.schedule, self._costs)
        self._run.observe = measuring.begin()
        try:
            yield
        finally:
            self._run.observe = None
            threads = ThreadPoolExecutor(1, "braidax-lanes")
            name = f"operations of update {self._updates}" if place == _MEASURED else None
            self._recording.append(threads.submit(_record_behind, measuring, trace, name))
            threads.shutdown(wait=False)

    def finish(self) -> None:
        """Waits until all is recorded that was noted. What devices have raised is raised where their results are."""
        while self._recording:
            self._recording.pop().exception()


def _record_behind(measuring: "Measuring", trace: Trace, name: str | None) -> None:
    measuring.wait()
    if name is not None:
        found = measuring.timed()
        trace.record(Span("stages", name, "devices", measuring.begun, found.makespan_seconds, 0))
        _record(found, measuring.begun, trace)


@final
class Measuring:
    """Notes when the operations of a schedule are done, by a thread for each device that waits for one after the other.

    What is waited for is a number that is taken of an output when it is dispatched: later operations take over the
    memory of the outputs themselves. An operation began when it was dispatched, the one before it on its device had
    ended, and all that it needed was there; what comes from other processes has threads of its own. So a transfer is in
    nobody's time. Threads only wait.

    **Arguments:** `schedule`: with transfers. `costs`: of what lives on devices meanwhile.
    """

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self._schedule, self._costs = schedule.computing(), costs
        self._needs, self._made = Dependencies(schedule), Dependencies(self._schedule)
        # Where weights are flushed, updates are not in what is measured.
        self._kinds = _COMPUTING if schedule.is_flushed else (*_COMPUTING, Kind.UPDATE)
        self._waiting: dict[tuple[int, bool], ThreadPoolExecutor] = {}
        self._noted: dict[Operation, tuple[float, Future[float]]] = {}
        self.begun = 0.0

    def begin(self) -> Observer:
        """Returns what is called with each operation that is dispatched, and its outputs."""
        self._waiting, self._noted, self.begun = {}, {}, time.perf_counter()
        return self._note

    def wait(self) -> None:
        """Waits until all is noted."""
        for one in self._waiting.values():
            one.shutdown()

    def timed(self) -> Simulation:
        """Returns all that this process has done, in time. **Raises:** what devices have raised."""
        ends = {operation: done.result() for operation, (_, done) in self._noted.items()}
        here = {self._schedule.device_of_stage[one.stage] for one in self._noted}
        left = [
            deque(one for one in operations if device in here and one.kind in self._kinds)
            for device, operations in enumerate(self._schedule.lists)
        ]
        timed: list[list[Timed]] = [[] for _ in left]
        missing = {one for operations in left for one in operations}
        while missing:  # an end may be put off, to when the operation can have begun: before others are held to it
            for device, operations in enumerate(left):
                while operations and not missing.intersection(self._made.of(operations[0])):
                    operation = operations.popleft()
                    missing.remove(operation)
                    before = timed[device][-1].end if timed[device] else 0.0
                    needed = *self._needs.of(operation), *self._made.of(operation)
                    dispatched = self._noted[operation][0] if operation in self._noted else 0.0
                    start = max(before, dispatched, *(ends[one] for one in needed if one in ends))
                    ends[operation] = max(ends.get(operation, 0.0), start)  # what gives nothing takes no time
                    timed[device].append(Timed(operation, device, start, ends[operation]))
        return Simulation(self._schedule, self._costs, tuple(map(tuple, timed)))

    def _note(self, operation: Operation, outputs: Any) -> Callable[[], None] | None:
        if operation.kind not in (*self._kinds, *_RECEIVING):
            return None
        return functools.partial(self._look, operation, outputs, time.perf_counter() - self.begun)

    def _look(self, operation: Operation, outputs: Any, dispatched: float) -> None:
        arrays = [one for one in jax.tree.leaves(outputs) if isinstance(one, jax.Array) and one.size]
        tokens = [_taking()(min(arrays, key=lambda one: one.size).addressable_shards[0].data)] if arrays else []
        place = self._schedule.device_of_stage[operation.stage], operation.kind in _RECEIVING
        if place not in self._waiting:
            self._waiting[place] = ThreadPoolExecutor(1, "braidax-measure")
        self._noted[operation] = dispatched, self._waiting[place].submit(self._wait, tokens)

    def _wait(self, tokens: Any) -> float:
        jax.block_until_ready(tokens)
        return time.perf_counter() - self.begun


@functools.cache
def _taking() -> Callable[[Any], Any]:
    """Compiled once for arrays of one form, whoever measures."""
    return jax.jit(lambda array: array.ravel()[:1])
