"""ZB-V, V-Half and V-Min: two stages a device in the shape of a V, as much memory as one chooses.

A microbatch goes down the devices, up again, and its gradients take the same way. How many units of time lie between
two devices, downward and upward, is the whole of a *building block*; it is repeated every six units, because a device
has six operations a microbatch. How long a block lasts says how many activations live at once. Then the repeated
blocks are pushed to the left, wherever no more activations than allowed would live. Sources: Qi et al., "Pipeline
Parallelism with Controllable Memory" (NeurIPS 2024), sections 3 and 4; Qi et al., "Zero Bubble Pipeline Parallelism"
(ICLR 2024; ZB-V is in the extended version).
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from braidax.parallel.stages.schedules.operations import (
    Kind,
    Operation,
    Schedule,
    check_counts,
    folded,
    with_updates,
)

_PERIOD = 6  # F, I and W of two stages, a unit of time each


def zero_bubble_v(num_devices: int, num_microbatches: int) -> Schedule:
    """No bubble but for filling and draining, with the memory of 1F1B: blocks of four units down and two up.

    **Arguments:** `num_devices`: two stages each. **Raises:** `ArgumentError` for a count below 1.
    """
    return _v_shape("ZB-V", num_devices, num_microbatches, (4, 2), 2 * num_devices)


def v_half(num_devices: int, num_microbatches: int) -> Schedule:
    """Half the memory of 1F1B: blocks of two units down and one up.

    **Arguments:** `num_devices`: two stages each. **Raises:** `ArgumentError` for a count below 1.
    """
    return _v_shape("V-Half", num_devices, num_microbatches, (2, 1), 2 * ((num_devices + 2) // 2))


def v_min(num_devices: int, num_microbatches: int) -> Schedule:
    """A third of the memory of 1F1B: blocks of one unit down and one up.

    **Arguments:** `num_devices`: two stages each. **Raises:** `ArgumentError` for a count below 1.
    """
    return _v_shape("V-Min", num_devices, num_microbatches, (1, 1), 2 * ((num_devices + 4) // 3))


def _v_shape(name: str, num_devices: int, num_microbatches: int, steps: tuple[int, int], max_live: int) -> Schedule:
    check_counts(num_devices=num_devices, num_microbatches=num_microbatches)
    shortest = num_devices - 1 + _PERIOD * num_microbatches  # the last device begins late, and is never idle
    best: tuple[int, list[list[Operation]]] | None = None
    for block in _blocks(num_devices, steps):
        length, lists = _pushed_left(block, num_microbatches, max_live)
        if best is None or length < best[0]:
            best = length, lists
        if length == shortest:
            break
    assert best is not None  # every number of devices has a block: proven in tests up to 64
    return Schedule(name, num_microbatches, folded(num_devices), with_updates(best[1]))


Block = list[tuple[int, int, int, int]]
"""When each device begins the forwards of its first and second stage, and the backwards of its second and first."""


def _blocks(num_devices: int, steps: tuple[int, int]) -> Iterator[Block]:
    """Yields blocks, short ones first, that repeated every six units never want a device twice at a time."""
    down, up = steps
    last = num_devices - 1
    waits = sorted(((top, bottom) for top in range(_PERIOD) for bottom in range(_PERIOD)), key=lambda each: sum(each))
    for top, bottom in waits:  # how long gradients wait before they go down, and before they go up
        second = down * last + 1  # on the last device
        turn = second + up * last + 1 + top  # on the first device
        up_again = turn + down * last + 1 + bottom
        block = [
            (down * device, second + up * (last - device), turn + down * device, up_again + up * (last - device))
            for device in range(num_devices)
        ]
        if all(len({start % _PERIOD for start in starts}) == len(starts) for starts in block):
            yield block


@dataclass
class _Device:
    """What a device has still to do, in the order of the repeated blocks."""

    order: list[Operation]
    position: dict[Operation, int] = field(init=False)
    done: list[Operation] = field(default_factory=list[Operation])
    is_done: list[bool] = field(init=False)
    first: int = 0  # nothing before it is left
    live: int = 0
    waiting: deque[Operation] = field(default_factory=deque[Operation])  # gradients of weights

    def __post_init__(self) -> None:
        self.position = {operation: number for number, operation in enumerate(self.order)}
        self.is_done = [False] * len(self.order)

    def fits(self, position: int, max_live: int) -> bool:
        """Says whether all before a forward can still be done behind it, gradients of weights being taken at once."""
        live = most = self.live - len(self.waiting)
        for number in range(self.first, position):
            if not self.is_done[number]:
                live += 1 if self.order[number].kind is Kind.FORWARD else -1
                most = max(most, live)
        return most < max_live

    def do(self, operation: Operation) -> None:
        """Does one of the order."""
        self.is_done[self.position[operation]] = True
        while self.first < len(self.order) and self.is_done[self.first]:
            self.first += 1
        self.done.append(operation)
        if operation.kind is Kind.FORWARD:
            self.live += 1
        else:
            self.waiting.append(Operation(Kind.WEIGHT, operation.stage, operation.microbatch))

    def do_waiting(self) -> None:
        """Does the gradient of weights that waits longest."""
        self.done.append(self.waiting.popleft())
        self.live -= 1


def _pushed_left(block: Block, num_microbatches: int, max_live: int) -> tuple[int, list[list[Operation]]]:
    """Goes through time, and gives each device the first of its repeated blocks that is ready and fits into memory.

    **Returns:** how long it takes, and the lists.
    """
    num_devices = len(block)
    devices = [_Device(_repeated(starts, device, num_devices, num_microbatches)) for device, starts in enumerate(block)]
    stages = folded(num_devices)
    following = {(kind, stage): 0 for kind in (Kind.FORWARD, Kind.INPUT) for stage in range(len(stages))}
    ends: dict[Operation, int] = {}
    time = 0
    while any(device.first < len(device.order) or device.waiting for device in devices):
        chosen: list[Operation] = []
        for number, device in enumerate(devices):
            ready = [
                operation
                for kind, stage in ((k, s) for k in (Kind.FORWARD, Kind.INPUT) for s in _stages(number, num_devices))
                if (each := following[kind, stage]) < num_microbatches
                and _is_ready(operation := Operation(kind, stage, each), ends, len(stages))
            ]
            taken = _taken(device, ready, max_live)
            if taken is not None:
                device.do(taken)
                chosen.append(taken)
            elif device.waiting:
                device.do_waiting()
        time += 1
        for operation in chosen:  # seen by the others when the unit is over
            ends[operation] = time
            following[operation.kind, operation.stage] += 1
    return time, [device.done for device in devices]


def _taken(device: _Device, ready: list[Operation], max_live: int) -> Operation | None:
    for operation in sorted(ready, key=device.position.__getitem__):
        if operation.kind is Kind.INPUT:
            return operation
        if device.fits(device.position[operation], max_live):
            if device.live < max_live:
                return operation
            if device.waiting:
                return None  # a gradient of weights first, which makes room
    return None


def _stages(device: int, num_devices: int) -> tuple[int, int]:
    return device, 2 * num_devices - 1 - device


def _is_ready(operation: Operation, ends: dict[Operation, int], num_stages: int) -> bool:
    stage, each = operation.stage, operation.microbatch
    if operation.kind is Kind.FORWARD:
        return stage == 0 or Operation(Kind.FORWARD, stage - 1, each) in ends
    is_last = stage == num_stages - 1
    return Operation(Kind.FORWARD, stage, each) in ends and (is_last or Operation(Kind.INPUT, stage + 1, each) in ends)


def _repeated(starts: tuple[int, ...], device: int, num_devices: int, num_microbatches: int) -> list[Operation]:
    first, second = _stages(device, num_devices)
    does = ((Kind.FORWARD, first), (Kind.FORWARD, second), (Kind.INPUT, second), (Kind.INPUT, first))
    timed = [
        (start + _PERIOD * each, Operation(kind, stage, each))
        for start, (kind, stage) in zip(starts, does, strict=True)
        for each in range(num_microbatches)
    ]
    return [operation for _, operation in sorted(timed)]
