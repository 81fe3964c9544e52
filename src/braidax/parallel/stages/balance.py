"""Which consecutive segments make a stage, and on how many devices, so that the slowest stage is as fast as can be."""

import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from typing import NamedTuple, final

from braidax.errors import ArgumentError
from braidax.parallel.plan.costs.machine import Link

from .segments import Seconds, Segment

_FREE_LINK = Link(1e30)
_NEVER = math.inf

_Entry = tuple[float, int, tuple["Span", ...]]  # the price of all stages, bytes of all devices, the stages
_NONE: _Entry = (_NEVER, 0, ())


class Span(NamedTuple):
    """A stage by numbers: segments `begin` to `end`, on `replicas` devices that share the samples of a microbatch.

    `recompute`: whether the backward pass runs the stage again.
    """

    begin: int
    end: int
    replicas: int = 1
    recompute: bool = False


class Shares(NamedTuple):
    """How devices are divided among stages, all of them.

    **Fields:** `total`: of devices. `each`: how many each stage has; by default as it makes the slowest one fastest.
    """

    total: int
    each: tuple[int, ...] = ()


@dataclass(frozen=True)
class StageCost:
    """What a stage costs: seconds a microbatch, with what sending adds, and bytes of each of its devices."""

    seconds: float
    bytes: int


@dataclass(frozen=True)
class Pricing:
    """What stages of consecutive segments cost.

    **Arguments:** `num_microbatches`: of an update, at the end of which replicas sum their gradients. `between`: the
    link from a stage to the next one. `within`: the one among replicas of a stage. Of what is sent, either hides what
    it says under the computation: all of it makes the slower of both count, none of it their sum. `memory_bytes`: that
    a device may hold. `bytes_per_parameter`: for each byte of parameters those of parameters, gradient and optimizer;
    Adam's are 4. `recompute`: whether stages keep nothing but what comes in; by default those that do not fit else.
    `samples`: of a microbatch, which replicas divide. `inner_devices`: that each replica is of, which divide them, too.

    **Raises:** `ArgumentError` for numbers that cannot be.
    """

    num_microbatches: int
    between: Link = _FREE_LINK
    within: Link = _FREE_LINK
    memory_bytes: float = _NEVER
    bytes_per_parameter: float = 4.0
    recompute: bool | None = None
    samples: int | None = None
    inner_devices: int = 1

    def __post_init__(self) -> None:
        for name in ("num_microbatches", "memory_bytes", "bytes_per_parameter", "inner_devices"):
            if not getattr(self, name) > 0:
                raise ArgumentError(f"{name}={getattr(self, name)}: expected a positive number")

    def in_flight(self, stages: int) -> int:
        """Returns how many microbatches a stage holds at most with one forward, one backward.

        **Arguments:** `stages`: this one and those behind it; replicas of any have the same microbatches.
        """
        return min(self.num_microbatches, stages)


@final
class Priced:
    """Segments of a chain with what stages of consecutive ones cost."""

    def __init__(self, segments: Sequence[Segment], pricing: Pricing) -> None:
        self.segments, self.pricing = segments, pricing
        columns = zip(*(one.seconds for one in segments), strict=True)
        self._sums = [Seconds(*one) for one in zip(*([0.0, *accumulate(column)] for column in columns), strict=True)]
        self._kept = [0, *accumulate(one.kept_bytes for one in segments)]
        self._weights = [_parameter_bytes(segments[begin:]) for begin in range(len(segments))]

    def cost(self, span: Span, in_flight: int) -> StageCost:
        """Returns what a stage costs. **Arguments:** `in_flight`: how many microbatches it holds at most."""
        begin, end, replicas, recompute = span
        pricing, first = self.pricing, self.segments[begin]
        replicas *= pricing.inner_devices
        weights = self._weights[begin][end - begin]
        before, after = self._sums[begin], self._sums[end]
        again = after.forward - before.forward if recompute else 0.0
        seconds = idle = (after.total - before.total + again) / replicas
        behind = self.segments[end].incoming_bytes if end < len(self.segments) else 0
        messages = bool(behind) + bool(first.float_bytes)
        sending = pricing.between.seconds((behind + first.float_bytes) / replicas, messages)
        summed = 2 * weights * (replicas - 1) / replicas  # a ring's all-reduce
        summing = pricing.within.seconds(summed, 2 * (replicas - 1)) / pricing.num_microbatches
        for link, busy in ((pricing.between, sending), (pricing.within, summing)):
            exposed = link.exposed(busy, idle)
            seconds, idle = seconds + exposed, idle - (busy - exposed)
        kept = self._kept[end] - self._kept[begin]
        active = kept + first.incoming_bytes * in_flight if recompute else kept * in_flight
        return StageCost(seconds, math.ceil(weights * pricing.bytes_per_parameter + active / replicas))

    def costs(self, spans: Sequence[Span]) -> tuple[StageCost, ...]:
        """Returns what each stage of a pipeline costs."""
        return tuple(self.cost(one, self.pricing.in_flight(len(spans) - at)) for at, one in enumerate(spans))

    def stage(self, begin: int, end: int, replicas: int, in_flight: int) -> tuple[Span, StageCost]:
        """Returns a stage with what it costs, which runs again where it would not fit otherwise."""
        ways = (False, True) if self.pricing.recompute is None else (self.pricing.recompute,)
        found: list[tuple[Span, StageCost]] = []
        for way in ways:
            span = Span(begin, end, replicas, way)
            found.append((span, self.cost(span, in_flight)))
            if found[-1][1].bytes <= self.pricing.memory_bytes:
                return found[-1]
        return min(found, key=lambda pair: pair[1].bytes)

    def replicas(self, most: int) -> Iterator[int]:
        """Yields on how many devices a stage may be."""
        samples = self.pricing.samples
        yield from (one for one in range(1, most + 1) if samples is None or samples % one == 0)


