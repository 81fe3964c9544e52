"""Whether a schedule is one: everything once, where it belongs, in an order that ends, within memory."""

from collections import Counter
from collections.abc import Iterable, Sequence

from braidax.errors import ArgumentError
from braidax.parallel.stages.schedules.dependencies import Dependencies, crossings
from braidax.parallel.stages.schedules.operations import RELEASES, Kind, Operation, Schedule
from braidax.parallel.stages.schedules.rendezvous import check_rendezvous
from braidax.parallel.stages.schedules.versions import Versions, versions


def validate(
    schedule: Schedule,
    *,
    activation_bytes: Sequence[int] | None = None,
    kept_bytes: Sequence[int] | None = None,
    limit_bytes: int | None = None,
) -> Versions:
    """Checks all that can be wrong with a schedule.

    Every stage has a forward, a backward and, where that is of the inputs alone, a gradient of the weights of each
    microbatch, and its updates, once, on its own device; nothing waits for what comes later; where there are sends and
    receives, all are there and meet, also if each blocks both of its devices; versions of the weights are there when
    they are wanted.

    **Arguments:** `activation_bytes`: of each stage, for one microbatch; by default 1. `kept_bytes`: between the
    gradient of its inputs and that of its weights; by default the same. `limit_bytes`: of a device's activations,
    checked if given.

    **Returns:** which versions of the weights microbatches see.

    **Raises:** `ArgumentError` that names operation, device and place.
    """
    _check_places(schedule)
    _check_complete(schedule)
    _check_updates(schedule)
    _check_order(schedule)
    if any(x.is_transfer for x in schedule.operations()):
        check_rendezvous(schedule)
    if limit_bytes is not None:
        taken = activation_bytes or (1,) * schedule.num_stages
        _check_memory(schedule, taken, kept_bytes or taken, limit_bytes)
    return versions(schedule)


def _check_places(schedule: Schedule) -> None:
    """Checks that each operation is one of the schedule's, on its device, and there once."""
    places: dict[Operation, tuple[int, int]] = {}
    for device, operations in enumerate(schedule.lists):
        for place, operation in enumerate(operations):
            where = f"{operation} at place {place} of device {device}"
            if not 0 <= operation.stage < schedule.num_stages:
                raise ArgumentError(f"{where} is of no stage: there are {schedule.num_stages}")
            limit = schedule.num_updates if operation.kind is Kind.UPDATE else schedule.num_microbatches
            if not 0 <= operation.microbatch < limit:
                of = "update" if operation.kind is Kind.UPDATE else "microbatch"
                raise ArgumentError(f"{where} is of no {of}: there are {limit}")
            home = schedule.device_of_stage[operation.stage]
            if home != device:
                raise ArgumentError(f"{where} is on the wrong device: stage {operation.stage} lies on device {home}")
            if operation in places:
                raise ArgumentError(f"{where} is there twice: the first is at place {places[operation][1]}")
            places[operation] = device, place


def _check_complete(schedule: Schedule) -> None:
    there = set(schedule.operations())
    for stage in range(schedule.num_stages):
        home = schedule.device_of_stage[stage]
        for each in range(schedule.num_microbatches):
            forward, backward, inputs, weight = (
                Operation(kind, stage, each) for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT)
            )
            if backward in there and inputs in there:
                raise ArgumentError(f"{backward} and {inputs} of device {home} are the same backward, once is enough")
            if backward in there and weight in there:
                raise ArgumentError(f"{weight} of device {home} is too much: {backward} is a whole backward")
            split = inputs in there
            _expect([forward, inputs if split else backward, *([weight] if split else [])], there, home)
        _expect((Operation(Kind.UPDATE, stage, number) for number in range(schedule.num_updates)), there, home)
    if any(x.is_transfer for x in there):
        sends = crossings(schedule)
        for send in sends:
            for each in (send, send.partner):
                _expect([each], there, schedule.device_of_stage[each.stage])
        needless = {x for x in there if x.is_transfer} - set(sends) - {send.partner for send in sends}
        if needless:
            raise ArgumentError(f"{min(needless)} has no other device to reach")


def _expect(operations: Iterable[Operation], there: set[Operation], device: int) -> None:
    for operation in operations:
        if operation not in there:
            raise ArgumentError(f"{operation} is missing from device {device}")


def _check_updates(schedule: Schedule) -> None:
    """Checks that updates come in their order, each behind all the gradients that it adds up."""
    each = schedule.microbatches_per_update or schedule.num_microbatches
    for device, operations in enumerate(schedule.lists):
        gradients, made = Counter[tuple[int, int]](), Counter[int]()
        for operation in operations:
            stage, number = operation.stage, operation.microbatch
            if operation.kind in RELEASES:
                gradients[stage, number // each] += 1
            elif operation.kind is Kind.UPDATE:
                if made[stage] != number or gradients[stage, number] < each:
                    raise ArgumentError(
                        f"{operation} of device {device} stands behind {made[stage]} updates and "
                        f"{gradients[stage, number]} of its {each} gradients, expected {number} and all of them"
                    )
                made[stage] += 1


def _check_order(schedule: Schedule) -> None:
    """Checks that lists and dependencies make no circle."""
    dependencies = Dependencies(schedule)
    before: dict[Operation, list[Operation]] = {}
    for operations in schedule.lists:
        for place, operation in enumerate(operations):
            needs = dependencies.of(operation)
            if operation.kind in (Kind.RECV_F, Kind.RECV_B):
                needs.append(operation.partner)
            before[operation] = [*needs, *operations[max(place - 1, 0) : place]]
    done: set[Operation] = set()
    for last in before:
        path: dict[Operation, int] = {}  # what waits for what, down to the one looked at
        stack = [last]
        while stack:
            operation = stack[-1]
            left = [need for need in before[operation] if need not in done] if operation not in done else []
            if not left:
                done.add(operation)
                path.pop(operation, None)
                stack.pop()
                continue
            path.setdefault(operation, len(path))
            if left[0] in path:
                circle = [*list(path)[path[left[0]] :], left[0]]
                raise ArgumentError(
                    f"schedule {schedule.name!r} waits for itself: {' waits for '.join(map(str, circle))}"
                )
            stack.append(left[0])


def _check_memory(schedule: Schedule, taken: Sequence[int], kept: Sequence[int], limit_bytes: int) -> None:
    for device, operations in enumerate(schedule.lists):
        live = 0
        for place, operation in enumerate(operations):
            stage = operation.stage
            live += {
                Kind.FORWARD: taken[stage],
                Kind.BACKWARD: -taken[stage],
                Kind.INPUT: kept[stage] - taken[stage],
                Kind.WEIGHT: -kept[stage],
            }.get(operation.kind, 0)
            if live > limit_bytes:
                raise ArgumentError(
                    f"{operation} at place {place} of device {device} makes {live} bytes of activations live, "
                    f"limit_bytes={limit_bytes}; take fewer microbatches at once (V-Half, V-Min) or search with it"
                )
