"""Mixtures: samples of several sources in fixed proportions, each index computed on its own.

Which source a sample comes from is a schedule of one period that is repeated for ever. It is the quota schedule of
Tijdeman, "The chairman assignment problem" (Discrete Mathematics 32, 1980): in no prefix is a source further than
`1 - 1 / (2K - 2)` samples from its share, for K sources.
"""

import copy
import functools
import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from numpy.typing import NDArray

from braidax.data.sampling.permutation import Permutation
from braidax.data.source import (
    Indices,
    Source,
    allocate,
    check_indices,
    prepare,
    source_at,
    stamp_of,
    told_leaves,
    widened,
)
from braidax.errors import ArgumentError

_EXACT_PERIOD = 1 << 20  # the longest period of a schedule
_USUAL_PERIOD = 1 << 16  # of one that only comes near the weights
_FEWEST = 16  # of its samples in a period, which bounds how far a rounded weight is off


def mix(
    sources: Mapping[Source, float] | Sequence[tuple[Source, float]], *, seed: int = 0, length: int | None = None
) -> Source:
    """Returns a source that draws its samples from several others, in fixed proportions.

    Sample by sample the proportions are kept within one sample; in the order of the mixture (`seed=None` of a loader)
    that holds for every batch, shuffled by a loader up to chance. Each source is gone through in a random order, which
    is another in each pass; an epoch of the mixture goes on where the last one ended. So over time all samples of a
    source are seen equally often, and none of a large source is out of reach.

    **Arguments:** `sources`: source → weight, or pairs of them. Weights are
    positive and count in proportion to their sum, in samples. `seed`: of the orders inside the sources; a loader has
    its own, which shuffles the mixture. `length`: samples in an epoch; by default as many as all sources have together.

    **Raises:** `ArgumentError` for weights that cannot be, and for sources whose samples differ in structure, shape or
    dtype.
    """
    pairs: list[tuple[Source, float]] = list(sources.items() if isinstance(sources, Mapping) else sources)
    if not pairs:
        raise ArgumentError("sources= is empty; give at least one source and its weight")
    names = [f"source {number}" for number in range(len(pairs))]
    opened = [given for given, _ in pairs]
    for name, given in zip(names, cast("list[Any]", opened), strict=True):
        if not isinstance(given, Source):
            raise ArgumentError(f"sources=: {name} is {given!r:.80}; expected a source: give braidax.open(...) of it")
    shares = _shares([weight for _, weight in pairs], names)
    for name, source in zip(names, opened, strict=True):
        if not len(source):
            raise ArgumentError(f"sources=: {name} has no samples; leave it out")
    check_alike(opened, names)
    total = sum(len(source) for source in opened)
    if length is not None and not 1 <= length < 1 << 62:
        raise ArgumentError(
            f"length={length}: expected at least 1 sample in an epoch; None takes {total}, all there are"
        )
    return _Mixture(opened, names, _Schedule.of(shares), total if length is None else length, seed)