def balance(priced: Priced, num_stages: int, num_devices: int | Shares | None = None) -> tuple[Span, ...]:
    """Divides segments among stages, and devices among these, so that the slowest stage takes least.

    The dynamic program of PipeDream (Narayanan et al., SOSP 2019), from the last stage on, so that each knows how many
    microbatches it holds; exact for the costs that it is given. Of divisions whose slowest stage is as fast, the one is
    taken whose other stages are most alike, on no more devices (the least sum of squares): where one segment alone is
    the slowest stage, an error in its time then moves no other border. Of these the one of less memory is taken.

    **Arguments:** `num_stages`: that there are. `num_devices`: that there are at most, or how all of them are divided;
    by default one a stage.

    **Returns:** the spans. **Raises:** `ArgumentError` for more stages than segments or devices, for devices that
    samples do not divide among, and when none fits.
    """
    given = num_stages if num_devices is None else num_devices
    devices = given.total if isinstance(given, Shares) else given
    _check_count(len(priced.segments), num_stages, devices)
    limit = priced.pricing.memory_bytes
    found = _best(priced, num_stages, given, lambda cost: cost.seconds if cost.bytes <= limit else _NEVER, max)
    if found is None:
        least = _best(priced, num_stages, given, lambda cost: float(cost.bytes), max)
        if least is None:
            raise ArgumentError(
                f"num_devices={devices}: they cannot be divided among {num_stages} stages so that each stage's divide "
                f"the {priced.pricing.samples} samples of a microbatch: take other stages, or larger microbatches"
            )
        raise ArgumentError(
            f"memory_bytes={limit:.0f}: no cut into {num_stages} stages on {devices} devices fits; the least that one "
            f"needs is {least[0]:.0f} bytes a device: take more stages or devices, smaller microbatches, or more memory"
        )
    slowest, used = found[0], given if isinstance(given, Shares) else sum(one.replicas for one in found[1])

    def square(cost: StageCost) -> float:
        return cost.seconds**2 if cost.bytes <= limit and cost.seconds <= slowest else _NEVER

    alike = _best(priced, num_stages, used, square, operator.add)
    assert alike is not None, "that of the slowest stage is one of them"
    return alike[1]


def _check_count(num_segments: int, num_stages: int, num_devices: int) -> None:
    if num_stages < 1:
        raise ArgumentError(f"num_stages={num_stages}: expected 1 or more")
    if num_stages > num_segments:
        raise ArgumentError(
            f"num_stages={num_stages}: the loss has {num_segments - 1} places to cut at, which makes {num_segments} "
            f"stages at most: take fewer"
        )
    if num_devices < num_stages:
        raise ArgumentError(f"num_devices={num_devices}: expected at least one for each of num_stages={num_stages}")


def _best(
    priced: Priced,
    num_stages: int,
    given: int | Shares,
    price: Callable[[StageCost], float],
    together: Callable[[float, float], float],
) -> tuple[float, tuple[Span, ...]] | None:
    """Returns the least price of all stages, with the spans; None where no price is finite.

    **Arguments:** `price`: of a stage. `together`: of two prices that of both, which is no less than either.
    """
    count, shares = len(priced.segments), given if isinstance(given, Shares) else None
    num_devices = given.total if isinstance(given, Shares) else given
    known: dict[tuple[int, int], list[_Entry]] = {(0, 0): [*[_NONE] * count, (0.0, 0, ())]}

    @functools.cache
    def stage(begin: int, end: int, replicas: int, in_flight: int) -> tuple[Span, int, float]:
        span, cost = priced.stage(begin, end, replicas, in_flight)
        return span, replicas * cost.bytes, price(cost)

    for stages, devices in product(range(1, num_stages + 1), range(1, num_devices + 1)):
        if not stages <= devices <= num_devices - (num_stages - stages):
            continue
        row = [_NONE] * (count + 1)
        for begin in range(count - stages + 1) if stages < num_stages else (0,):
            for replicas in priced.replicas(devices - stages + 1):
                if shares is not None and shares.each and replicas != shares.each[-stages]:
                    continue
                in_flight = priced.pricing.in_flight(stages)
                for end, other in enumerate(known.get((stages - 1, devices - replicas), [])):
                    if end > begin and other[0] <= row[begin][0] and other[0] < _NEVER:
                        span, held, own = stage(begin, end, replicas, in_flight)
                        if own <= row[begin][0]:
                            row[begin] = min(row[begin], (together(own, other[0]), held + other[1], (span, *other[2])))
        known[stages, devices] = row
    counts = range(num_stages if shares is None else num_devices, num_devices + 1)
    least, _, spans = min(known[num_stages, devices][0] for devices in counts)
    return None if least == _NEVER else (least, spans)


def _parameter_bytes(segments: Sequence[Segment]) -> list[int]:
    """Returns the bytes of parameters that the first ones read, each once; of none, of one, and so on."""
    found, totals = set[object](), [0]
    for one in segments:
        new = one.leaves.keys() - found
        found |= new
        totals.append(totals[-1] + sum(one.leaves[leaf] for leaf in new))
    return totals
