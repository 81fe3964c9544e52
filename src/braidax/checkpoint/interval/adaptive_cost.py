"""What a checkpoint costs a loop: steps with one under way, compared with steps in peace."""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

_WARM_UP_STEPS = 3  # that compile
_SETTLING_STEPS = 3  # from the one in which it became durable: what was held up is made up for
_MAX_CYCLES = 32
_MAX_STEPS_AHEAD = 32  # that JAX lets a loop dispatch: a step that took as long as more of them was no step
_NUM_KNOWN = 4 * _MAX_STEPS_AHEAD
_CHANGED_STEPS = 64
_CHANGED = 1.5  # times as long, or as short, as steps were: then they and their checkpoints say nothing any more
_CALM_STEPS = 8  # that tell the time of one
_LATEST_CYCLES = 3
_DEVIATIONS = 3.0


@dataclass(frozen=True)
class Estimate:
    """What is known of a loop and its checkpoints.

    **Fields:** `step_seconds`: of a step in peace, lately. `cost_seconds`: by which one checkpoint makes the run
    longer, on average. `error_seconds`: the standard error of that. `persist_seconds`, `persist_updates`: from the
    beginning of a checkpoint until it was seen to be durable, the longer one of the latest two. `has_calm`: whether
    there were steps in peace between checkpoints, often enough to compare with.
    """

    step_seconds: float
    cost_seconds: float
    error_seconds: float
    persist_seconds: float
    persist_updates: int
    has_calm: bool


@dataclass
class Cycle:
    """From the beginning of one checkpoint to that of the next.

    **Fields:** `num_disturbed`, `disturbed_seconds`: steps with a checkpoint under way, and those that settle.
    `num_calm`, `calm_seconds`: steps after these. `persist_seconds`, `persist_updates`: as of `Estimate`, 0 until it is
    durable.
    """

    num_disturbed: int = 0
    disturbed_seconds: float = 0.0
    num_calm: int = 0
    calm_seconds: float = 0.0
    persist_seconds: float = 0.0
    persist_updates: int = 0


