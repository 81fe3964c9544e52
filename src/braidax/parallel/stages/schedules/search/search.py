"""The face of the search: costs and a limit in, the best schedule found out."""

from collections.abc import Iterable
from dataclasses import dataclass

from braidax.errors import ArgumentError
from braidax.parallel.stages.schedules.costs import Costs
from braidax.parallel.stages.schedules.operations import Schedule, check_counts
from braidax.parallel.stages.schedules.search.beam import beam
from braidax.parallel.stages.schedules.search.bound import shortest_seconds
from braidax.parallel.stages.schedules.search.dispatch import dispatched, policies
from braidax.parallel.stages.schedules.search.improve import fits, improved, makespan
from braidax.parallel.stages.schedules.search.merge import merged
from braidax.parallel.stages.schedules.search.problem import Orders, Problem

_BEAM_STEPS = 12_000  # how many beginnings are kept, over all steps
_NUM_IMPROVED = 4  # schedules of the best policies that are improved


@dataclass(frozen=True)
class Found:
    """What a search has found. **Fields:** `bound_seconds`: no schedule of these stages on these devices is shorter."""

    schedule: Schedule
    seconds: float
    bound_seconds: float


def search_schedule(
    costs: Costs,
    num_microbatches: int,
    device_of_stage: tuple[int, ...],
    *,
    limit_bytes: int | None = None,
    known: Iterable[Schedule] = (),
    num_trials: int = 4000,
) -> Found:
    """Searches for the schedule of the shortest step, flushed, by policies and then by moving single operations.

    Halves of a backward pass that stand side by side become a whole one where no step is longer for it. The same
    arguments lead to the same schedule, on any machine.

    **Arguments:** `costs`: by stage. `device_of_stage`: where each lies. `limit_bytes`: of the activations of a device.
    `known`: schedules of these stages to begin from, too. `num_trials`: how many changes are looked at, at most.

    **Raises:** `ArgumentError` where no schedule fits into `limit_bytes`.
    """
    check_counts(num_microbatches=num_microbatches)
    problem = Problem(costs, num_microbatches, device_of_stage, limit_bytes)
    bound = shortest_seconds(problem)
    starts: list[tuple[float, int, Orders]] = []
    for orders in _begun(problem, known):
        state = makespan(problem, orders)
        if state is not None and all(fits(problem, order) for order in orders):
            starts.append((state[0], len(starts), orders))
            if state[0] <= bound * (1 + 1e-9):
                break
    starts.sort()
    best, _, best_orders = starts[0]
    for _, _, orders in starts[:_NUM_IMPROVED]:
        if best <= bound * (1 + 1e-9):
            break
        length, better = improved(problem, orders, bound=bound, num_trials=num_trials // _NUM_IMPROVED)
        if length < best:
            best, best_orders = length, better
    return Found(merged(problem, best_orders, "searched"), best, bound)


def _begun(problem: Problem, known: Iterable[Schedule]) -> Iterable[Orders]:
    for schedule in known:
        if schedule.device_of_stage != problem.device_of_stage or schedule.num_microbatches != problem.num_microbatches:
            raise ArgumentError(
                f"known schedule {schedule.name!r} has {schedule.num_microbatches} microbatches and device_of_stage="
                f"{schedule.device_of_stage}, expected {problem.num_microbatches} and {problem.device_of_stage}"
            )
        yield problem.orders(schedule)
    for policy in policies(problem):
        yield dispatched(problem, policy)
    orders = beam(problem, width=max(_BEAM_STEPS // len(problem.devices), 4))
    if orders is not None:
        yield orders
