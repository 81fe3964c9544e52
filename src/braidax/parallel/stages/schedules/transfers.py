"""Sends and receives, put into lists in one order that all devices agree on."""

from braidax.parallel.stages.schedules.costs import Costs
from braidax.parallel.stages.schedules.dependencies import Dependencies, crossings
from braidax.parallel.stages.schedules.operations import Kind, Operation, Schedule
from braidax.parallel.stages.schedules.simulate import simulate


def with_transfers(schedule: Schedule, costs: Costs | None = None) -> Schedule:
    """Returns a schedule with the sends and receives between its devices.

    All lists are parts of one order of everything: computations as they begin in a simulation, each transfer at the
    moment when what it sends is made, since a device computes on while it sends and receives. The first operation of
    that order that is not done can always be done, whatever the true times are, so transfers that block cannot wait for
    one another in a circle.

    **Arguments:** `schedule`: those it already has are put anew. `costs`: of the simulation; by default a unit each.

    **Raises:** `ArgumentError` when computations alone wait for one another.
    """
    simulation = simulate(schedule.computing(), costs or Costs.even(schedule.num_stages))
    in_order = list(simulation.in_order())
    dependencies, sends = Dependencies(simulation.schedule), dict[Operation, list[Operation]]()
    for send in crossings(simulation.schedule):
        sends.setdefault(dependencies.of(send)[0], []).append(send)
    lists: list[list[Operation]] = [[] for _ in schedule.lists]
    under_way: list[tuple[float, Operation]] = []

    def enqueue(until: float) -> None:
        ready = [each for each in under_way if each[0] <= until]
        under_way[:] = [each for each in under_way if each[0] > until]
        for _, send in sorted(ready, key=lambda each: each[0]):
            for each in (send, send.partner):
                lists[schedule.device_of_stage[each.stage]].append(each)

    for timed in in_order:
        enqueue(timed.start)
        lists[timed.device].append(timed.operation)
        under_way += [(timed.end, send) for send in sends.get(timed.operation, ())]
    enqueue(float("inf"))
    return schedule.with_lists(tuple(map(tuple, lists)))


def transfers_of_pairs(schedule: Schedule) -> dict[tuple[int, int], tuple[Operation, ...]]:
    """Returns the sends between each two devices, the lower one first, in the order in which both enqueue them."""
    found: dict[tuple[int, int], list[Operation]] = {}
    for device, operations in enumerate(schedule.lists):
        for operation in operations:
            if operation.is_transfer:
                other = schedule.device_of_stage[operation.partner.stage]
                if device < other:
                    is_send = operation.kind in (Kind.SEND_F, Kind.SEND_B)
                    found.setdefault((device, other), []).append(operation if is_send else operation.partner)
    return {pair: tuple(sends) for pair, sends in sorted(found.items())}
