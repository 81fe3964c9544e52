"""Sends and receives, put into lists in one order that all devices agree on."""

from bisect import bisect_left
from collections.abc import Iterable

from braidax.parallel.stages.schedules.costs import Costs
from braidax.parallel.stages.schedules.dependencies import Dependencies, crossings
from braidax.parallel.stages.schedules.operations import Kind, Operation, Schedule
from braidax.parallel.stages.schedules.simulate import Simulation, Timed, simulate


def with_transfers(schedule: Schedule, costs: Costs | None = None) -> Schedule:
    """Returns a schedule with the sends and receives between its devices.

    All lists are parts of one order of everything: computations as they begin in a simulation, each transfer between
    what it sends and what needs it, at the moment when both devices are soonest free at the same time. The first
    operation of that order that is not done can always be done, whatever the true times are, so transfers that block
    cannot wait for one another in a circle.

    **Arguments:** `schedule`: those it already has are put anew. `costs`: of the simulation; by default a unit each.

    **Raises:** `ArgumentError` when computations alone wait for one another.
    """
    simulation = simulate(schedule.computing(), costs or Costs.even(schedule.num_stages))
    in_order = list(simulation.in_order())
    moments = _moments(simulation, in_order)
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
        under_way += moments.get(timed.operation, [])
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


def _moments(simulation: Simulation, in_order: Iterable[Timed]) -> dict[Operation, list[tuple[float, Operation]]]:
    """Returns, by what is sent, when it is sent."""
    schedule, dependencies = simulation.schedule, Dependencies(simulation.schedule)
    when = {timed.operation: timed for timed in in_order}
    boundaries = [_Boundaries(timed) for timed in simulation.timed]
    found: dict[Operation, list[tuple[float, Operation]]] = {}
    for send in crossings(schedule):
        made, partner = dependencies.of(send)[0], send.partner
        if send.kind is Kind.SEND_F:
            needed = Operation(Kind.FORWARD, partner.stage, send.microbatch)
        else:
            needed = dependencies.backward(partner.stage, send.microbatch)
        moment = _soonest(
            when[made].end,
            when[needed].start,
            simulation.costs.seconds(send),
            boundaries[when[made].device],
            boundaries[when[needed].device],
        )
        found.setdefault(made, []).append((moment, send))
    return found


class _Boundaries:
    """When a device is between two operations."""

    def __init__(self, timed: tuple[Timed, ...]) -> None:
        lasting = [each for each in timed if each.end > each.start]
        self._starts, self.ends = [each.start for each in lasting], [each.end for each in lasting]

    def free(self, moment: float) -> float:
        """Returns when the device is between operations, from a moment on."""
        number = bisect_left(self._starts, moment) - 1  # the last that began before it
        return max(moment, self.ends[number]) if number >= 0 else moment


def _soonest(made: float, needed: float, seconds: float, sender: _Boundaries, receiver: _Boundaries) -> float:
    """Returns the moment between two at which least is lost by waiting for one another, and by what is late."""
    best, chosen = float("inf"), made
    moments = [made]
    for boundaries in (sender, receiver):
        first = bisect_left(boundaries.ends, made)
        moments += boundaries.ends[first : bisect_left(boundaries.ends, needed, first) + 1]
    for moment in sorted(each for each in moments if each <= needed):
        frees = sender.free(moment), receiver.free(moment)
        lost = max(frees) - min(frees) + max(max(frees) + seconds - needed, 0.0)
        if lost < best - 1e-12:
            best, chosen = lost, moment
    return chosen
