"""The shortest schedule there is, by looking at all that could be shorter: an oracle for small pipelines.

Microbatches cost alike, so each stage takes them in their order. A schedule is a sequence of operations by the time at
which they begin. Of two beginnings that have done the same, one that is nowhere later is as good; and one that cannot
end before the best schedule known is left. Nothing here is shared with the search but the numbers of the problem.
"""

from dataclasses import dataclass

from braidax.parallel.stages.schedules.search.problem import FORWARD, INPUT, WEIGHT, Problem


@dataclass(frozen=True)
class Beginning:
    """What is done so far. **Fields:** `free`: when each device is. `sent`: when that ends which others need."""

    free: tuple[float, ...]
    last: float  # when the last operation began
    sent: dict[int, float]
    live: tuple[float, ...]

    def is_nowhere_later(self, other: "Beginning") -> bool:
        return (
            all(mine <= its + 1e-12 for mine, its in zip(self.free, other.free, strict=True))
            and self.last <= other.last + 1e-12
            and all(self.sent[number] <= end + 1e-12 for number, end in other.sent.items())
        )


def optimum(problem: Problem, known: float, *, max_looked_at: int = 100_000) -> float | None:
    """Returns the shortest makespan, or `known` if none is shorter; `None` when there was too much to look at."""
    nothing = Beginning((0.0,) * problem.num_devices, 0.0, {}, (0.0,) * problem.num_devices)
    layer = {(0,) * (3 * problem.num_stages): [nothing]}  # by how many of each kind and stage are done
    tails, looked_at = _tails(problem), 0
    for _ in problem.devices:
        following: dict[tuple[int, ...], list[Beginning]] = {}
        for counts, beginnings in layer.items():
            for row in range(len(counts)):
                for beginning in beginnings if _is_possible(problem, counts, row) else ():
                    after = _after(problem, beginning, row, counts[row])
                    more = (*counts[:row], counts[row] + 1, *counts[row + 1 :])
                    if after is None or _least(problem, more, after, tails) >= known - 1e-9:
                        continue
                    others = following.setdefault(more, [])
                    if not any(other.is_nowhere_later(after) for other in others):
                        others[:] = [other for other in others if not after.is_nowhere_later(other)]
                        others.append(after)
                        looked_at += 1
                        if looked_at > max_looked_at:
                            return None
        layer = following
    return min([known, *(max(each.free) for beginnings in layer.values() for each in beginnings)])


def _is_possible(problem: Problem, counts: tuple[int, ...], row: int) -> bool:
    (kind, stage), each = divmod(row, problem.num_stages), counts[row]
    if each == problem.num_microbatches:
        return False
    if kind == FORWARD:
        return stage == 0 or counts[row - 1] > each
    if kind == WEIGHT:
        return counts[row - problem.num_stages] > each
    is_last = stage == problem.num_stages - 1
    return counts[row - problem.num_stages] > each and (is_last or counts[row + 1] > each)


def _after(problem: Problem, beginning: Beginning, row: int, each: int) -> Beginning | None:
    kind, stage = divmod(row, problem.num_stages)
    number, device = problem.number(kind, stage, each), problem.device_of_stage[stage]
    live = beginning.live[device] + problem.changes[number]
    start, sent = beginning.free[device], dict(beginning.sent)
    for need, lag in problem.needs[number]:
        if need in sent and problem.parts(need)[1] != stage:  # what the same stage has made is there
            start = max(start, sent.pop(need) + lag)
    if start < beginning.last or live > problem.limit:
        return None
    end = start + problem.seconds[number]
    if (kind == FORWARD and stage < problem.num_stages - 1) or (kind == INPUT and stage > 0):
        sent[number] = end
    free = (*beginning.free[:device], end, *beginning.free[device + 1 :])
    return Beginning(free, start, sent, (*beginning.live[:device], live, *beginning.live[device + 1 :]))


def _least(problem: Problem, counts: tuple[int, ...], beginning: Beginning, tails: list[float]) -> float:
    """Returns when a schedule that begins so ends at the earliest."""
    ends = list(beginning.free)
    least = max((end + tails[number] for number, end in beginning.sent.items()), default=0.0)
    for row, done in enumerate(counts):
        stage = row % problem.num_stages
        if done < problem.num_microbatches:
            number = problem.number(row // problem.num_stages, stage, done)
            device = problem.device_of_stage[stage]
            ends[device] += (problem.num_microbatches - done) * problem.seconds[number]
            least = max(least, beginning.free[device] + problem.seconds[number] + tails[number])
    return max(least, *ends)


def _tails(problem: Problem) -> list[float]:
    """Returns how long what must follow an operation takes at least."""
    tails = [0.0] * len(problem.devices)

    def depth(number: int) -> int:
        kind, stage, _ = problem.parts(number)
        return {FORWARD: stage, INPUT: 2 * problem.num_stages - stage, WEIGHT: 3 * problem.num_stages}[kind]

    for number in sorted(range(len(tails)), key=depth, reverse=True):
        for need, lag in problem.needs[number]:
            tails[need] = max(tails[need], lag + problem.seconds[number] + tails[number])
    return tails
