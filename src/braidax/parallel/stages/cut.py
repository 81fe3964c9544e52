"""A loss cut into stages: where it is narrow, so that the slowest stage takes least."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import final

from braidax.errors import ArgumentError
from braidax.parallel.plan.costs.machine import in_time, scaled
from braidax.program import Border, Chain, Program, Stage, find_mixing

from .balance import Priced, Pricing, Shares, Span, StageCost, balance
from .segments import Clock, Seconds, Segment, counted, measured, segments_of, shortest

_MOST_ROUNDS = 6
_LOOKS = 2  # at the seconds of a stage
_DOUBTED = 1.1  # times what the segments of a stage take: it is looked at more often
_MORE_LOOKS = 3  # at stages of cuts that are about as good
_ABOUT = 1.05  # times the slowest stage of the best
_NORM = 32  # two stages as slow as each other count as one that is 2 % slower: what times differ by from run to run


@dataclass(frozen=True)
class CutLoss:
    """A loss in stages.

    **Fields:** `stages`, one behind the other; `borders` between them. `replicas`: on how many devices each is.
    `recompute`: whether its backward pass runs it again. `seconds`: of its passes on one device, a microbatch. `costs`:
    with what sending adds, and its bytes. `activation_bytes`: of a microbatch, what a forward pass leaves for the
    backward pass: what came in and is held, and what is kept. `rerun_bytes`: that a backward pass which runs its stage
    again makes for a moment; else 0.
    """

    stages: tuple[Stage, ...]
    borders: tuple[Border, ...]
    replicas: tuple[int, ...]
    recompute: tuple[bool, ...]
    seconds: tuple[Seconds, ...]
    costs: tuple[StageCost, ...]
    activation_bytes: tuple[int, ...]
    rerun_bytes: tuple[int, ...]

    @property
    def slowest_seconds(self) -> float:
        """How often the pipeline gives a microbatch, once it is full."""
        return max(one.seconds for one in self.costs)

    def __str__(self) -> str:
        """A line a stage: what it takes, what it holds, and where it begins."""
        lines = ["stage  devices  forward   inputs    weights   a microbatch  memory    begins"]
        for at, (cost, seconds) in enumerate(zip(self.costs, self.seconds, strict=True)):
            begins = str(self.borders[at - 1]) if at else "with the loss"
            times = "".join(f"{in_time(one):<10}" for one in seconds)
            again = ", again in the backward pass" if self.recompute[at] else ""
            whole, held = in_time(cost.seconds), scaled(cost.bytes, "B")
            lines.append(f"{at:<7}{self.replicas[at]:<9}{times}{whole:<14}{held:<10}{begins}{again}")
        return "\n".join(lines)


def cut(
    program: Program,
    num_stages: int | None = None,
    *,
    pricing: Pricing,
    cuts: Sequence[str] = (),
    num_devices: int | Shares | None = None,
    clock: Clock | None = None,
    frozen: Collection[int] = frozenset(),
    mixes_samples: bool = False,
) -> CutLoss:
    """Cuts a traced loss into stages, so that the slowest takes least.

    Segments between the places where few values go over are timed, equal ones once; a dynamic program puts them into
    stages; these are timed themselves, once more where they take much longer than their segments, as they do while the
    machine is slow for a while; segments are corrected so that they add up to that, and it runs again until it
    finds a cut that it has found before. Of all that were found those that are about as good are timed in turns, and of
    these the one with the fewest different stages about as slow is taken: any of them may be slower than it was seen.

    **Arguments:** `program`: the loss; its first output is differentiated, its last argument is the batch.
    `num_stages`: that there are to be. `cuts`: instead, the names of `jax.named_scope`s before which to cut.
    `num_devices`: as of `balance`. `clock`: says how long a stage takes; by default `measured()`, while `counted()`
    runs nothing. `frozen`: leaves of the first argument that are not trained. `mixes_samples`: whether a loss may mix
    samples, of which each microbatch then has its own.

    **Returns:** the `CutLoss`. **Raises:** `ArgumentError`, before anything is compiled, for more stages than places
    to cut, for a scope that is not there, for stages that fit into no memory, for a loss that mixes samples.
    """
    if (num_stages is None) == (not cuts):
        raise ArgumentError(f"num_stages={num_stages}, cuts={[*cuts]}: expected one of them")
    if not mixes_samples and pricing.num_microbatches > 1:
        _check_mixing(program, pricing.num_microbatches)
    chain = Chain(program, frozen=frozen)
    borders = _named(chain, cuts) if cuts else chain.borders()
    num_stages = len(borders) + 1 if num_stages is None else num_stages
    segments = chain.stages(borders)
    roughly = segments_of(segments, counted())
    balance(Priced(roughly, pricing), num_stages, num_devices)  # what cannot be is refused before anything is timed
    clock = remembered(clock or measured())
    timed = first = segments_of(segments, clock)
    stages: dict[tuple[Span, ...], tuple[Stage, ...]] = {}
    for _ in range(_MOST_ROUNDS):
        spans = balance(Priced(timed, pricing), num_stages, num_devices)
        if spans in stages:
            break
        stages[spans] = chain.stages([borders[span.begin - 1] for span in spans[1:]])
        timed = _corrected(timed, spans, _surely_timed(stages[spans], spans, first, clock))

    def told(spans: tuple[Span, ...]) -> CutLoss:
        whole = segments_of(stages[spans], clock)
        priced = Priced(_corrected(timed, spans, whole), pricing)
        return _told(priced, spans, stages[spans], tuple(borders[span.begin - 1] for span in spans[1:]), whole)

    found = {spans: told(spans) for spans in stages}
    limit = _ABOUT * min(one.slowest_seconds for one in found.values())
    close = [spans for spans, one in found.items() if one.slowest_seconds <= limit]
    if len(close) > 1:
        clock.look_again([one for spans in close for one in stages[spans]], times=_MORE_LOOKS)
        found = {spans: told(spans) for spans in close}
    return min(found.values(), key=_expected_slowest)


def _check_mixing(program: Program, num_microbatches: int) -> None:
    mixing = [one for one in find_mixing(program, {len(program.in_specs) - 1: 0}, 0) if one.trained]
    if mixing:
        raise ArgumentError(
            f"the loss mixes samples: what {mixing[0].line} computes of one depends on the whole batch, and each of "
            f"num_microbatches={num_microbatches} would see its own: normalize each sample by itself (by layers or "
            f"groups of channels), take one microbatch, or accept it with mixes_samples=True"
        )


def _named(chain: Chain, cuts: Sequence[str]) -> tuple[Border, ...]:
    found: dict[Border, str] = {}
    for name in cuts:
        border = chain.at_scope(name)
        if border in found:
            raise ArgumentError(f"cuts has {found[border]!r} and {name!r}, which begin at one place: leave one out")
        found[border] = name
    return tuple(sorted(found))


@final
class Remembered:
    """A clock that times twice what computes the same, and then knows the shortest time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._known = dict[tuple[str, int], list[Seconds]]()

    def __call__(self, stage: Stage, params: int) -> Seconds:
        own = self._known.setdefault((stage.told(), params), [])
        if len(own) < _LOOKS:
            own.append(self._clock(stage, params))
        return shortest(own)

    def num_looks(self, stage: Stage, params: int = 0) -> int:
        """Returns how often a stage was timed."""
        return len(self._known.get((stage.told(), params), ()))

    def look_again(self, stages: Sequence[Stage], params: int = 0, *, times: int) -> None:
        """Times stages once more, those that compute the same as one, all of them in turns."""
        alike = {stage.told(): stage for stage in stages}
        for _ in range(times):
            for key, stage in alike.items():
                self._known.setdefault((key, params), []).append(self._clock(stage, params))


