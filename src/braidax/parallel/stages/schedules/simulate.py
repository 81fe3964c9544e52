"""When each operation of a schedule begins and ends, and how many activations live meanwhile."""

from collections.abc import Iterator
from dataclasses import dataclass

from braidax.errors import ArgumentError
from braidax.parallel.stages.schedules.costs import Costs
from braidax.parallel.stages.schedules.dependencies import Dependencies
from braidax.parallel.stages.schedules.operations import Kind, Operation, Schedule


@dataclass(frozen=True, slots=True)
class Timed:
    """An operation of a device with its seconds, counted from the beginning of the step."""

    operation: Operation
    device: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Live:
    """What lives on a device from some second on: activations of so many microbatches of a stage, and their bytes."""

    seconds: float
    microbatches: int
    bytes: int


@dataclass(frozen=True)
class Simulation:
    """A schedule in time. **Fields:** `timed`: of each device, in the order of its list."""

    schedule: Schedule
    costs: Costs
    timed: tuple[tuple[Timed, ...], ...]

    @property
    def makespan_seconds(self) -> float:
        """How long the step takes, from the first forward to the last operation of all."""
        return max((each.end for of_device in self.timed for each in of_device), default=0.0)

    @property
    def period_seconds(self) -> float:
        """How long steps take that follow one another at once, no device waiting for others between them.

        It is the longest time from the first to the last operation of a device, in which papers count bubbles.
        """
        return max(of_device[-1].end - of_device[0].start for of_device in self.timed)

    def bubble(self, device: int) -> float:
        """Returns the fraction of the step in which a device computes nothing."""
        busy = sum(each.end - each.start for each in self.timed[device] if not each.operation.is_transfer)
        return 1 - busy / self.makespan_seconds if self.makespan_seconds else 0.0

    def curve(self, device: int) -> tuple[Live, ...]:
        """Returns what lives on a device, at each change: from the beginning of a forward to its last use."""
        count = size = 0
        changes = [Live(0.0, 0, 0)]
        for each in self.timed[device]:
            more, more_bytes = self.costs.change(each.operation)
            if more or more_bytes:
                count, size = count + more, size + more_bytes
                seconds = each.start if each.operation.kind is Kind.FORWARD else each.end
                changes.append(Live(seconds, count, size))
        return tuple(changes)

    def peak_live(self, device: int) -> int:
        """Returns the most activations that live on a device at once, each of one microbatch and stage."""
        return max(live.microbatches for live in self.curve(device))

    def peak_bytes(self, device: int) -> int:
        """Returns the most bytes of activations that live on a device at once."""
        return max(live.bytes for live in self.curve(device))

    def in_order(self) -> Iterator[Timed]:
        """Yields all operations as they begin; what needs another one that takes no time stands behind it."""
        dependencies = Dependencies(self.schedule)
        heads, done = [0] * len(self.timed), set[Operation]()
        while True:
            ready = [
                (of_device[head].start, device)
                for device, (of_device, head) in enumerate(zip(self.timed, heads, strict=True))
                if head < len(of_device) and all(need in done for need in dependencies.of(of_device[head].operation))
            ]
            if not ready:
                return
            device = min(ready)[1]
            timed = self.timed[device][heads[device]]
            heads[device] += 1
            done.add(timed.operation)
            yield timed


def simulate(schedule: Schedule, costs: Costs, *, blocking: bool = False) -> Simulation:
    """Runs the lists of a schedule in time: each operation begins when its device is free and what it needs is there.

    **Arguments:** `blocking`: whether both devices of a transfer stand still from when the second one comes to it
    until it is over; otherwise a transfer goes beside computations, from when its sender comes to it. Without sends
    and receives in the lists a transfer begins with the end of what it sends.

    **Raises:** `ArgumentError` for costs of other stages, and when operations wait for one another.
    """
    if costs.num_stages != schedule.num_stages:
        raise ArgumentError(
            f"costs are of {costs.num_stages} stages, schedule {schedule.name!r} has num_stages={schedule.num_stages}"
        )
    clock = _Clock(schedule, costs, blocking)
    clock.run()
    return Simulation(schedule, costs, tuple(map(tuple, clock.timed)))


class _Clock:
    def __init__(self, schedule: Schedule, costs: Costs, blocking: bool) -> None:
        self.timed: list[list[Timed]] = [[] for _ in schedule.lists]
        self._schedule, self._costs, self._blocking = schedule, costs, blocking
        self._dependencies = Dependencies(schedule)
        self._free = [0.0] * schedule.num_devices
        self._ends: dict[Operation, float] = {}

    def run(self) -> None:
        devices = set(range(self._schedule.num_devices))
        while devices:
            moved = {device for device in sorted(devices) if self._move(device)}
            devices = {d for d in devices if len(self.timed[d]) < len(self._schedule.lists[d])}
            if devices and not moved:
                waiting = ", ".join(f"device {d} in {self._head(d)}" for d in sorted(devices))
                raise ArgumentError(
                    f"schedule {self._schedule.name!r} stands still: {waiting}; validate says what is wrong with it"
                )

    def _head(self, device: int) -> Operation | None:
        operations, head = self._schedule.lists[device], len(self.timed[device])
        return operations[head] if head < len(operations) else None

    def _move(self, device: int) -> bool:
        """Runs a device as far as it gets. **Returns:** whether it got anywhere."""
        moved = False
        while (operation := self._head(device)) is not None and self._run(operation, device):
            moved = True
        return moved

    def _run(self, operation: Operation, device: int) -> bool:
        ready = self._ready(operation)
        if ready is None:
            return False
        seconds = self._costs.seconds(operation)
        if not operation.is_transfer:
            start = max(ready, self._free[device])
            self._free[device] = start + seconds
            self._note(operation, device, start, start + seconds)
            return True
        partner = operation.partner
        other = self._schedule.device_of_stage[partner.stage]
        if self._blocking:
            other_ready = self._ready(partner)
            if self._head(other) != partner or other_ready is None:
                return False
            start = max(ready, other_ready, self._free[device], self._free[other])
            self._free[device] = self._free[other] = start + seconds
            self._note(partner, other, start, start + seconds)
            self._note(operation, device, start, start + seconds)
            return True
        if operation.kind in (Kind.RECV_F, Kind.RECV_B):
            if partner not in self._ends:
                return False
            self._note(operation, device, self._ends[partner] - seconds, self._ends[partner])
        else:
            start = max(ready, self._free[device])
            self._note(operation, device, start, start + seconds)
        return True

    def _ready(self, operation: Operation) -> float | None:
        """Returns when all that an operation needs is there, if that is known."""
        ready = 0.0
        home = self._schedule.device_of_stage
        for need in self._dependencies.of(operation):
            end = self._ends.get(need)
            if end is None:
                return None
            if not need.is_transfer and home[need.stage] != home[operation.stage]:
                end += self._costs.transfer_seconds[min(need.stage, operation.stage)]
            ready = max(ready, end)
        return ready

    def _note(self, operation: Operation, device: int, start: float, end: float) -> None:
        self._ends[operation] = end
        self.timed[device].append(Timed(operation, device, start, end))
