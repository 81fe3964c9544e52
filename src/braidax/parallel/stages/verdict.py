"""Whether a pipeline pays: against the same devices without one, in the same memory, by the same figures."""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from braidax.parallel.plan.costs.machine import Link
from braidax.parallel.plan.planned.verdict import Alternative, Verdict

from .schedules import Costs, Schedule, simulate

_COUNTS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # of devices that are looked at
_STEP = 4.0  # by which a link is made faster or slower, until it turns
_MOST_STEPS = 15
_HALVINGS = 24
_FORWARD = 1 / 3  # of the seconds of a loss and its gradient


class WholeLoss(NamedTuple):
    """A loss that is not cut.

    **Fields:** `microbatch_seconds`: of the loss and its gradient on one device, for a microbatch; `share_seconds`: for
    a device's share of the batch at once, where that was measured. `activation_bytes`: of a microbatch.
    `parameter_bytes`, in `num_messages` that are sent one by one, the largest of `largest_bytes`; for each of them
    `bytes_per_parameter` with gradient and optimizer's state.
    """

    microbatch_seconds: float
    share_seconds: float | None
    activation_bytes: int
    parameter_bytes: int
    num_messages: int
    largest_bytes: int
    bytes_per_parameter: float


class Devices(NamedTuple):
    """Where both would run.

    **Fields:** `size`: of the axis of the stages; `inner`: with each of these, which divide samples in any case.
    `between`: the link of a stage to the next one; `along`: of collectives along the axis; `within`: among inner ones.
    `memory_bytes`: of a device, if that is known.
    """

    size: int
    inner: int
    between: Link
    along: Link
    within: Link
    memory_bytes: int | None = None

    def with_link(self, factor: float) -> "Devices":
        """Returns the same with a link along the axis that many times as fast."""
        return self._replace(between=_times(self.between, factor), along=_times(self.along, factor))


