"""Schedules made by going through time: a free device takes what a policy puts first of what is ready and fits."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from braidax.parallel.stages.schedules.search.problem import FORWARD, INPUT, WEIGHT, Orders, Problem


@dataclass(frozen=True)
class Policy:
    """What a free device takes.

    **Arguments:** `num_ahead`: how many more microbatches than stages behind it a stage takes before their gradients
    come back. `forward_first`: whether forwards go before backwards. `deep_first`: whether of two stages of a device
    the later one goes first, rather than the older microbatch. `patience`: for how much of a gradient of weights a
    device stands still rather than begin that when something else is about to come.
    """

    num_ahead: int
    forward_first: bool
    deep_first: bool
    patience: float


def policies(problem: Problem) -> Iterator[Policy]:
    """Yields the policies that are tried."""
    depth, count = problem.num_stages, problem.num_microbatches
    aheads = sorted({each for each in (1, 2, 3, depth // 2, depth, count) if each <= count} | {min(depth, count)})
    folds = (True, False) if problem.num_stages > problem.num_devices else (True,)
    for num_ahead, forward_first, deep_first, patience in product(aheads, (False, True), folds, (0.0, 0.5, 1.0)):
        yield Policy(num_ahead, forward_first, deep_first, patience)


def dispatched(problem: Problem, policy: Policy) -> Orders:
    """Returns the orders that a policy leads to. There is always room to bring a microbatch to its end."""
    return _Dispatch(problem, policy).run()


class _Dispatch:
    def __init__(self, problem: Problem, policy: Policy) -> None:
        self._problem, self._policy = problem, policy
        stages = range(problem.num_stages)
        self._own = [[s for s in stages if problem.device_of_stage[s] == d] for d in range(problem.num_devices)]
        self._done = [[0] * problem.num_stages for _ in range(3)]  # by kind and stage
        self._ends: dict[int, float] = {}
        self._free = [0.0] * problem.num_devices
        self._live = [0] * problem.num_devices
        self._orders: Orders = [[] for _ in self._own]

    def run(self) -> Orders:
        """Lets the device that can begin first take something, again and again."""
        left = len(self._problem.devices)
        while left:
            start, device = min((self._begins(device), device) for device in range(self._problem.num_devices))
            number = self._chosen(device, start)
            if number is None:  # it stands still, and looks again when something comes
                continue
            start = max(start, self._ready(number) or 0.0)
            end = start + self._problem.seconds[number]
            kind, stage, _ = self._problem.parts(number)
            self._done[kind][stage] += 1
            self._ends[number], self._free[device] = end, end
            self._live[device] += self._problem.changes[number]
            self._orders[device].append(number)
            left -= 1
        return self._orders

    def _candidates(self, device: int) -> Iterator[tuple[int, float]]:
        """Yields what a device can do next, and from when on."""
        problem = self._problem
        for stage in self._own[device]:
            for kind in (FORWARD, INPUT, WEIGHT):
                each = self._done[kind][stage]
                if each < problem.num_microbatches and (kind != FORWARD or self._fits(stage, device)):
                    number = problem.number(kind, stage, each)
                    ready = self._ready(number)
                    if ready is not None and (kind == FORWARD or problem.goes_back(number, self._live[device])):
                        yield number, ready

    def _ready(self, number: int) -> float | None:
        ready = 0.0
        for need, lag in self._problem.needs[number]:
            end = self._ends.get(need)
            if end is None:
                return None
            ready = max(ready, end + lag)
        return ready

    def _fits(self, stage: int, device: int) -> bool:
        done, problem = self._done, self._problem
        ahead = done[FORWARD][stage] - done[INPUT][stage]
        if ahead >= problem.num_stages - stage - 1 + self._policy.num_ahead:
            return False
        under_way = [forwards - back for forwards, back in zip(done[FORWARD], done[INPUT], strict=True)]
        return problem.has_room(stage, self._live[device], under_way)

    def _begins(self, device: int) -> float:
        first = min((ready for _, ready in self._candidates(device)), default=float("inf"))
        return max(first, self._free[device])

    def _chosen(self, device: int, start: float) -> int | None:
        problem, policy = self._problem, self._policy
        candidates = list(self._candidates(device))
        keys: list[tuple[int, float, float, int]] = []
        coming = float("inf")
        for number, ready in candidates:
            kind, stage, each = problem.parts(number)
            if kind == WEIGHT:
                keys.append((2, each, -stage, number))
            elif ready > start:
                coming = min(coming, ready)
            else:
                rank = int((kind == INPUT) == policy.forward_first)
                keys.append((rank, -stage, each, number) if policy.deep_first else (rank, each, -stage, number))
        keys = [key for key in keys if key[0] < 2 or (self._ready(key[3]) or 0.0) <= start]
        best = min(keys)
        if best[0] == 2 and coming < start + policy.patience * problem.seconds[best[3]]:
            self._free[device] = coming
            return None
        return best[3]
