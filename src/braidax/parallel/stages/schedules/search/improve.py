"""Schedules made better by moving operations of the longest chain, as in job shops."""

from collections.abc import Iterator

from braidax.parallel.stages.schedules.search.problem import Orders, Problem


def makespan(problem: Problem, orders: Orders) -> tuple[float, list[float], list[int]] | None:
    """Returns how long orders take, when each operation ends, and what it waited for last (-1: nothing).

    `None` for orders that wait for themselves.
    """
    num_operations = len(problem.devices)
    ends, causes = [-1.0] * num_operations, [-1] * num_operations
    heads, free, last = [0] * len(orders), [0.0] * len(orders), [-1] * len(orders)
    left, moved = num_operations, True
    needs, seconds = problem.needs, problem.seconds
    while left and moved:
        moved = False
        for device, order in enumerate(orders):
            head, time, before = heads[device], free[device], last[device]
            while head < len(order):
                number = order[head]
                start, cause = time, before
                for need, lag in needs[number]:
                    end = ends[need]
                    if end < 0:
                        break
                    if end + lag > start:
                        start, cause = end + lag, need
                else:
                    time = ends[number] = start + seconds[number]
                    causes[number] = cause
                    before = number
                    head += 1
                    continue
                break
            if head > heads[device]:
                left -= head - heads[device]
                moved = True
                heads[device], free[device], last[device] = head, time, before
    return None if left else (max(free), ends, causes)


def fits(problem: Problem, order: list[int]) -> bool:
    """Says whether the order of a device keeps within memory."""
    live = 0
    for number in order:
        live += problem.changes[number]
        if live > problem.limit:
            return False
    return True


def improved(problem: Problem, orders: Orders, *, bound: float, num_trials: int) -> tuple[float, Orders]:
    """Moves operations that make the step long before others of their device, as long as that helps.

    Moves that change nothing are taken too, each order at most once: so it leaves plateaus.

    **Arguments:** `bound`: where it stops. `num_trials`: how many orders are looked at, at most.

    **Returns:** how long the best orders take, and these.
    """
    state = makespan(problem, orders)
    assert state is not None
    best, best_orders = state[0], orders
    current, seen = state, {_key(orders)}
    trials = 0
    while trials < num_trials and best > bound * (1 + 1e-9):
        candidates: list[tuple[float, int, Orders]] = []
        for moved in _neighbors(problem, orders, current):
            key = _key(moved)
            if key in seen:
                continue
            seen.add(key)
            trials += 1
            found = makespan(problem, moved)
            if found is not None:
                candidates.append((found[0], len(candidates), moved))
                if found[0] < current[0] * (1 - 1e-9):
                    break
            if trials >= num_trials:
                break
        if not candidates:
            break
        length, _, orders = min(candidates)
        state = makespan(problem, orders)
        assert state is not None
        current = state
        if length < best * (1 - 1e-12):
            best, best_orders = length, orders
    return best, best_orders


def _key(orders: Orders) -> int:
    return hash(tuple(map(tuple, orders)))


def _neighbors(problem: Problem, orders: Orders, state: tuple[float, list[float], list[int]]) -> Iterator[Orders]:
    """Yields orders in which an operation of the longest chain comes before others of its device, or behind them."""
    length, ends, causes = state
    number = next(number for number, end in enumerate(ends) if end == length)
    chain: list[int] = []
    while number >= 0:
        chain.append(number)
        number = causes[number]
    places = [{number: place for place, number in enumerate(order)} for order in orders]
    for number in chain:
        device = problem.devices[number]
        order, place = orders[device], places[device][number]
        for target in (*range(place - 1, max(place - 7, -1), -1), *range(place + 1, place + 5)):
            if not 0 <= target < len(order):
                continue
            passed = order[target:place] if target < place else order[place + 1 : target + 1]
            if any(_is_bound(problem, number, other) for other in passed):
                continue
            moved = [*order[:place], *order[place + 1 :]]
            moved.insert(target, number)
            if fits(problem, moved):
                yield [moved if each == device else other for each, other in enumerate(orders)]


def _is_bound(problem: Problem, one: int, other: int) -> bool:
    """Says whether two operations of a device have one order: a stage's microbatches, and what the other needs."""
    kind, stage, _ = problem.parts(one)
    other_kind, other_stage, _ = problem.parts(other)
    if (kind, stage) == (other_kind, other_stage):
        return True
    return any(need == other for need, _ in problem.needs[one]) or any(need == one for need, _ in problem.needs[other])
