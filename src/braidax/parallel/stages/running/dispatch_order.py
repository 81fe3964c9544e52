"""One order of all operations, in which one process dispatches what several devices do, and which of them as one."""

from collections.abc import Mapping
from itertools import pairwise

from braidax.errors import ArgumentError
from braidax.parallel.stages.schedules import Kind, Operation, Schedule

_RECEIVES = (Kind.RECV_F, Kind.RECV_B)


def dispatch_order(schedule: Schedule) -> tuple[Operation, ...]:
    """Returns the operations of all lists in one order: each list's own, a receive behind its send.

    Devices take turns, so that each soon has something to do.

    **Raises:** `ArgumentError` for lists that wait for one another.
    """
    places, sent = [0] * schedule.num_devices, set[Operation]()
    found: list[Operation] = []
    count = sum(map(len, schedule.lists))
    while len(found) < count:
        before = len(found)
        for device, operations in enumerate(schedule.lists):
            if places[device] == len(operations):
                continue
            operation = operations[places[device]]
            if operation.kind in _RECEIVES and operation.partner not in sent:
                continue
            if operation.is_transfer:
                sent.add(operation)
            places[device] += 1
            found.append(operation)
        if len(found) == before:
            waiting = [str(lists[at]) for at, lists in zip(places, schedule.lists, strict=True) if at < len(lists)]
            raise ArgumentError(f"schedule {schedule.name!r} waits for itself at {', '.join(waiting)}")
    return tuple(found)


def at_once(schedule: Schedule) -> Mapping[Operation, Operation]:
    """Returns the forward passes of the last stage behind which its device goes back at once, each with how it does.

    What it receives in between is for other microbatches, and what it can do next for the same one is to go back.
    """
    last = schedule.num_stages - 1
    return {
        one: back
        for operations in schedule.lists
        for one, back in pairwise(one for one in operations if one.kind not in _RECEIVES)
        if one == Operation(Kind.FORWARD, last, back.microbatch)
    }
