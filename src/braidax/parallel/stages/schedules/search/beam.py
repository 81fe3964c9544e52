"""Schedules made by going through time with many beginnings at once, of which the most promising are kept."""

from dataclasses import dataclass

from braidax.parallel.stages.schedules.search.problem import FORWARD, INPUT, WEIGHT, Orders, Problem


@dataclass(slots=True)
class _Beginning:
    """What is done so far. **Fields:** `sent`: ends that others need. `row`, `before`: what was done last."""

    counts: tuple[int, ...]  # by kind and stage
    free: tuple[float, ...]
    last: float  # when the last operation began
    sent: dict[int, float]
    live: tuple[float, ...]
    left: tuple[float, ...]  # seconds of work of each device
    row: int
    before: "_Beginning | None"


def beam(problem: Problem, *, width: int) -> Orders | None:
    """Returns the best orders found; `None` if none came to its end.

    Beginnings are extended in the order of time. Those that cannot end soon are left, and of equals those with more
    idle time.

    **Arguments:** `width`: how many beginnings are kept.
    """
    tails = _tails(problem)
    work = [0.0] * problem.num_devices
    for number, device in enumerate(problem.devices):
        work[device] += problem.seconds[number]
    nothing = (0.0,) * problem.num_devices
    kept = [_Beginning((0,) * (3 * problem.num_stages), nothing, 0.0, {}, nothing, tuple(work), -1, None)]
    for _ in problem.devices:
        ranked: list[tuple[float, float, int, _Beginning]] = []
        for beginning in kept:
            for row in range(len(beginning.counts)):
                after = _after(problem, beginning, row)
                if after is not None:
                    ends = [free + left for free, left in zip(after.free, after.left, strict=True)]
                    least = max(
                        max(ends), max((end + tails[number] for number, end in after.sent.items()), default=0.0)
                    )
                    ranked.append((least, sum(ends), len(ranked), after))
        ranked.sort(key=lambda each: each[:3])
        kept = _different([each[3] for each in ranked], width)
    return _orders(problem, kept[0]) if kept else None


def _different(ranked: list[_Beginning], width: int) -> list[_Beginning]:
    """Returns the first so many that no other of the same counts makes needless."""
    kept: list[_Beginning] = []
    alike: dict[tuple[int, ...], list[_Beginning]] = {}
    for beginning in ranked:
        others = alike.setdefault(beginning.counts, [])
        if not any(_is_nowhere_later(other, beginning) for other in others):
            others.append(beginning)
            kept.append(beginning)
            if len(kept) == width:
                break
    return kept


def _is_nowhere_later(one: _Beginning, other: _Beginning) -> bool:
    if one.last > other.last or any(mine > its for mine, its in zip(one.free, other.free, strict=True)):
        return False
    return all(one.sent[number] <= end for number, end in other.sent.items())


def _after(problem: Problem, beginning: _Beginning, row: int) -> _Beginning | None:
    counts, num_stages = beginning.counts, problem.num_stages
    kind, stage = divmod(row, num_stages)
    each = counts[row]
    if each == problem.num_microbatches or (kind != FORWARD and counts[row - num_stages] <= each):
        return None
    number, device, before = row * problem.num_microbatches + each, problem.device_of_stage[stage], -1
    if kind == FORWARD and stage > 0:
        before = number - problem.num_microbatches
    elif kind == INPUT and stage < num_stages - 1:
        before = number + problem.num_microbatches
    start, sent = beginning.free[device], beginning.sent
    if before >= 0:
        if before not in sent:
            return None
        start = max(start, sent[before] + problem.lag(stage - 1 if kind == FORWARD else stage))
    if start < beginning.last:
        return None
    if kind == FORWARD:
        under_way = [counts[s] - counts[num_stages + s] for s in range(num_stages)]
        if not problem.has_room(stage, beginning.live[device], under_way):
            return None
    elif not problem.goes_back(number, beginning.live[device]):
        return None
    seconds = problem.seconds[number]
    end = start + seconds
    if kind != WEIGHT:
        sent = dict(sent)
        sent.pop(before, None)
        if (kind == FORWARD and stage < num_stages - 1) or (kind == INPUT and stage > 0):
            sent[number] = end
    return _Beginning(
        (*counts[:row], each + 1, *counts[row + 1 :]),
        (*beginning.free[:device], end, *beginning.free[device + 1 :]),
        start,
        sent,
        (*beginning.live[:device], beginning.live[device] + problem.changes[number], *beginning.live[device + 1 :]),
        (*beginning.left[:device], beginning.left[device] - seconds, *beginning.left[device + 1 :]),
        row,
        beginning,
    )


def _orders(problem: Problem, beginning: _Beginning) -> Orders:
    orders: Orders = [[] for _ in range(problem.num_devices)]
    each = beginning
    while each.before is not None:
        stage = each.row % problem.num_stages
        number = each.row * problem.num_microbatches + each.counts[each.row] - 1
        orders[problem.device_of_stage[stage]].append(number)
        each = each.before
    return [order[::-1] for order in orders]


def _tails(problem: Problem) -> list[float]:
    """Returns how long what must follow an operation takes at least."""
    tails = [0.0] * len(problem.devices)
    stages = range(problem.num_stages)
    backwards = [(kind, stage) for kind in (WEIGHT, INPUT) for stage in stages]
    for kind, stage in [*backwards, *((FORWARD, stage) for stage in reversed(stages))]:  # what follows comes first
        for microbatch in range(problem.num_microbatches):
            number = problem.number(kind, stage, microbatch)
            for need, lag in problem.needs[number]:
                tails[need] = max(tails[need], lag + problem.seconds[number] + tails[number])
    return tails