def remembered(clock: Clock) -> Remembered:
    """Returns a clock that remembers: the same one if it does."""
    return clock if isinstance(clock, Remembered) else Remembered(clock)


def _surely_timed(
    stages: Sequence[Stage], spans: Sequence[Span], segments: Sequence[Segment], clock: Remembered
) -> tuple[Segment, ...]:
    """Returns stages as segments; those that took much longer than theirs are timed once more, the first time."""
    found = segments_of(stages, clock)
    expected = [sum(one.seconds.total for one in segments[span.begin : span.end]) for span in spans]
    each = zip(stages, found, expected, strict=True)
    slow = [stage for stage, one, seconds in each if one.seconds.total > _DOUBTED * seconds]
    doubted = [stage for stage in slow if clock.num_looks(stage) == _LOOKS]
    if not doubted:
        return found
    clock.look_again(doubted, times=_LOOKS)
    return segments_of(stages, clock)


def _expected_slowest(found: CutLoss) -> float:
    """Returns a norm of the seconds of different stages; those that compute the same are as slow as each other."""
    each, slowest = zip(found.stages, found.replicas, found.costs, strict=True), found.slowest_seconds
    different = {(stage.told(), replicas): cost.seconds for stage, replicas, cost in each}
    return slowest * sum((seconds / slowest) ** _NORM for seconds in different.values()) ** (1 / _NORM)


def _corrected(segments: Sequence[Segment], spans: Sequence[Span], stages: Sequence[Segment]) -> tuple[Segment, ...]:
    """Returns segments that add up to what the stages that they make take."""
    found: list[Segment] = []
    for span, stage in zip(spans, stages, strict=True):
        own = segments[span.begin : span.end]
        columns = [
            _scaled(column, whole)
            for column, whole in zip(zip(*(one.seconds for one in own), strict=True), stage.seconds, strict=True)
        ]
        kept = _scaled([one.kept_bytes for one in own], stage.kept_bytes)
        for one, size, *seconds in zip(own, kept, *columns, strict=True):
            found.append(replace(one, seconds=Seconds(*seconds), kept_bytes=round(size)))
    return tuple(found)


def _scaled(values: Sequence[float], whole: float) -> list[float]:
    """Returns values that add up to a whole, in the same proportions."""
    total = sum(values)
    return [value * whole / total if total else whole / len(values) for value in values]


def _told(
    priced: Priced,
    spans: Sequence[Span],
    stages: tuple[Stage, ...],
    borders: tuple[Border, ...],
    whole: Sequence[Segment],
) -> CutLoss:
    seconds: list[Seconds] = []
    for span in spans:
        own = (one.seconds for one in priced.segments[span.begin : span.end])
        seconds.append(Seconds(*(sum(column) for column in zip(*own, strict=True))))
    replicas, recompute = tuple(one.replicas for one in spans), tuple(one.recompute for one in spans)
    left = tuple(
        one.incoming_bytes if span.recompute else one.kept_bytes for one, span in zip(whole, spans, strict=True)
    )
    again = tuple(one.kept_bytes if span.recompute else 0 for one, span in zip(whole, spans, strict=True))
    return CutLoss(stages, borders, replicas, recompute, tuple(seconds), priced.costs(spans), left, again)
