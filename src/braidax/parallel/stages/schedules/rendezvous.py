"""Whether transfers meet: each is one program that both of its devices run, in the order of their lists."""

from braidax.errors import ArgumentError
from braidax.parallel.stages.schedules.dependencies import Dependencies
from braidax.parallel.stages.schedules.operations import Operation, Schedule


def check_rendezvous(schedule: Schedule) -> None:
    """Checks that lists run to their end when each send waits for its receive, and each receive for its send.

    **Raises:** `ArgumentError` with the devices that wait for one another, and where.
    """
    heads = [0] * schedule.num_devices
    dependencies, done = Dependencies(schedule), set[Operation]()
    homes = {x: device for device, operations in enumerate(schedule.lists) for x in operations}
    moved = True
    while moved:
        moved = False
        for device, operations in enumerate(schedule.lists):
            while heads[device] < len(operations):
                operation = operations[heads[device]]
                if any(need not in done for need in dependencies.of(operation)):
                    break
                if operation.is_transfer:
                    other = homes[operation.partner]
                    if schedule.lists[other][heads[other] : heads[other] + 1] != (operation.partner,):
                        break
                    if any(need not in done for need in dependencies.of(operation.partner)):
                        break
                    heads[other] += 1
                    done.add(operation.partner)
                heads[device] += 1
                done.add(operation)
                moved = True
    stuck = [device for device, operations in enumerate(schedule.lists) if heads[device] < len(operations)]
    if stuck:
        circle = _circle(schedule, heads, homes, done, stuck[0])
        raise ArgumentError(
            f"schedule {schedule.name!r} has transfers that never meet: {circle}; "
            "with_transfers orders them so that they do"
        )


def _circle(
    schedule: Schedule, heads: list[int], homes: dict[Operation, int], done: set[Operation], device: int
) -> str:
    """Says who waits for whom, from a device on, until one comes twice."""
    dependencies, seen, parts = Dependencies(schedule), list[int](), list[str]()
    while device not in seen:
        seen.append(device)
        operation = schedule.lists[device][heads[device]]
        missing = [need for need in dependencies.of(operation) if need not in done]
        awaited = missing[0] if missing else operation.partner
        parts.append(f"device {device} waits in {operation} for {awaited} of device {homes[awaited]}")
        device = homes[awaited]
    return ", ".join(parts[seen.index(device) :])
