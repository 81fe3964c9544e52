"""Claims: how many times as good as the best peer, and what a figure must not exceed."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.harness.rows import Row, ranged


@dataclass(frozen=True)
class Comparison:
    """One line of a table: ours beside the peer that is the best there.

    **Fields:** `at`: the line. `peer`: its system. `ratio`: how many times as good as the peer ours is, the median over
    the runs; below 1 the peer wins. `low`, `high`: the smallest and the largest ratio of a run. `runs`: of both.
    """

    at: str
    peer: str
    ratio: float
    low: float
    high: float
    runs: int


@dataclass(frozen=True)
class Claim:
    """What is said of a benchmark, and whether it was seen.

    **Fields:** `name`. `value`: what is compared with `target`; of a comparison the smallest ratio of its lines; None
    where nothing could be measured, and `why` says why. `low`, `high`: over the runs. `holds`: None without a value.
    `case`, `metric`, `ours`, `comparisons`: of what compares with peers. `without`: peers that were not measured.
    """

    name: str
    value: float | None
    low: float | None
    high: float | None
    target: str
    holds: bool | None
    case: str = ""
    metric: str = ""
    ours: str = ""
    comparisons: tuple[Comparison, ...] = ()
    without: tuple[str, ...] = ()
    why: str = ""

    @property
    def lost(self) -> tuple[Comparison, ...]:
        """The lines in which a peer is better."""
        return tuple(one for one in self.comparisons if one.ratio < 1)

    @property
    def worst(self) -> Comparison:
        """The line in which ours is the least better; there must be one."""
        return min(self.comparisons, key=lambda one: one.ratio)

    def __str__(self) -> str:
        """`8.01 (7.2–9.4) times as good as Ray put, 2 nodes (16 MiB), without Dask`."""
        if self.value is None or self.low is None or self.high is None:
            return f"not measured: {self.why}"
        figure = ranged(self.value, self.low, self.high)
        if not self.comparisons:
            return figure
        line = f" at {self.worst.at}" if self.worst.at else ""
        return f"{figure} x {self.worst.peer}{line}{self.said_without}"

    @property
    def said_without(self) -> str:
        """Which peers are not in it."""
        return f", without {', '.join(self.without)}" if self.without else ""


def compare(ours: Row, peers: Sequence[Row]) -> Comparison:
    """Compares our figures with those of the best peer: the one that leaves the smallest ratio.

    Figures of the same round are compared with each other. A system that was not run in all rounds counts in those
    in which it was.

    **Arguments:** `ours`, `peers`: of the same line and metric, all measured.
    """
    if not peers or any((row.case, row.at, row.metric, row.unit) != _of(ours) or not row.values for row in peers):
        raise ValueError(f"{ours.case}, {ours.at}, {ours.metric}: peers must be measured in the same, not {peers}")
    return min((_compared(ours, peer) for peer in peers), key=lambda one: one.ratio)


def against_best(name: str, ours: Sequence[Row], peers: Sequence[Sequence[Row]], *, at_least: float) -> Claim:
    """Claims how many times as good as the best peer ours is, at the line where this is least so.

    **Arguments:** `ours`: one row a line, of one system. `peers`: those of each line, of which some may be missing.
    `at_least`: the ratio to be reached.
    """
    lines = [(mine, [row for row in theirs if row.values]) for mine, theirs in zip(ours, peers, strict=True)]
    found = tuple(compare(mine, theirs) for mine, theirs in lines if theirs)
    without = tuple(dict.fromkeys(row.system for theirs in peers for row in theirs if not row.values))
    claim = Claim(
        name,
        value=None,
        low=None,
        high=None,
        target=f">= {at_least:g}",
        holds=None,
        case=ours[0].case,
        metric=ours[0].metric,
        ours=ours[0].system,
        comparisons=found,
        without=without,
    )
    if not found:
        return replace(claim, why=f"no peer is there: {', '.join(without)}")
    worst = claim.worst
    return replace(claim, value=worst.ratio, low=worst.low, high=worst.high, holds=worst.ratio >= at_least)


def worst_of(name: str, parts: Sequence[Claim]) -> Claim:
    """Returns one claim of several with the same target: it holds where all do, and says in which case it holds least.

    **Arguments:** `parts`: at least one; those without a value say why there is none.
    """
    measured = [part for part in parts if part.value is not None]
    if not measured:
        return replace(parts[0], name=name)
    worst = min(measured, key=lambda part: part.worst.ratio)
    lines = tuple(
        replace(line, at=f"{part.case}, {line.at}, {part.ours}") for part in measured for line in part.comparisons
    )
    without = tuple(
        dict.fromkeys(
            peer for part in parts for peer in (part.without or [part.why] if part.value is None else part.without)
        )
    )
    return replace(worst, name=name, case="", ours="ours", comparisons=lines, without=without)


def limit(name: str, values: Sequence[float], *, at_least: float | None = None, at_most: float | None = None) -> Claim:
    """Claims that the median of some values is not below, or not above, a number."""
    value = statistics.median(values)
    holds = (at_least is None or value >= at_least) and (at_most is None or value <= at_most)
    target = f">= {at_least:g}" if at_least is not None else f"<= {at_most:g}"
    return Claim(name, value, min(values), max(values), target, holds)


def _of(row: Row) -> tuple[str, str, str, str]:
    return row.case, row.at, row.metric, row.unit


def _compared(ours: Row, peer: Row) -> Comparison:
    pairs = list(zip(ours.values, peer.values, strict=False))
    ratios = [_ratio(mine, theirs) if ours.more_is_better else _ratio(theirs, mine) for mine, theirs in pairs]
    return Comparison(ours.at, peer.system, statistics.median(ratios), min(ratios), max(ratios), len(ratios))


def _ratio(one: float, other: float) -> float:
    """What is measured as a difference may come out below nothing, by chance: it counts as nothing."""
    if other <= 0:
        return 1.0 if one <= 0 else math.inf
    return max(one, 0.0) / other