@final
class Costs:
    """Measures from the times at which a loop comes by; nothing waits for a device.

    A loop may be ahead of its devices, so no single step says anything: times are sums over all steps of a checkpoint,
    until what it held up has been made up for. Interruptions, such as an evaluation, count nowhere. When the time of a
    step or the cost has changed, what was measured before is forgotten.

    **Arguments:** `clock`: returns seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._num_skipped = 0
        self._last: float | None = None
        self._began = 0.0
        self._stall_seconds = 0.0
        self._under_way = False
        self._settling = 0
        self._is_news = False
        self._all: deque[float] = deque(maxlen=_NUM_KNOWN)  # interruptions too
        self._recent: deque[float] = deque(maxlen=_CHANGED_STEPS)
        self._cycles: deque[Cycle] = deque([Cycle()], maxlen=_MAX_CYCLES)

    @property
    def num_calm(self) -> int:
        """Steps in peace that are remembered."""
        return sum(cycle.num_calm for cycle in self._cycles)

    @property
    def is_under_way(self) -> bool:
        """Whether a checkpoint is not durable yet."""
        return self._under_way

    @property
    def step_seconds(self) -> float | None:
        """Seconds of a step in peace, lately; None before the first."""
        return sum(self._recent) / len(self._recent) if self._recent else None

    @property
    def is_settling(self) -> bool:
        """Whether it is, and what it held up is being made up for."""
        return self._settling > 0

    def step(self) -> bool:
        """Takes note that a step has been dispatched; once after every step.

        **Returns:** whether there is news for `estimate`.
        """
        now = self._clock()
        last, self._last = self._last, now
        stall_seconds, self._stall_seconds = self._stall_seconds, 0.0
        if last is None or self._num_skipped < _WARM_UP_STEPS:
            self._num_skipped += last is not None
            return False
        seconds = now - last
        if self._is_interruption(seconds - stall_seconds):
            seconds = self.step_seconds or 0.0
        cycle = self._cycles[-1]
        is_news, self._is_news = self._is_news, False
        if self._under_way or self._settling:
            cycle.num_disturbed += 1
            cycle.disturbed_seconds += seconds
            if not self._under_way:
                self._settling -= 1
                is_news = not self._settling
        else:
            cycle.num_calm += 1
            cycle.calm_seconds += seconds
            self._recent.append(seconds)
            is_news = cycle.num_calm % _CALM_STEPS == 0
        if is_news:
            self._forget()
        return is_news

    def stalled(self, seconds: float) -> None:
        """Takes note that the checkpointer has held up the loop, since the last step."""
        self._stall_seconds += seconds

    def began(self) -> None:
        """Takes note that a checkpoint begins; after `step`."""
        if self._settling:  # the last one is measured as far as it went
            self._settling = 0
            self._is_news = True
        self._under_way = True
        self._began = self._clock()
        self._cycles.append(Cycle())

    def ended(self) -> None:
        """Takes note that the checkpoint is durable, or has failed; before `step`."""
        if not self._under_way:
            return
        self._under_way = False
        self._settling = _SETTLING_STEPS
        cycle = self._cycles[-1]
        cycle.persist_seconds = self._clock() - self._began
        cycle.persist_updates = cycle.num_disturbed + 1

    def estimate(self) -> Estimate | None:
        """Returns what is known, None before a checkpoint has been measured to its end."""
        cycles = self._measured()
        costs = _costs(cycles)
        step_seconds = self.step_seconds
        if not costs or not step_seconds:
            return None
        latest = [cycle for cycle in cycles if cycle.num_disturbed][-2:]
        return Estimate(
            step_seconds,
            costs[0],
            _error(cycles),
            max(cycle.persist_seconds for cycle in latest),
            max(cycle.persist_updates for cycle in latest),
            sum(cycle.num_calm > 0 for cycle in cycles) >= 2,
        )

    def _measured(self) -> list[Cycle]:
        cycles = list(self._cycles)
        return cycles[:-1] if self._under_way or self._settling else cycles

    def _is_interruption(self, seconds: float) -> bool:
        """Returns whether something else went on, which does not happen every few steps."""
        self._all.append(seconds)
        return len(self._all) == _NUM_KNOWN and seconds > _MAX_STEPS_AHEAD * sum(self._all) / _NUM_KNOWN

    def _forget(self) -> None:
        """Forgets what was before a change."""
        cycles = self._measured()
        num_steps, num_seconds = 0, 0.0
        while cycles and num_steps < _CHANGED_STEPS:
            latest = cycles.pop()
            num_steps += latest.num_calm
            num_seconds += latest.calm_seconds
        before = _calm(cycles)
        if before and num_steps and not 1 / _CHANGED < num_seconds / num_steps / before < _CHANGED:
            self._keep(1 if self._under_way or self._settling else 0)
            self._cycles.appendleft(Cycle(num_calm=num_steps, calm_seconds=num_seconds))
            return
        cycles = self._measured()
        disturbed = [cycle for cycle in cycles if cycle.num_disturbed]
        calm = _calm(cycles)
        if calm is None or len(disturbed) < 2 * _LATEST_CYCLES:
            return
        costs = [cycle.disturbed_seconds - cycle.num_disturbed * calm for cycle in disturbed]
        old, new = costs[:-_LATEST_CYCLES], costs[-_LATEST_CYCLES:]
        mean = sum(old) / len(old)
        error = math.sqrt(sum((cost - mean) ** 2 for cost in old) / (len(old) - 1) / len(new))
        change = sum(new) / len(new) - mean
        # All of the latest, so that a single one that was out of the ordinary is not all that is believed.
        if abs(change) > max(_DEVIATIONS * error, abs(mean) / 4) and all((cost - mean) / change > 0.5 for cost in new):
            self._keep(_LATEST_CYCLES)

    def _keep(self, num_cycles: int) -> None:
        while len(self._cycles) > num_cycles:
            self._cycles.popleft()


def _calm(cycles: Sequence[Cycle]) -> float | None:
    num_steps = sum(cycle.num_calm for cycle in cycles)
    return sum(cycle.calm_seconds for cycle in cycles) / num_steps if num_steps else None


def _costs(cycles: Sequence[Cycle], without: Sequence[Cycle] = ()) -> list[float]:
    """Returns the seconds that a checkpoint adds, once for each of the cycles that is left out, or from all.

    Steps with a checkpoint and without are of the same time, so that drifts cancel. Where there are none of one kind
    it cannot be said.
    """
    num_calm = sum(cycle.num_calm for cycle in cycles)
    calm_seconds = sum(cycle.calm_seconds for cycle in cycles)
    num_disturbed = sum(cycle.num_disturbed for cycle in cycles)
    disturbed_seconds = sum(cycle.disturbed_seconds for cycle in cycles)
    num_checkpoints = sum(cycle.num_disturbed > 0 for cycle in cycles)
    costs: list[float] = []
    for cycle in without or (Cycle(),):
        num_left, num_steps = num_checkpoints - (cycle.num_disturbed > 0), num_calm - cycle.num_calm
        if num_left and num_steps:
            calm = (calm_seconds - cycle.calm_seconds) / num_steps
            seconds = disturbed_seconds - cycle.disturbed_seconds
            costs.append((seconds - (num_disturbed - cycle.num_disturbed) * calm) / num_left)
    return costs


def _error(cycles: Sequence[Cycle]) -> float:
    """Returns the standard error of the cost by leaving out one cycle after the other; 0 where that cannot be done."""
    costs = _costs(cycles, without=cycles)
    if len(costs) < 2:
        return 0.0
    mean = sum(costs) / len(costs)
    return math.sqrt(sum((cost - mean) ** 2 for cost in costs) * (len(costs) - 1) / len(costs))
