"""Automatic cuts beside the best of all cuts at the same borders, beside equal layers, and beside equal parameters.

Every stage of every cut that can be the best one is compiled and timed. A cut whose slowest stage takes, by the sums of
its segments, much longer than the automatic cut's is left out, and so is one of which any stage takes as long as the
automatic cut's slowest one: it is not the best one.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import jax

from benchmarks.harness import Report, say, take_turns
from benchmarks.pipedream.timed_stage import TimedStage
from braidax.parallel.stages.balance import Priced, Pricing, balance
from braidax.parallel.stages.cut import cut, remembered
from braidax.parallel.stages.segments import Seconds, Segment, measured, segments_of
from braidax.program import Chain, Program, Stage

OURS, BEST, LAYERS, PARAMS = "ours, automatic", "the best of all cuts", "equal layers", "equal parameters"
SLOWEST, UNEVEN = "slowest stage", "slowest stage / the mean of stages"
_FINALISTS = 3  # cuts that are the best by a first look, and timed again beside ours
_PRICING = Pricing(num_microbatches=8, recompute=False)
Bounds = tuple[int, ...]  # of a cut: the segment with which each stage begins, and the number of segments


class Cuts:
    """All cuts of a loss, whose stages are compiled once each.

    **Arguments:** `program`: the loss. `looks`: how often a stage is timed to find the best cut.
    """

    def __init__(self, program: Program, looks: int) -> None:
        self._program, self._looks = program, looks
        self._chain = Chain(program)
        self._borders = self._chain.borders()
        self._clock = remembered(measured())
        self._segments = segments_of(self._chain.stages(self._borders), self._clock)
        self._timed: dict[str, TimedStage] = {}
        self._seen: dict[str, float] = {}
        self._stages: dict[Bounds, tuple[Stage, ...]] = {}

    @property
    def num_segments(self) -> int:
        """How many there are."""
        return len(self._segments)

    def automatic(self, num_stages: int) -> Bounds:
        """Returns the cut that ours makes."""
        found = cut(self._program, num_stages, pricing=_PRICING, clock=self._clock, mixes_samples=True)
        return 0, *(self._borders.index(one) + 1 for one in found.borders), self.num_segments

    def by(self, weigh: Callable[[Segment], float], num_stages: int) -> Bounds:
        """Returns the cut whose heaviest stage weighs least."""
        weighed = [replace(one, seconds=Seconds(weigh(one), 0.0, 0.0)) for one in self._segments]
        return 0, *(one.end for one in balance(Priced(weighed, _PRICING), num_stages))

    def candidates(self, num_stages: int, limit: float) -> list[Bounds]:
        """Returns the cuts of which no stage takes longer than a limit, by the sums of its segments."""
        sums = [one.seconds.total for one in self._segments]

        def ways(begin: int, left: int) -> Iterator[Bounds]:
            if left == 1:
                if sum(sums[begin:]) <= limit:
                    yield (self.num_segments,)
                return
            for end in range(begin + 1, self.num_segments - left + 2):
                if sum(sums[begin:end]) > limit:
                    return
                for others in ways(end, left - 1):
                    yield end, *others

        return [(0, *one) for one in ways(0, num_stages)]

    def expected(self, bounds: Bounds) -> float:
        """Returns what the slowest stage takes by the sums of its segments."""
        pairs = pairwise(bounds)
        return max(sum(one.seconds.total for one in self._segments[begin:end]) for begin, end in pairs)

    def first_look(self, bounds: Bounds, limit: float = math.inf) -> float:
        """Returns how long the slowest stage of a cut takes; each stage is timed once for all cuts that have it.

        **Arguments:** `limit`: once a stage takes as long, the others are not looked at; those that look slowest, by
        the sums of their segments, are the first.
        """
        slowest, sums = 0.0, [one.seconds.total for one in self._segments]
        pairs = zip(pairwise(bounds), self.stages(bounds), strict=True)
        for _, stage in sorted(pairs, key=lambda pair: -sum(sums[slice(*pair[0])])):
            key = stage.told()
            if key not in self._seen:
                timed = self._compiled(stage)
                self._seen[key] = min(timed.seconds() for _ in range(self._looks))
            slowest = max(slowest, self._seen[key])
            if slowest >= limit:
                break
        return slowest

    def each_seconds(self, bounds: Bounds) -> list[float]:
        """Times every stage of a cut once more."""
        return [self._compiled(stage).seconds() for stage in self.stages(bounds)]

    def stages(self, bounds: Bounds) -> tuple[Stage, ...]:
        """Returns the stages of a cut."""
        if bounds not in self._stages:
            self._stages[bounds] = self._chain.stages([self._borders[at - 1] for at in bounds[1:-1]])
        return self._stages[bounds]

    def _compiled(self, stage: Stage) -> TimedStage:
        key = stage.told()
        if key not in self._timed:
            self._timed[key] = TimedStage(stage)
        return self._timed[key]


def balanced(
    report: Report, name: str, program: Program, counts: Sequence[int], *, margin: float, looks: int, rounds: int
) -> list[float]:
    """Cuts a loss into some numbers of stages in all ways, and reports how slow the slowest stages are.

    **Arguments:** `margin`: how much longer than ours, by sums of segments, a cut may take that is looked at.

    **Returns:** of each number of stages, how much slower the slowest stage of ours is than that of the best cut.
    """
    cuts, ratios = Cuts(program, looks), list[float]()
    for count in counts:
        ours = cuts.automatic(count)
        others = sorted(cuts.candidates(count, margin * cuts.expected(ours)), key=cuts.expected)
        limit = cuts.first_look(ours)
        looked = {one: cuts.first_look(one, limit) for one in others}
        finalists = sorted((one for one in others if looked[one] < limit), key=lambda one: looked[one])[:_FINALISTS]
        chosen = {
            OURS: ours,
            **{f"{BEST} ({place})": one for place, one in enumerate(finalists, 1) if one != ours},
            LAYERS: cuts.by(lambda _: 1.0, count),
            PARAMS: cuts.by(lambda one: float(sum(one.leaves.values())), count),
        }
        figures = _in_turns(cuts, chosen, rounds)
        slowest = {system: [max(each) for each in zip(*own, strict=True)] for system, own in figures.items()}
        stages = _by_best_rounds(cuts, chosen, figures)
        best = min((system for system in chosen if system not in (LAYERS, PARAMS)), key=lambda one: max(stages[one]))
        ratios.append(max(stages[OURS]) / max(stages[best]))
        at = f"{name}, {count} stages of {cuts.num_segments} segments"
        for shown, system in ((OURS, OURS), (BEST, best), (LAYERS, LAYERS), (PARAMS, PARAMS)):
            report.add("balance", shown, SLOWEST, "ms", [1e3 * one for one in slowest[system]], at=at)
            least = stages[system]
            report.add("balance", shown, UNEVEN, "", [max(least) * len(least) / sum(least)], at=at)
        say(
            f"  {at}: {ratios[-1]:.3f} of the best of {len(others)} that were looked at; "
            f"ours begins stages at {ours[1:-1]}, the best at {chosen[best][1:-1]}"
        )
    jax.clear_caches()
    return ratios


def _in_turns(cuts: Cuts, chosen: dict[str, Bounds], rounds: int) -> dict[str, list[list[float]]]:
    """Returns of each cut, of each stage, its seconds in each round."""
    found: dict[str, list[list[float]]] = {system: [[] for _ in one[1:]] for system, one in chosen.items()}

    def turn(system: str) -> Callable[[], float]:
        def run() -> float:
            seconds = cuts.each_seconds(chosen[system])
            for own, one in zip(found[system], seconds, strict=True):
                own.append(one)
            return max(seconds)

        return run

    take_turns({system: turn(system) for system in chosen}, rounds=rounds)
    return found


def _by_best_rounds(
    cuts: Cuts, chosen: dict[str, Bounds], figures: dict[str, list[list[float]]]
) -> dict[str, list[float]]:
    """Returns what each stage of each cut takes in its best round: what else the machine does only adds.

    Stages that compute the same, such as as many iterations of a loop, are one program, and share their rounds.
    """
    keys = {system: [stage.told() for stage in cuts.stages(one)] for system, one in chosen.items()}
    least: dict[str, float] = {}
    for system, own in figures.items():
        for key, seconds in zip(keys[system], own, strict=True):
            least[key] = min(least.get(key, math.inf), *seconds)
    return {system: [least[key] for key in own] for system, own in keys.items()}
