"""Sets of instants: disjoint intervals of seconds in order, and what is in one set and not in another."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

Interval = tuple[float, float]
Intervals = Sequence[Interval]
"""Disjoint, of some length each, in order."""


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns the instants of any of some intervals, in any order."""
    found: list[Interval] = []
    for start, end in sorted(one for one in intervals if one[1] > one[0]):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def within(intervals: Intervals, start: float, end: float) -> list[Interval]:
    """Returns what lies between two instants."""
    first = bisect_right(intervals, start, key=lambda one: one[1])
    last = bisect_left(intervals, end, key=lambda one: one[0])
    return [(max(start, one[0]), min(end, one[1])) for one in intervals[first:last]]


def both(one: Intervals, other: Intervals) -> list[Interval]:
    """Returns the instants that are in both."""
    return [piece for start, end in one for piece in within(other, start, end)]


def without(one: Intervals, other: Intervals) -> list[Interval]:
    """Returns the instants that are in the first only."""
    found: list[Interval] = []
    for start, end in one:
        for gone_from, gone_to in within(other, start, end):
            if gone_from > start:
                found.append((start, gone_from))
            start = gone_to
        if end > start:
            found.append((start, end))
    return found


def length(intervals: Intervals) -> float:
    """Returns how long they are, in seconds."""
    return sum(end - start for start, end in intervals)
