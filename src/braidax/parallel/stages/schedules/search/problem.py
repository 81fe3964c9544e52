"""A step of a pipeline as numbers, for searching: who needs whom, how long, how many bytes."""

from collections.abc import Collection, Sequence
from typing import final

from braidax.errors import ArgumentError
from braidax.parallel.stages.schedules.costs import Costs
from braidax.parallel.stages.schedules.operations import Kind, Operation, Schedule, with_updates

KINDS = (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT)
FORWARD, INPUT, WEIGHT = range(3)
Orders = list[list[int]]
"""Of each device, the numbers of its operations in their order."""


@final
class Problem:
    """Forwards, backwards of the inputs and gradients of the weights of all microbatches, numbered.

    **Arguments:** `device_of_stage`: where each stage lies. `limit_bytes`: of activations on a device, if there is one.

    **Fields:** by number of operation: `devices`; `seconds`; `needs`, what must be over and for how long; `changes` of
    bytes. By device: `room`, what forwards may fill; the rest is for what a gradient of inputs leaves more than its
    forward had.

    **Raises:** `ArgumentError` where no schedule fits into `limit_bytes`.
    """

    def __init__(
        self, costs: Costs, num_microbatches: int, device_of_stage: tuple[int, ...], limit_bytes: int | None = None
    ) -> None:
        if costs.num_stages != len(device_of_stage):
            raise ArgumentError(f"costs are of {costs.num_stages} stages, device_of_stage has {len(device_of_stage)}")
        self.costs, self.num_microbatches, self.device_of_stage = costs, num_microbatches, device_of_stage
        self.num_stages, self.num_devices = costs.num_stages, 1 + max(device_of_stage)
        self.limit = float("inf") if limit_bytes is None else limit_bytes
        taken = costs.activation_bytes
        kept = taken if costs.kept_bytes is None else costs.kept_bytes
        self.later = [  # bytes that a microbatch still takes on the device of a stage before it is done with that
            sum(taken[s] for s in range(stage + 1, self.num_stages) if device_of_stage[s] == device_of_stage[stage])
            for stage in range(self.num_stages)
        ]
        pairs = zip(device_of_stage, kept, taken, strict=True)
        more = [(home, max(k - t, 0)) for home, k, t in pairs]
        self.room = [self.limit - max(size for home, size in more if home == at) for at in range(self.num_devices)]
        self.earlier = [  # stages of the same device up to one
            [s for s in range(stage + 1) if device_of_stage[s] == device_of_stage[stage]]
            for stage in range(self.num_stages)
        ]
        for stage in range(self.num_stages):
            home, least = device_of_stage[stage], taken[stage] + self.later[stage]
            if least > self.room[home]:
                least += max(size for at, size in more if at == home)
                raise ArgumentError(
                    f"limit_bytes={limit_bytes} is below the {least} bytes of activations that one microbatch needs "
                    f"on device {home}"
                )
        seconds = (costs.forward_seconds, costs.input_seconds, costs.weight_seconds)
        changes = (taken, [k - t for k, t in zip(kept, taken, strict=True)], [-k for k in kept])
        numbers = [
            (kind, s, each) for kind in range(3) for s in range(self.num_stages) for each in range(num_microbatches)
        ]
        self.devices = [device_of_stage[stage] for _, stage, _ in numbers]
        self.seconds = [seconds[kind][stage] for kind, stage, _ in numbers]
        self.changes = [changes[kind][stage] for kind, stage, _ in numbers]
        self.needs = [self._needs(kind, stage, each) for kind, stage, each in numbers]

    def number(self, kind: int, stage: int, microbatch: int) -> int:
        """Returns the number of an operation."""
        return (kind * self.num_stages + stage) * self.num_microbatches + microbatch

    def parts(self, number: int) -> tuple[int, int, int]:
        """Returns kind, stage and microbatch of an operation."""
        row, microbatch = divmod(number, self.num_microbatches)
        return *divmod(row, self.num_stages), microbatch

    def lag(self, stage: int) -> float:
        """Returns how long what a stage makes is under way to the next one."""
        home = self.device_of_stage
        return self.costs.transfer_seconds[stage] if home[stage] != home[stage + 1] else 0.0

    def has_room(self, stage: int, live: float, under_way: Sequence[int]) -> bool:
        """Says whether one more forward of a stage fits, and leaves room to bring every microbatch to its end.

        What later stages of the device hold comes back in `room`; what earlier ones hold does not.

        **Arguments:** `live`: bytes on the device. `under_way`: how many microbatches of each stage wait for gradients.
        """
        taken, room = self.costs.activation_bytes, self.room[self.device_of_stage[stage]]
        if live + taken[stage] > room:
            return False
        held = sum(under_way[s] * taken[s] for s in self.earlier[stage])
        return held + taken[stage] + self.later[stage] <= room

    def goes_back(self, number: int, live: float) -> bool:
        """Says whether what a gradient leaves fits; if it does not, a gradient of weights waits, which makes room."""
        return live + self.changes[number] <= self.limit

    def schedule(self, orders: Orders, name: str, *, whole: Collection[int] = ()) -> Schedule:
        """Returns orders as a schedule. **Arguments:** `whole`: gradients of inputs that take those of weights in."""
        within = {number + self.num_stages * self.num_microbatches for number in whole}
        lists: list[list[Operation]] = []
        for order in orders:
            operations = ((number, *self.parts(number)) for number in order if number not in within)
            lists.append(
                [Operation(Kind.BACKWARD if n in whole else KINDS[k], s, each) for n, k, s, each in operations]
            )
        return Schedule(name, self.num_microbatches, self.device_of_stage, with_updates(lists))

    def orders(self, schedule: Schedule) -> Orders:
        """Returns a schedule of these stages as orders, a whole backward in its two halves."""
        lists: Orders = []
        for operations in schedule.lists:
            order: list[int] = []
            for operation in operations:
                if operation.kind in (Kind.BACKWARD, *KINDS):
                    kinds = [INPUT, WEIGHT] if operation.kind is Kind.BACKWARD else [KINDS.index(operation.kind)]
                    order += [self.number(kind, operation.stage, operation.microbatch) for kind in kinds]
            lists.append(order)
        return lists

    def _needs(self, kind: int, stage: int, microbatch: int) -> tuple[tuple[int, float], ...]:
        if kind == FORWARD:
            return ((self.number(FORWARD, stage - 1, microbatch), self.lag(stage - 1)),) if stage else ()
        if kind == WEIGHT:
            return ((self.number(INPUT, stage, microbatch), 0.0),)
        forward = (self.number(FORWARD, stage, microbatch), 0.0)
        if stage == self.num_stages - 1:
            return (forward,)
        return forward, (self.number(INPUT, stage + 1, microbatch), self.lag(stage))
