"""Halves of a backward pass that follow one another become a whole one, where that makes nothing later."""

import copy
from itertools import pairwise

from braidax.parallel.stages.schedules.operations import Schedule
from braidax.parallel.stages.schedules.search.improve import makespan
from braidax.parallel.stages.schedules.search.problem import INPUT, WEIGHT, Orders, Problem


def merged(problem: Problem, orders: Orders, name: str) -> Schedule:
    """Returns orders as a schedule, in which an `I` with its own `W` next to it is a `B`: one program in place of two.

    The gradient of the inputs goes out when all of a `B` is over. So two halves are left apart where the step would
    become longer by that. No more memory is taken than by halves: between them nothing begins.
    """
    whole = copy.copy(problem)
    whole.seconds = [*problem.seconds]
    before = makespan(problem, orders)
    assert before is not None, "orders that a search has found come to an end"
    joined = set[int]()
    for inputs, weights in (pair for order in orders for pair in pairwise(order)):
        kind, stage, microbatch = problem.parts(inputs)
        if kind != INPUT or weights != problem.number(WEIGHT, stage, microbatch):
            continue
        apart = whole.seconds[inputs], whole.seconds[weights]
        whole.seconds[inputs], whole.seconds[weights] = sum(apart), 0.0
        after = makespan(whole, orders)
        if after is not None and after[0] <= before[0] * (1 + 1e-9):
            joined.add(inputs)
        else:
            whole.seconds[inputs], whole.seconds[weights] = apart
    return problem.schedule(orders, name, whole=joined)