@dataclass(frozen=True)
class Compared:
    """A pipeline, and the same loss without one.

    All seconds are those of the gradients of a batch; what the optimizer takes comes on top of both. Without a pipeline
    a device computes its share of the batch at once or, where that takes too much memory, in pieces as large as
    those of the pipeline. Gradients are all-reduced under the backward pass of the last piece; or weights are gathered
    for either pass of each piece, and gradients scattered, under these passes: as far as the link says that is hidden.
    What was measured of so many samples counts in proportion for others.

    **Arguments:** `costs`: of the schedule's operations, with links of some devices. `replicas`: on how many places
    along the axis each stage is. `held_bytes`: of each stage beside activations. `on`: gives the schedule for other
    numbers of devices, with one a stage or with several stages on each; None where there is none. `num_samples`: of the
    batch.
    """

    schedule: Schedule
    costs: Callable[[Devices], Costs]
    replicas: tuple[int, ...]
    held_bytes: tuple[int, ...]
    loss: WholeLoss
    devices: Devices
    num_samples: int
    on: Callable[[int], Schedule | None]

    def verdict(self) -> Verdict:
        """Returns who wins, and where it would turn."""
        pipeline = self.pipeline(self.devices)
        known = self.devices.memory_bytes
        room = pipeline.bytes if known is None else known
        pipeline = replace(pipeline, fits=pipeline.bytes <= room)
        others = self.others(self.devices, room)
        factor = self._turning_factor(pipeline, others)
        rate = self.devices.between.bytes_per_second
        return Verdict(
            pipeline, others, room, known is not None, rate, None if factor is None else rate * factor,
            self.devices.size, self._turning_count(pipeline.seconds, others),
        )  # fmt: skip

    def pipeline(self, devices: Devices) -> Alternative:
        """Returns what the pipeline takes, on as many devices as it has stages on; links may be others."""
        found = simulate(self.schedule, self.costs(devices))
        return self._alternative(self.schedule, found.makespan_seconds, self.held_bytes, found.peak_bytes)

    def others(self, devices: Devices, room: float) -> tuple[Alternative, ...]:
        """Returns what the other ways take, each at once if that fits, else in pieces."""
        found: list[Alternative] = []
        for name, way in (("data parallel", self._data_parallel), ("fully sharded", self._fully_sharded)):
            both = [way(devices, pieces, name) for pieces in self._pieces(devices)]
            both = [replace(one, fits=one.bytes <= room) for one in both]
            fitting = [one for one in both if one.fits]
            found.append(min(fitting or both[-1:], key=lambda one: one.seconds))
        return tuple(found)

    # What they take

    def _alternative(
        self, schedule: Schedule, seconds: float, held: Sequence[float], peak_bytes: Callable[[int], int]
    ) -> Alternative:
        sizes = [
            sum(size for size, home in zip(held, schedule.device_of_stage, strict=True) if home == at) + peak_bytes(at)
            for at in range(schedule.num_devices)
        ]
        return Alternative("pipeline", seconds, math.ceil(max(sizes)), schedule.num_microbatches)

    def _pieces(self, devices: Devices) -> Iterator[int]:
        """Yields in how many pieces a device may compute its share: one, and as large as the pipeline's."""
        yield 1
        if (count := math.ceil(self.schedule.num_microbatches / devices.size)) > 1:
            yield count

    def _seconds(self, devices: Devices, pieces: int) -> float:
        """How long a device computes its share."""
        share = self.loss.microbatch_seconds * self.schedule.num_microbatches / self._all(devices)
        if pieces > 1 or self.loss.share_seconds is None:
            return share
        return self.loss.share_seconds * self._all(self.devices) / self._all(devices)

    def _activation_bytes(self, devices: Devices, pieces: int) -> float:
        whole = self.loss.activation_bytes * self.schedule.num_microbatches
        return whole / self._all(devices) / pieces

    def _data_parallel(self, devices: Devices, pieces: int, name: str) -> Alternative:
        seconds, loss = self._seconds(devices, pieces), self.loss
        idle = seconds * (1 - _FORWARD) / pieces
        for link, count in self._axes(devices):
            sending = link.seconds(2 * loss.parameter_bytes * (count - 1) / count, 2 * loss.num_messages)
            exposed = link.exposed(sending, idle)
            seconds, idle = seconds + exposed, idle - (sending - exposed)
        held = loss.parameter_bytes * loss.bytes_per_parameter + self._activation_bytes(devices, pieces)
        return Alternative(name, seconds, math.ceil(held), pieces)

    def _fully_sharded(self, devices: Devices, pieces: int, name: str) -> Alternative:
        seconds, loss = self._seconds(devices, pieces), self.loss
        once = seconds / pieces
        idle = [once * _FORWARD, once * (1 - _FORWARD)]
        part = loss.parameter_bytes
        for link, count in self._axes(devices):  # gathered along one after the other, ever larger parts
            sending = link.seconds(part * (count - 1) / count, loss.num_messages)
            part /= count
            for at, ways in enumerate((1, 2)):
                exposed = link.exposed(ways * sending, idle[at])
                seconds, idle[at] = seconds + pieces * exposed, idle[at] - (ways * sending - exposed)
        held = loss.parameter_bytes * loss.bytes_per_parameter / self._all(devices) + 2 * loss.largest_bytes
        return Alternative(name, seconds, math.ceil(held + self._activation_bytes(devices, pieces)), pieces)

    def _axes(self, devices: Devices) -> Iterator[tuple[Link, int]]:
        pairs = ((devices.within, devices.inner), (devices.along, devices.size))
        yield from ((link, count) for link, count in pairs if count > 1)

    def _all(self, devices: Devices) -> int:
        return devices.size * devices.inner

    # Where it would turn

    def ahead(self, factor: float, names: Sequence[tuple[str, int]]) -> float:
        """Returns how many seconds the pipeline is ahead with a link that many times as fast.

        **Arguments:** `names`: of the other ways, and in how many pieces each computes.
        """
        devices = self.devices.with_link(factor)
        ways = {"data parallel": self._data_parallel, "fully sharded": self._fully_sharded}
        best = min(ways[name](devices, pieces, name).seconds for name, pieces in names)
        return best - self.pipeline(devices).seconds

    def _turning_factor(self, pipeline: Alternative, others: Sequence[Alternative]) -> float | None:
        """Returns the closest factor of a link with which the other one wins, as exactly as it is found."""
        names = [(one.name, one.microbatches) for one in others if one.fits]
        if not names or self.devices.size == 1:
            return None
        wins = self.ahead(1.0, names) >= 0
        turned = {1.0: 1.0, -1.0: 1.0}
        for step in range(1, _MOST_STEPS + 1):
            for sign in (-1.0, 1.0):
                factor = _STEP ** (sign * step)
                if (self.ahead(factor, names) >= 0) != wins:
                    return self._between(turned[sign], factor, names)
                turned[sign] = factor
        return None

    def _between(self, same: float, other: float, names: Sequence[tuple[str, int]]) -> float:
        wins = self.ahead(same, names) >= 0
        for _ in range(_HALVINGS):
            middle = math.sqrt(same * other)
            if (self.ahead(middle, names) >= 0) == wins:
                same = middle
            else:
                other = middle
        return other

    def _turning_count(self, seconds: float, others: Sequence[Alternative]) -> int | None:
        """Returns the closest number of devices with which the other one wins."""
        fitting = [one for one in others if one.fits]
        if not fitting:
            return None
        wins, now = seconds <= min(one.seconds for one in fitting), self.devices.size
        for count in sorted(_COUNTS, key=lambda count: abs(math.log(count / now))):
            won = None if count == now else self.wins_on(count, {one.name for one in fitting})
            if won is not None and won != wins:
                return count
        return None

    def wins_on(self, count: int, names: Collection[str]) -> bool | None:
        """Says whether a pipeline wins on another number of devices along the axis; None where there is none.

        Its stages then take together what they take now, and the slowest as much more than the others. Where the
        memory of a device is not known, all that it is compared with is said to fit.

        **Arguments:** `names`: of the ways that it is compared with.
        """
        schedule, devices = self.on(count), self.devices._replace(size=count)
        if schedule is None:
            return None
        costs, held = self._on_stages(schedule.num_stages), self._evenly(self.held_bytes, schedule.num_stages)
        found = simulate(schedule, costs)
        pipeline = self._alternative(schedule, found.makespan_seconds, held, found.peak_bytes)
        room = math.inf if self.devices.memory_bytes is None else self.devices.memory_bytes
        if pipeline.bytes > room:
            return None
        if self._all(devices) > self.num_samples:  # not every device would have one
            return True
        others = [one.seconds for one in self.others(devices, room) if one.fits and one.name in names]
        return pipeline.seconds <= min(others, default=math.inf)

    def _on_stages(self, count: int) -> Costs:
        costs, replicas = self.costs(self.devices), self.replicas
        sent = [one * min(both) for one, both in zip(costs.transfer_seconds, pairwise(replicas), strict=True)]
        return Costs(
            self._evenly(costs.forward_seconds, count, replicas),
            self._evenly(costs.input_seconds, count, replicas),
            self._evenly(costs.weight_seconds, count, replicas),
            (sum(sent) / len(sent) if sent else 0.0,) * (count - 1),
            tuple(math.ceil(one) for one in self._evenly(costs.activation_bytes, count, replicas)),
            None
            if costs.kept_bytes is None
            else tuple(math.ceil(one) for one in self._evenly(costs.kept_bytes, count, replicas)),
        )

    def _evenly(self, values: Sequence[float], count: int, replicas: Sequence[int] = ()) -> tuple[float, ...]:
        """Returns values that add up to the same, the last of them as much larger than the mean as now the largest.

        **Arguments:** `replicas`: how many there are of each value; by default one.
        """
        replicas = replicas or (1,) * len(values)
        total = sum(value * times for value, times in zip(values, replicas, strict=True))
        last = min(max(values) * sum(replicas) / count, total)
        return (*((total - last) / max(count - 1, 1),) * (count - 1), last)


def _times(link: Link, factor: float) -> Link:
    return replace(link, bytes_per_second=link.bytes_per_second * factor)
