"""What two overlaps will do to each other, before both are on: predicted from runs of nothing and of each alone."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from braidax.tune.attribution import LANES, Lane

from .factors import FACTORS, Factor
from .runs import Use
from .statistics import Sign

_OF_THE_LOOP: tuple[Lane, ...] = ("data wait", "dispatch", "other")
_LEAST_SECONDS = 1e-6  # of a step; less is not measured


@dataclass(frozen=True)
class Spent:
    """Where a step of a setting goes. **Fields:** `lanes`: seconds by lane. `use`: what else it takes, where known."""

    lanes: Mapping[str, float]
    use: Use | None = None


@dataclass(frozen=True)
class Predicted:
    """An interaction, predicted. **Fields:** `seconds`: a step. `lanes`: what each lane adds to it, by `Lane`."""

    seconds: float
    lanes: Mapping[Lane, float]

    @property
    def sign(self) -> Sign:
        """Whether it is below or above zero, by a microsecond at least; "undecided" where nothing speaks for either."""
        if abs(self.seconds) < _LEAST_SECONDS:
            return "undecided"
        return "less" if self.seconds < 0 else "more"


def predict_interactions(nothing: Spent, alone: Mapping[Factor, Spent]) -> dict[tuple[Factor, Factor], Predicted]:
    """Predicts `T(ab) - T(a) - T(b) + T(nothing)` of each two factors from steps that have one of them at most.

    What two factors change adds up, lane by lane, but for six reasons. No constant is in them.

    - *A wait is taken away once*: no lane is below 0, whatever each factor alone takes off it.
    - *The loop is exposed once.* Its own time (data wait, dispatch, other) is hidden while it is ahead of the devices.
      A checkpoint waits for a step's end, and stages keep the loop with them: both take that lead away, and who loses
      it twice loses it once. Where two factors lengthen such a lane, the longer one holds.
    - *Prefetch takes away the wait that is there*: beside a factor what that one leaves of it, not what `nothing` has.
    - *Who works in the background has as long as the rest of a step takes.* A wait for reading ahead, or for a
      checkpoint that is copied or written, is shorter by what the other factor adds to the rest, and longer by what
      it takes off; by no more than its own length, as more is not known of it. But one checkpoint is under way at a
      time: a step takes at least what copying and writing take of it.
    - *Stages sum behind the last microbatch*, whatever `sync` says: it changes nothing there.
    - *Cores do no more than there is.* What two factors make the cores do adds up as well. A step takes at least that
      work by the number of cores, however well all is hidden.

    **Arguments:** `nothing`: with all factors off. `alone`: with one of them on.

    **Returns:** the interaction of each pair of factors in `alone`, in the order of `FACTORS`.
    """
    factors: list[Factor] = [factor for factor in FACTORS if factor in alone]
    return {pair: _predicted(pair, nothing, alone) for pair in itertools.combinations(factors, 2)}


def _predicted(pair: tuple[Factor, Factor], nothing: Spent, alone: Mapping[Factor, Spent]) -> Predicted:
    one, other, neither = (spent.lanes for spent in (alone[pair[0]], alone[pair[1]], nothing))
    added: dict[Lane, float] = {lane: one[lane] + other[lane] - neither[lane] for lane in LANES}
    found: dict[Lane, float] = {lane: max(0.0, seconds) for lane, seconds in added.items()}
    for lane in _OF_THE_LOOP:
        if min(one[lane], other[lane]) > neither[lane]:
            found[lane] = max(one[lane], other[lane])
    if set(pair) == {"sync", "pipeline"}:
        found["compute"] = alone["pipeline"].lanes["compute"]
    for factor, beside in (pair, pair[::-1]):
        spent = alone[factor]
        if factor == "prefetch":
            wait = spent.lanes["data wait"]
            left = wait - _shift(wait, _without(found, "data wait") - _without(spent.lanes, "data wait"))
            found["data wait"] = min(left, alone[beside].lanes["data wait"])
        if factor == "checkpoint" and spent.use is not None:
            longer = _without(found, "snapshot stall") - _without(spent.lanes, "snapshot stall")
            found["snapshot stall"] -= _shift(spent.use.waited_seconds, longer)
            found["snapshot stall"] += max(0.0, spent.use.saving_seconds - math.fsum(found.values()))
    found["compute"] += max(0.0, _least_seconds(pair, nothing, alone) - math.fsum(found.values()))
    lanes: dict[Lane, float] = {lane: found[lane] - added[lane] for lane in LANES}
    return Predicted(math.fsum(lanes.values()), lanes)


def _shift(wait: float, longer: float) -> float:
    """Returns by how much a wait for the background is shorter when the rest of a step is longer."""
    return min(wait, max(-wait, longer))


def _without(lanes: Mapping[Lane, float] | Mapping[str, float], lane: str) -> float:
    return math.fsum(seconds for name, seconds in lanes.items() if name != lane)


def _least_seconds(pair: tuple[Factor, Factor], nothing: Spent, alone: Mapping[Factor, Spent]) -> float:
    """Returns how long the cores take for the work of two factors, if nothing has to wait; 0 where it is not known."""
    one, other, neither = alone[pair[0]].use, alone[pair[1]].use, nothing.use
    if one is None or other is None or neither is None:
        return 0.0
    return (one.core_seconds + other.core_seconds - neither.core_seconds) / neither.num_cores
