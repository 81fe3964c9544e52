"""`Adaptive`: checkpoints as often as a budget allows."""

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, final

from braidax.checkpoint.interval.adaptive_cost import Costs, Estimate
from braidax.checkpoint.interval.adaptive_messages import Announcing
from braidax.checkpoint.interval.spacing import Bound, Spacing, Verdict
from braidax.errors import ArgumentError

_PROBE_STEPS = 8  # in peace before the first checkpoint, with which its steps are compared
_PROBE_UPDATES = 12  # until then, as some compile
_REST_UPDATES = 8  # in peace where there would be none
_LEAD_UPDATES = 16  # by which processes may differ: JAX dispatches no more ahead
_LEAD_SECONDS = 0.25  # for a message
_MAX_LEAD_UPDATES = 128


@dataclass(frozen=True)
class Adaptive:
    """Checkpoints as often as the budget allows, moving both ways with what they are measured to cost.

    The distance between two checkpoints, in updates, has three bounds, in the order in which they prevail:

    1. *persist*: none begins before the last one is durable;
    2. *lost work*: `max_lost_seconds` is a promise. Where it asks for more than the budget allows, the budget is
       exceeded, and `verdict.conflict` says by how much; where it asks for more than can be persisted, it is not
       kept, and `verdict.conflict` says so;
    3. *overhead*: what a checkpoint makes the run longer, spread over the updates until the next, is at most that
       share of their time. With `mtbf_seconds` they may be rarer still: at Young and Daly's distance,
       `sqrt(2 · cost · mtbf_seconds)`, the whole time with its failures is the shortest.

    The cost is the time of all steps with a checkpoint under way, less that of as many steps without, and in doubt its
    standard error on top. The first checkpoint is taken after a dozen updates, to measure it.

    Processes of one job agree: process 0 measures, and tells the others some updates ahead.

    **Arguments:** `overhead`: as a share of the time of a step. `max_lost_seconds`: the work that a failure may cost at
    worst: the time from one checkpoint until the next is durable. `mtbf_seconds`: the mean time between failures of
    the whole job.
    """

    overhead: float = 0.035
    max_lost_seconds: float | None = None
    mtbf_seconds: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.overhead < math.inf:
            raise ArgumentError(f"overhead={self.overhead!r}: expected a share > 0, such as 0.035")
        for name in ("max_lost_seconds", "mtbf_seconds"):
            seconds = getattr(self, name)
            if seconds is not None and not 0 < seconds < math.inf:
                raise ArgumentError(f"{name}={seconds!r}: expected a finite number of seconds > 0, or None")

    def start(
        self,
        num_updates: int,
        *,
        announcements: Announcing | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> Spacing:
        """Returns what spaces the checkpoints of one run, as of `Interval.start`."""
        if announcements is None or announcements.process == 0:
            return Adapting(self, num_updates, announcements=announcements, clock=clock)
        return Following(num_updates, announcements)


def choose(options: Adaptive, found: Estimate) -> Verdict:
    """Returns the distance between checkpoints that follows from what they cost."""
    step = found.step_seconds
    cost = max(0.0, found.cost_seconds)
    persist = found.persist_updates + (0 if found.has_calm else _REST_UPDATES)
    budget = math.ceil(max(0.0, found.cost_seconds + found.error_seconds) / (options.overhead * step))
    failures = math.ceil(math.sqrt(2 * cost * (options.mtbf_seconds or 0.0)) / step)
    num_updates, bound = _longest(persist=persist, overhead=budget, failures=failures)
    conflict = ""
    if options.max_lost_seconds is not None:
        limit = math.floor((options.max_lost_seconds - found.persist_seconds - cost) / step)
        if limit < num_updates:
            num_updates, bound = (limit, "lost work") if limit >= persist else (persist, "persist")
        if limit < persist:
            conflict = (
                f"max_lost_seconds={options.max_lost_seconds:g} cannot be kept, because a checkpoint takes "
                f"{found.persist_seconds:.3g} s until it is durable"
            )
        elif limit < budget:
            conflict = (
                f"max_lost_seconds={options.max_lost_seconds:g} asks for one every {limit} updates, and "
                f"overhead={options.overhead:g} for one every {budget}"
            )
    return Verdict(num_updates, bound, step, cost, found.persist_seconds, conflict)


def _longest(*, persist: int, overhead: int, failures: int) -> tuple[int, Bound]:
    if persist >= max(overhead, failures):
        return persist, "persist"
    return (overhead, "overhead") if overhead >= failures else (failures, "failures")


@final
class Adapting:
    """The running side of `Adaptive`, where it measures and decides.

    **Arguments:** as of `Interval.start`; `options`: what is asked for. **Fields:** as of `Spacing`.
    """

    def __init__(
        self,
        options: Adaptive,
        num_updates: int,
        *,
        announcements: Announcing | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.paused = False
        self._options = options
        self._announcements = announcements
        self._clock = clock
        self._begun = clock()
        self._costs = Costs(clock)
        self._verdict = Verdict(_PROBE_UPDATES, "probe")
        self._first = num_updates
        self._last = num_updates  # where a checkpoint was last planned
        # Up to which update it is known where they are due; others begin a run before they have heard anything.
        self._decided = num_updates + (0 if announcements is None else _LEAD_UPDATES)
        self._due: set[int] = set()

    @property
    def num_updates(self) -> int:
        """Updates between two checkpoints at present."""
        return self._verdict.num_updates

    @num_updates.setter
    def num_updates(self, number: int) -> None:
        self._verdict = self._verdict.set_to(number)

    @property
    def verdict(self) -> Verdict:
        """What was decided, and why."""
        return self._verdict

    def estimate(self) -> Estimate | None:
        """Returns what steps and checkpoints were measured to take; None before one was measured to its end."""
        return self._costs.estimate()

    def due(self, num_updates: int) -> bool:
        """As of `Spacing.due`."""
        if self._costs.step() and not self.paused:
            self._decide()
        lead = self._lead()
        if self._decided < num_updates + lead:
            due = self._plan(num_updates, num_updates + 2 * lead)
            if self._announcements is not None:
                told = _Announced(self._decided, due, lead, asdict(self._verdict))
                self._announcements.tell(json.dumps(asdict(told)).encode())
        is_due = num_updates in self._due
        self._due.discard(num_updates)
        return is_due

    def stalled(self, seconds: float) -> None:
        """As of `Spacing.stalled`."""
        self._costs.stalled(seconds)

    def began(self) -> None:
        """As of `Spacing.began`."""
        self._costs.began()

    def ended(self) -> None:
        """As of `Spacing.ended`."""
        self._costs.ended()

    def _lead(self) -> int:
        """Returns how many updates ahead others are told; nobody is told anything where there are no others."""
        if self._announcements is None:
            return 0
        step = self._costs.step_seconds
        if not step or self._verdict.bound == "probe":  # a loop dispatches its first steps in no time
            return _LEAD_UPDATES
        return min(_LEAD_UPDATES + math.ceil(_LEAD_SECONDS / step), _MAX_LEAD_UPDATES)

    def _decide(self) -> None:
        found = self._costs.estimate()
        if found is not None:
            self._verdict = choose(self._options, found)
        elif self._verdict.bound != "probe":  # what was known holds no more
            self._verdict = Verdict(_PROBE_UPDATES, "probe")

    def _plan(self, num_updates: int, until: int) -> list[int]:
        """Decides where checkpoints are due from where that is not decided yet, up to an update."""
        due: list[int] = []
        while (following := self._following(num_updates)) is not None and following <= until:
            self._last = following
            self._due.add(following)
            due.append(following)
        self._decided = until
        return due

    def _following(self, num_updates: int) -> int | None:
        """Returns where the next checkpoint is to begin, None if that cannot be said yet."""
        undecided = max(self._decided, self._last) + 1
        if self._verdict.bound == "probe" and not self.paused:
            return undecided if self._may_probe() else None
        if self._costs.is_under_way and (self._announcements is None or num_updates >= self._last + self.num_updates):
            return None
        return max(undecided, self._last + self.num_updates)

    def _may_probe(self) -> bool:
        if self._due or self._costs.is_under_way or self._costs.is_settling:
            return False
        if self._costs.num_calm >= _PROBE_STEPS and self._costs.step_seconds:
            return True
        limit = self._options.max_lost_seconds
        return limit is not None and self._last == self._first and self._clock() - self._begun > limit / 2


@dataclass(frozen=True)
class _Announced:
    """A message: up to `until` checkpoints are due at `due`; the next message comes before `until - lead`."""

    until: int
    due: list[int]
    lead: int
    verdict: dict[str, Any]


@final
class Following:
    """The running side of `Adaptive` on all processes but the one that decides.

    **Arguments:** as of `Interval.start`. **Fields:** as of `Spacing`; they are set on process 0.
    """

    def __init__(self, num_updates: int, announcements: Announcing) -> None:
        self._announcements = announcements
        self._heard = _Announced(
            num_updates + _LEAD_UPDATES, [], _LEAD_UPDATES, asdict(Verdict(_PROBE_UPDATES, "probe"))
        )
        self._due: set[int] = set()

    @property
    def num_updates(self) -> int:
        """Updates between two checkpoints at present."""
        return self.verdict.num_updates

    @num_updates.setter
    def num_updates(self, number: int) -> None:
        self._refuse(f"num_updates={number}")

    @property
    def paused(self) -> bool:
        """Whether this process leaves the number as it is, which it always does."""
        return True

    @paused.setter
    def paused(self, paused: bool) -> None:
        self._refuse(f"paused={paused}")

    @property
    def verdict(self) -> Verdict:
        """What was decided, as it was last heard."""
        return Verdict(**self._heard.verdict)

    def due(self, num_updates: int) -> bool:
        """As of `Spacing.due`. **Raises:** as `Announcing.wait`, where this process is ahead of process 0."""
        if num_updates > self._heard.until - self._heard.lead // 2:
            for message in self._announcements.hear():
                self._take(message)
        while num_updates > self._heard.until:
            self._take(self._announcements.wait())
        is_due = num_updates in self._due
        self._due.discard(num_updates)
        return is_due

    def stalled(self, seconds: float) -> None:
        """Changes nothing: process 0 measures."""

    def began(self) -> None:
        """Changes nothing."""

    def ended(self) -> None:
        """Changes nothing."""

    def _take(self, message: bytes) -> None:
        self._heard = _Announced(**json.loads(message))
        self._due.update(self._heard.due)  # this process may not have come to the ones before

    def _refuse(self, told: str) -> None:
        raise ArgumentError(
            f"{told}: process {self._announcements.process} follows process 0 in when a checkpoint is due; set it there"
        )
