"""What a placement of a variable costs along one mesh axis: seconds of a step, and bytes of a device.

A device that holds 1/N of `B` bytes sends `B (N - 1) / N` to make them whole, or to send all parts around: forward,
again backward, and for the gradient; a whole gradient is all-reduced by twice that (ZeRO, arXiv 1910.02054, section 7).
What is sent is hidden as far as a machine was seen to hide it, and as long as the products by the same weights take.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from braidax.parallel.plan.layout import Axis, Layout
from braidax.parallel.plan.model import Model
from braidax.parallel.plan.placements import Gathered, Hops, Placement, Replicated, Rotated
from braidax.parallel.plan.strategy import num_bytes
from braidax.program import Cut

from .between import between_of
from .machine import Link, Machine
from .ring import RingWork
from .work import Work, work_of

_ALONE = Link(1.0)  # of an axis of one device, along which nothing is sent


@dataclass(frozen=True)
class Price:
    """What a placement costs a device.

    **Fields:** `seconds` of a step in which it sends and computes nothing. `held_bytes`: of the variable, its gradient
    and what the optimizer keeps; `moment_bytes`: besides, while it is used.
    """

    seconds: float
    held_bytes: float
    moment_bytes: float = 0.0

    def __add__(self, other: "Price") -> "Price":
        """Both, used at the same time, neither hiding the other."""
        moment_bytes = self.moment_bytes + other.moment_bytes
        return Price(self.seconds + other.seconds, self.held_bytes + other.held_bytes, moment_bytes)


class Prices:
    """The prices of the variables of a model along an axis over which samples are divided.

    Axes that are placed later may divide more; that is not counted.

    **Arguments:** `taken`: how variables lie on the axes before this one. `hops`: how parts on rings are handed on.

    **Raises:** `ArgumentError` when a machine's figures do not tell of the axis.
    """

    def __init__(
        self, model: Model, axis: Axis, taken: Mapping[str, Layout], machine: Machine, hops: Hops = "ahead"
    ) -> None:
        self.hops: Hops = hops
        self._model, self._count, self._machine = model, axis.size, machine
        self._permute = machine.permute(axis.name) if axis.size > 1 else _ALONE
        self._collective = machine.collective(axis.name) if axis.size > 1 else _ALONE
        self._works = {path: work_of(model, path, taken[path]) for path in model.variables}
        self._others = (axis.size - 1) / axis.size

    def of(self, path: str, placement: Placement) -> Price:
        """Of a variable by any placement; of one by rows, or split, it is known only what a device holds."""
        if isinstance(placement, Replicated):
            return self.replicated([path])
        if isinstance(placement, Gathered | Rotated) and 0 <= placement.dim < len(self._model.variables[path].shape):
            if isinstance(placement, Gathered):
                return self.gathered({path: placement.dim}, keeps=placement.backward == "kept")
            return self.rotated({path: Cut(placement.dim, placement.pieces)}, placement.hops)
        return Price(0.0, self._held(path) / self._count)

    def replicated(self, paths: Collection[str]) -> Price:
        """Of variables that each device has whole, and whose gradients are all-reduced."""
        moved = [self._works[path] for path in paths if path not in self._model.frozen]
        sending = sum(self._collective.seconds(2 * work.own_bytes * self._others, 2) for work in moved)
        computing = 2 * sum(map(self._computing, moved))
        return Price(self._collective.exposed(sending, computing), sum(map(self._held, paths)))

    def gathered(self, dims: Mapping[str, int], *, keeps: bool = False) -> Price:
        """Of variables that are gathered where they are used, and whose gradients are scattered.

        **Arguments:** `dims`: which one is split, by path. `keeps`: whether they stay whole for the backward pass, all
        of them at once.
        """
        sending, ways = dict[str, float](), {path: self._ways(path) for path in dims}
        held = moment = 0.0
        for path, dim in dims.items():
            work, longer = self._works[path], self._longer(path, dim)
            sending[path] = self._collective.seconds(work.used_bytes * longer * self._others, work.num_used)
            held += self._held(path) * longer / self._count + keeps * work.used_bytes * longer
            moment += (ways[path] - keeps) * work.most_bytes * longer
        computing = sum(self._computing(self._works[path]) for path in dims)
        back = sum((ways[path] - keeps) * seconds for path, seconds in sending.items())
        exposed = self._collective.exposed(sum(sending.values()), computing)
        exposed += self._collective.exposed(back, 2 * computing)
        return Price(self._runs(exposed, dims), held, moment)

    def rotated(self, cuts: Mapping[str, Cut], hops: Hops) -> Price:
        """Of variables whose parts go around a ring.

        Each hop is under the products by the parts that a device has: of the last parts there is none. In place there
        is one part at a time, and no hop is under anything.
        """
        each, ways = {path: self.hop_seconds(path, cut) for path, cut in cuts.items()}, {p: self._ways(p) for p in cuts}
        at_once = 1 if hops == "in place" else 2
        held = moment = exchanging = 0.0
        for path, cut in cuts.items():
            work, longer = self._works[path], self._longer(path, cut.dim)
            held += self._held(path) * longer / self._count
            moment += at_once * ways[path] * work.most_bytes * longer / self._count
            if cut.sizes:  # it is stored otherwise, and exchanged
                sent_bytes = ways[path] * work.own_bytes / self._count * self._others
                exchanging += self._collective.seconds(sent_bytes, ways[path])
        computing = sum(self._computing(self._works[path]) for path in cuts) / self._count
        computing = 0.0 if hops == "in place" else computing
        back = sum(ways[path] * hop for path, hop in each.items())
        exposed = self._permute.exposed(sum(each.values()), computing) + self._permute.exposed(back, 2 * computing)
        return Price(self._runs((self._count - 1) * exposed + exchanging, cuts), held, moment)

    def hop_seconds(self, path: str, cut: Cut) -> float:
        """Returns how long the parts of a variable take to the next device in one run of the loss, each once."""
        work = self._works[path]
        return self._permute.seconds(work.used_bytes * self._longer(path, cut.dim) / self._count, work.num_used)

    def ring_work(self, path: str, cut: Cut) -> RingWork:
        """Returns what is sent and computed in one hop."""
        made = ring_work(self._works[path], self._count)
        told = (self._machine.flops_per_second, self._permute.hidden)
        return RingWork(made.flops, made.elements, made.sent_bytes, self.hop_seconds(path, cut), *told)

    def split(self, paths: Collection[str], root: int) -> Price:
        """Of variables of a group each device keeps its part of, for whose products samples are brought.

        Before them all samples along the axis are gathered, behind them sums are scattered, and backward the other way;
        under a remat they are gathered again. Nothing else is there to hide that.
        """
        one = between_of(self._model, root)
        factor = self._count / self._model.num_parts
        sent_bytes = (2 * one.summed + one.again) * factor * self._others
        seconds = self._model.microbatches * self._collective.seconds(sent_bytes, one.num_messages)
        held = sum(map(self._held, paths)) / self._count + one.stays * factor
        return Price(seconds, held, 2 * one.copied * factor)

    def between(self, root: int | None, *, in_parts: bool) -> Price:
        """Of what products of a group make of a device's samples, forward and backward: one part at a time, or all."""
        one = between_of(self._model, root)
        if in_parts:  # computed again as parts come by once more
            return Price(0.0, 0.0, 2 * one.held / self._model.num_parts / self._count)
        moment_bytes = (1 if one.kept else 2) * one.held
        return Price(0.0, one.kept / self._model.num_parts, moment_bytes / self._model.num_parts)

    def shares(self, paths: Collection[str], *, moving: bool) -> dict[str, float]:
        """Returns by path the part of what is sent for several variables, gathered or going around if `moving`."""
        ways = {path: self._ways(path) for path in paths}
        sent = {p: self._works[p].own_bytes * (1 + ways[p] if moving else 2 * (ways[p] - 1)) for p in paths}
        return {path: one / sum(sent.values()) if one else 0.0 for path, one in sent.items()}

    def _computing(self, work: Work) -> float:
        """How long a device computes the products by a variable, forward, in one run of the loss."""
        return work.flops / self._machine.flops_per_second

    def _runs(self, exposed: float, paths: Collection[str]) -> float:
        """Of all runs of the loss in a step, with the rows that are looked up in parts, and their gradients."""
        rows = [work.looked_up_bytes for path in paths if (work := self._works[path]).looked_up_bytes]
        exchanging = sum(self._collective.seconds(2 * one * self._others, 2) for one in rows)
        return self._model.microbatches * (exposed + exchanging)

    def _ways(self, path: str) -> int:
        """What crosses backward: the weight again, and its gradient."""
        return 1 if path in self._model.frozen else 2

    def _longer(self, path: str, dim: int) -> float:
        """How many times as long a dim is where parts are even."""
        size = self._model.variables[path].shape[dim]
        return -(-size // self._count) * self._count / size if size else 1.0

    def _held(self, path: str) -> float:
        own = self._works[path].own_bytes
        whole = self._model.variables[path]
        state = self._model.state_bytes.get(path, 0)
        return self._ways(path) * own + (state * own / num_bytes(whole) if state else 0.0)


def ring_work(work: Work, count: int) -> RingWork:
    """Returns what is sent and computed in one hop of the parts of a variable, by bytes alone."""
    return RingWork(work.flops / count, work.elements / count, work.used_bytes / count)
