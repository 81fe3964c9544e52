"""When each operation of a pipeline began and ended on its device."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, final

import jax

from braidax.parallel.stages.schedules import Costs, Kind, Operation, Schedule, Simulation, Timed
from braidax.parallel.stages.schedules.dependencies import Dependencies
from braidax.spans import Span, Trace

from .executor import Pipelined

_COMPUTING = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT)


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
    for each in (each for timed in found.timed for each in timed if trace is not None):
        assert trace is not None, "there is one"
        lane, name = f"stage {each.operation.stage}", f"{each.operation.kind}{each.operation.microbatch}"
        trace.record(Span(lane, name, f"device {each.device}", measuring.begun + each.start, each.end - each.start, 0))
    return found


@final
class Measuring:
    """Notes when the operations of a schedule are done, by a thread for each device that waits for one after the other.

    What is waited for is a number that is taken of an output when it is dispatched: later operations take over the
    memory of the outputs themselves. An operation began when it was dispatched, the one before it on its device had
    ended, and all that it needed; so a transfer is in nobody's time. Threads only wait.

    **Arguments:** `costs`: of what lives on devices meanwhile.
    """

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self._schedule, self._costs = schedule.computing(), costs
        # Where weights are flushed, updates are not in what is measured.
        self._kinds = _COMPUTING if schedule.is_flushed else (*_COMPUTING, Kind.UPDATE)
        self._take = jax.jit(lambda array: array.ravel()[:1])
        self._waiting: list[ThreadPoolExecutor] = []
        self._noted: dict[Operation, tuple[float, Future[float]]] = {}
        self.begun = 0.0

    def begin(self) -> Callable[[Operation, Any], None]:
        """Returns what is called with each operation that is dispatched, and its outputs."""
        self._waiting = [ThreadPoolExecutor(1, f"braidax-measure-{at}") for at in range(self._schedule.num_devices)]
        self._noted, self.begun = {}, time.perf_counter()
        return self._note

    def wait(self) -> None:
        """Waits until all is noted."""
        for one in self._waiting:
            one.shutdown()

    def timed(self) -> Simulation:
        """Returns all that this process has done, in time. **Raises:** what devices have raised."""
        ends = {operation: done.result() for operation, (_, done) in self._noted.items()}
        dependencies = Dependencies(self._schedule)
        timed: list[tuple[Timed, ...]] = []
        here = {self._schedule.device_of_stage[one.stage] for one in self._noted}
        for device, operations in enumerate(self._schedule.lists):
            own, before = list[Timed](), 0.0
            operations = operations if device in here else ()
            for operation in (one for one in operations if one.kind in self._kinds):
                needs = [ends[one] for one in dependencies.of(operation) if one in ends]
                dispatched = self._noted[operation][0] if operation in self._noted else 0.0
                start = max(before, dispatched, *needs)
                before = ends[operation] = max(ends.get(operation, 0.0), start)  # what gives nothing takes no time
                own.append(Timed(operation, device, start, before))
            timed.append(tuple(own))
        return Simulation(self._schedule, self._costs, tuple(timed))

    def _note(self, operation: Operation, outputs: Any) -> None:
        if operation.kind not in self._kinds:
            return
        dispatched = time.perf_counter() - self.begun
        arrays = [one for one in jax.tree.leaves(outputs) if isinstance(one, jax.Array) and one.size]
        tokens = [self._take(min(arrays, key=lambda one: one.size).addressable_shards[0].data)] if arrays else []
        device = self._schedule.device_of_stage[operation.stage]
        self._noted[operation] = dispatched, self._waiting[device].submit(self._wait, tokens)

    def _wait(self, tokens: Any) -> float:
        jax.block_until_ready(tokens)
        return time.perf_counter() - self.begun