class _Schedule(NamedTuple):
    """Which source the samples of one period come from.

    **Fields:** `shares`: int64 `[K]`, samples of each source in a period. `chosen`: int32 `[period]`, the source.
    `rank`: int64 `[period]`, how many samples of that source came before in the period.
    """

    shares: NDArray[np.int64]
    chosen: NDArray[np.int32]
    rank: NDArray[np.int64]

    @classmethod
    def of(cls, shares: Sequence[int]) -> "_Schedule":
        chosen = _assignment(shares)
        rank = np.empty(len(chosen), np.int64)
        for number, share in enumerate(shares):
            rank[chosen == number] = np.arange(share)
        return cls(np.array(shares, np.int64), chosen, rank)

    def draws(self, positions: Indices) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Returns for each sample of the endless schedule its source, and how many of that source came before."""
        periods, places = np.divmod(positions, len(self.chosen))
        source = self.chosen[places]
        return source, periods * self.shares[source] + self.rank[places]


class _Draw(NamedTuple):
    """What one read takes from one source: the source, its indices, and the rows of the window that they fill."""

    source: Source
    indices: NDArray[np.int64]
    rows: NDArray[np.int64]


class _Mixture(Source):
    def __init__(
        self, sources: Sequence[Source], names: Sequence[str], schedule: _Schedule, length: int, seed: int
    ) -> None:
        self.sources = list(sources)
        self._names = list(names)
        self._schedule = schedule
        self._length = length
        self._seed = seed
        self._place: tuple[int | None, int] = (seed, 0)  # seed and epoch that `at` was given

    @property
    def sample_spec(self) -> Any:
        return self.sources[0].sample_spec

    def __len__(self) -> int:
        return self._length

    def at(self, seed: int | None, epoch: int) -> Source:
        moved = _Mixture(self.sources, self._names, self._schedule, self._length, self._seed)
        moved._place = (seed, epoch)
        return moved

    def widened(self) -> Source:
        """Returns the same of the sources with their integers of 64 bits as they are stored."""
        found = copy.copy(self)
        found.sources = [widened(source) for source in self.sources]
        return found

    def read(self, indices: Indices, out: Any) -> None:
        check_indices(indices, self._length, where=f"mixture of {', '.join(self._names)}")
        for draw in self._draws(indices):
            if len(draw.rows) == len(indices):
                draw.source.read(draw.indices, out)
                return
            window = allocate(draw.source.sample_spec, len(draw.rows))
            draw.source.read(draw.indices, window)
            for target, leaf in zip(jax.tree.leaves(out), jax.tree.leaves(window), strict=True):
                target[draw.rows] = leaf

    def prepare(self, indices: Indices) -> None:
        for draw in self._draws(indices[(indices >= 0) & (indices < self._length)]):
            prepare(draw.source, draw.indices)

    @property
    def stamp(self) -> str | None:
        """What becomes another when the samples do, as `braidax.data.Stamped`."""
        stamps, shares = [stamp_of(source) for source in self.sources], self._schedule.shares.tolist()
        return None if None in stamps else f"mixture {stamps} {shares} {self._length} {self._seed} {self._place}"

    def describe(self) -> Mapping[str, str]:
        period = len(self._schedule.chosen)
        parts: dict[str, str] = {}
        for name, source, share in zip(self._names, self.sources, self._schedule.shares.tolist(), strict=True):
            drawn = self._length * share / period
            parts[name] = (
                f"{100 * share / period:.4g} % of the samples; {len(source):,} of its own, seen "
                f"{drawn / len(source):.3g} times in an epoch; {source.describe().get('format', type(source).__name__)}"
            )
        return {"format": f"mixture of {len(self.sources)}", "samples": f"{self._length:,}", **parts}

    def _draws(self, indices: Indices) -> Iterator[_Draw]:
        """Sorts a window by where its samples come from; a source that is redrawn is another one in each pass."""
        seed, epoch = self._place
        chosen, counts = self._schedule.draws(indices + epoch * self._length)
        for number in np.unique(chosen).tolist():
            source, rows = self.sources[number], np.flatnonzero(chosen == number)
            passes, places = np.divmod(counts[rows], len(source))
            found = np.empty(len(rows), np.int64)
            grouped: dict[int, tuple[Source, list[NDArray[np.int64]]]] = {}
            for turn in np.unique(passes).tolist():
                here = np.flatnonzero(passes == turn)
                found[here] = _order(len(source), self._seed, number, turn)(places[here])
                drawn = source_at(source, seed, turn)
                grouped.setdefault(id(drawn), (drawn, []))[1].append(here)
            for drawn, groups in grouped.values():
                here = np.sort(np.concatenate(groups))
                yield _Draw(drawn, found[here], rows[here])


@functools.lru_cache(maxsize=256)
def _order(num_samples: int, seed: int, number: int, turn: int) -> Permutation:
    # Two equal sources of one mixture go through their samples in different orders.
    return Permutation(num_samples, seed=seed * 65537 + number, epoch=turn)


def _assignment(shares: Sequence[int]) -> NDArray[np.int32]:
    """Returns the source of each sample of a period, int32 `[sum(shares)]`, by Tijdeman's quota schedule.

    The `j`-th sample of a source may come once its share is `j + 1/D` samples, and has to before it is more than
    `j + 1 - 1/D`, with `D = 2K - 2`; of those that may, the one that has to first is next.
    """
    period, spread = sum(shares), 2 * len(shares) - 2
    chosen = np.zeros(period, np.int32)
    if not spread:
        return chosen

    def window(number: int, rank: int) -> tuple[int, int]:
        share = shares[number] * spread
        return -(-(rank * spread + 1) * period // share), (rank * spread + spread - 1) * period // share + 1

    waiting = [(*window(number, 0), number, 0) for number in range(len(shares))]
    heapq.heapify(waiting)
    ready: list[tuple[int, int, int]] = []
    for step in range(1, period + 1):
        while waiting and waiting[0][0] <= step:
            _, due, number, rank = heapq.heappop(waiting)
            heapq.heappush(ready, (due, number, rank))
        _, number, rank = heapq.heappop(ready)
        chosen[step - 1] = number
        if rank + 1 < shares[number]:
            heapq.heappush(waiting, (*window(number, rank + 1), number, rank + 1))
    return chosen


def _shares(weights: Sequence[Any], names: Sequence[str]) -> list[int]:
    """Returns how many samples of a period come from each source: exact where the period is short enough."""
    for name, weight in zip(names, weights, strict=True):
        if not math.isfinite(weight) or weight <= 0:
            raise ArgumentError(
                f"sources=: the weight of {name} is {weight!r}; expected a positive number: leave out what has none"
            )
    exact = [Fraction(str(weight)) for weight in weights]  # 0.1 means 1/10
    portions = [weight / sum(exact) for weight in exact]
    period = math.lcm(*(portion.denominator for portion in portions))
    if period <= _EXACT_PERIOD:
        return [int(portion * period) for portion in portions]
    least = min(portions)
    period = _USUAL_PERIOD
    while least * period < _FEWEST:
        period *= 2
    if period > _EXACT_PERIOD:
        raise ArgumentError(
            f"sources=: {names[portions.index(least)]} gets only {float(least):.2g} of the samples; expected at least "
            f"{_FEWEST / _EXACT_PERIOD:.2g}: give it more weight, or leave it out"
        )
    shares = [int(portion * period) for portion in portions]
    rests = [portion * period - share for portion, share in zip(portions, shares, strict=True)]
    by_rest = sorted(range(len(rests)), key=lambda number: -rests[number])
    for number in by_rest[: period - sum(shares)]:
        shares[number] += 1
    return shares


def check_alike(sources: Sequence[Source], names: Sequence[str]) -> None:
    """Raises `ArgumentError` for sources whose samples differ in structure, shape or dtype."""
    first = told_leaves(sources[0].sample_spec)
    for source, name in zip(sources[1:], names[1:], strict=True):
        other = told_leaves(source.sample_spec)
        for leaf in [*first, *other]:
            one, two = first.get(leaf, "missing"), other.get(leaf, "missing")
            if one != two:
                raise ArgumentError(
                    f"sources=: leaf {leaf!r} is {one} in {names[0]}, but {two} in {name}; make the samples alike, "
                    "with transform= or image_size="
                )
        if jax.tree.structure(source.sample_spec) != jax.tree.structure(sources[0].sample_spec):
            raise ArgumentError(
                f"sources=: samples are {jax.tree.structure(sources[0].sample_spec)} in {names[0]}, but "
                f"{jax.tree.structure(source.sample_spec)} in {name}; make them alike with transform="
            )
