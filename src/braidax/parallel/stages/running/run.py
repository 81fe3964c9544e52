"""What there is while a pipeline computes a batch, and how each operation of a schedule is dispatched."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, final

import jax

from braidax.parallel.stages.passes import is_float
from braidax.parallel.stages.schedules import Kind, Operation

from .home import Home
from .sending.route import Way
from .stage_programs import StagePrograms
from .updating.under_way import Updating

Observer = Callable[[Operation, Any], Callable[[], None] | None]
"""Is called with each computation once it is dispatched, and arrays that it gives.

What it returns is called when these are being sent, before the device computes on, which may take over their memory. A
look at them that is dispatched before holds back what is sent: of what waits for an array the only thread that XLA has
on a core goes on with what came first, and then with all computations that are in line behind it.
"""

_MOST_AHEAD = 8
"""Programs that several CPU devices of one stage have not done: XLA ends the process where they are too many."""


class Ways(NamedTuple):
    """The ways between two neighboring stages. **Fields:** `is_none`: they lie at one home, where all is there."""

    forward: Way
    backward: Way
    is_none: bool

    @classmethod
    def between(cls, one: StagePrograms, other: StagePrograms) -> "Ways":
        """Returns those of two stages."""
        incoming = other.stage.incoming
        gradients = [spec for spec in incoming if is_float(spec)]
        return cls(
            other.home.route(one.home, incoming, other.incoming_shardings, one.ran_shardings.outgoing),
            one.home.route(other.home, gradients, one.gradient_shardings, other.sent_shardings),
            one.home is other.home,
        )


@final
class Run:
    """What there is while a batch is computed, by stage and microbatch.

    **Arguments:** `params`: of each stage, buffers. `used`: of each stage and microbatch, which version of them, as of
    `Versions`. `at_once`: which operations are dispatched with another one; each by itself where somebody observes.
    """

    def __init__(
        self,
        programs: Sequence[StagePrograms],
        ways: Sequence[Ways],
        params: Sequence[list[Any]],
        used: Sequence[Sequence[int]],
        at_once: Mapping[Operation, Operation],
    ) -> None:
        self._programs, self._ways, self._used, self._at_once = programs, ways, used, at_once
        self._params: list[dict[int, list[Any]]] = [{0: one} for one in params]
        count = len(used[0])
        self.samples: list[list[tuple[Any, ...]]] = [[] for _ in programs]
        self.variables: list[list[Any]] = []
        self.replaced: list[list[int | None]] = []
        self.results: list[list[Any]] = [[] if one.home.is_here else [one.absent_results] * count for one in programs]
        first = programs[0].home  # the others stand still at the beginning, and this one before its first gradients
        self._sums: list[Any] = [None if one.home is first else one.zeros() for one in programs]
        self._turned: list[dict[int, Any]] = [{} for _ in programs]
        for at, one in enumerate(programs):
            if one.home is not first:
                self._turn(at, 0)
        self._given: dict[tuple[int, int], Any] = {}
        self._kept: dict[tuple[int, int], Any] = {}
        self._held: dict[tuple[int, int], Any] = {}
        self._left: dict[tuple[int, int], Any] = {}
        self._incoming: dict[tuple[int, int], Any] = {}
        self._gradients: dict[tuple[int, int], Any] = {}
        self._outgoing: dict[tuple[int, int], Any] = {}
        self._sent: dict[tuple[int, int], Any] = {}
        self._ahead = [0] * len(programs)
        self.observe: Observer | None = None
        self.updating: Updating | None = None
        self._now: Operation | None = None
        self._done: set[Operation] = set()
        self._looks: dict[Home, list[Callable[[], None]]] = {}

    def all(self, order: Sequence[Operation]) -> None:
        """Dispatches what this process has a part in.

        Without `updating` updates are made by whoever asked for gradients.
        """
        do = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.INPUT: self._inputs,
            Kind.WEIGHT: self._weights,
            Kind.SEND_F: self._send_forward,
            Kind.RECV_F: self._receive_forward,
            Kind.SEND_B: self._send_backward,
            Kind.RECV_B: self._receive_backward,
            Kind.UPDATE: self._update,
        }
        updating = self.updating
        for one in order:
            if self._programs[one.stage].home.is_here and (updating is not None or one.kind is not Kind.UPDATE):
                if not one.is_transfer:
                    self._look([self._programs[one.stage].home])
                self._now = one
                if one in self._done:
                    self._done.remove(one)
                else:
                    do[one.kind](one.stage, one.microbatch)
            for version in () if updating is None else updating.given_up(one):
                self._params[one.stage].pop(version, None)
                self._turned[one.stage].pop(version, None)
        self._look([*self._looks])

    def sums(self, stage: int) -> Any:
        """Returns the gradients of a stage, added up so far."""
        if self._sums[stage] is None:
            self._sums[stage] = self._programs[stage].zeros()
        return self._sums[stage]

    def _forward(self, stage: int, each: int) -> None:
        own, at = self._programs[stage], (stage, each)
        given = self._given[at] = (*self.variables[stage], *self.samples[stage][each])
        incoming = self._incoming.pop(at, ())
        back = None if self.observe is not None or self._now is None else self._at_once.get(self._now)
        if back is not None:
            self._done.add(back)
            self._forward_backward(stage, each, incoming, back.kind)
            return
        turned = self._turn(stage, self._used[stage][each]) if own.forward_turns else ()
        ran = own.forward([*self._seen(stage, each), *turned], given, incoming)
        self._held[at] = own.parted(incoming)
        self._kept[at] = ran.kept
        self._resulted(stage, ran.results)
        if stage < len(self._ways):
            (self._incoming if self._ways[stage].is_none else self._outgoing)[stage + 1, each] = ran.outgoing
        self._wait(own, stage, ran)

    def _forward_backward(self, stage: int, each: int, incoming: Sequence[Any], kind: Kind) -> None:
        own, at = self._programs[stage], (stage, each)
        moved, others = own.forward_backward.parted(incoming)
        params, given = self._seen_back(stage, each), self._given[at]
        if kind is Kind.BACKWARD:
            del self._given[at]
            sums = self.sums(stage)
            self._sums[stage], sent, results = own.forward_backward.whole(sums, moved, others, params, given)
        else:
            halves = own.forward_backward.halves
            results, sent, left = halves.inputs(moved, others, params, given, (), ())
            self._left[at] = halves.weights, left
        self._resulted(stage, results)
        self._send(stage, each, sent)
        self._wait(own, stage, (sent, results))

    def _resulted(self, stage: int, results: Sequence[Any]) -> None:
        self.results[stage].append(results)
        for place, result in enumerate(self.replaced[stage]):
            if result is not None:
                self.variables[stage][place] = results[result]

    def _send_forward(self, stage: int, each: int) -> None:
        to, way = (stage + 1, each), self._ways[stage].forward
        outgoing = self._outgoing.pop(to)
        moved = way.send(outgoing)
        if moved is not None:
            self._incoming[to] = moved
        if stage == each == 0 and way.sends and self._programs[stage].home.is_one_cpu:
            # All others wait for this, and what is dispatched meanwhile takes its time from the same cores.
            jax.block_until_ready(outgoing)

    def _receive_forward(self, stage: int, each: int) -> None:
        way = self._ways[stage - 1].forward
        if way.receives:
            self._incoming[stage, each] = way.receive()
        self._observed(self._incoming[stage, each])

    def _send_backward(self, stage: int, each: int) -> None:
        to = stage - 1, each
        moved = self._ways[stage - 1].backward.send(self._sent.pop(to))
        if moved is not None:
            self._gradients[to] = moved

    def _receive_backward(self, stage: int, each: int) -> None:
        way = self._ways[stage].backward
        if way.receives:
            self._gradients[stage, each] = way.receive()
        self._observed(self._gradients[stage, each])

    def _backward(self, stage: int, each: int) -> None:
        own, at = self._programs[stage], (stage, each)
        moved, others = self._held.pop(at)
        given, kept, gradients = self._given.pop(at), self._kept.pop(at), self._gradients.pop(at, ())
        sums = self.sums(stage)
        self._sums[stage], sent = own.backward(
            sums, moved, others, self._seen_back(stage, each), given, kept, gradients
        )
        self._send(stage, each, sent)
        self._wait(own, stage, sent or self._sums[stage])

    def _inputs(self, stage: int, each: int) -> None:
        own, at = self._programs[stage], (stage, each)
        moved, others = self._held.pop(at)
        given, kept, gradients = self._given[at], self._kept.pop(at), self._gradients.pop(at, ())
        sent, left = own.inputs(moved, others, self._seen_back(stage, each), given, kept, gradients)
        self._left[at] = own.weights, left
        self._send(stage, each, sent)
        if sent:
            self._wait(own, stage, sent)

    def _weights(self, stage: int, each: int) -> None:
        own, at = self._programs[stage], (stage, each)
        (weights, left), given = self._left.pop(at), self._given.pop(at)
        if own.specs:
            self._sums[stage] = weights(self.sums(stage), left, self._seen_back(stage, each), given)
            self._wait(own, stage, self._sums[stage])

    def _update(self, stage: int, number: int) -> None:
        assert self.updating is not None, "it is asked for updates"
        own = self._programs[stage]
        self._params[stage][number + 1], self._sums[stage] = self.updating.update(stage, self.sums(stage))
        self._wait(own, stage, self._sums[stage])

    def _seen(self, stage: int, each: int) -> list[Any]:
        """Returns the weights that a microbatch sees."""
        return self._params[stage][self._used[stage][each]]

    def _seen_back(self, stage: int, each: int) -> list[Any]:
        """Returns these, and those of them that are turned for the way back."""
        return [*self._seen(stage, each), *self._turn(stage, self._used[stage][each])]

    def _turn(self, stage: int, version: int) -> Any:
        """Returns the turned weights of a stage, which all microbatches see that see this version."""
        own, turned = self._programs[stage], self._turned[stage]
        if version not in turned:
            turned[version] = own.turn(self._params[stage][version]) if own.turns else ()
        return turned[version]

    def _send(self, stage: int, each: int, sent: Any) -> None:
        if stage:
            (self._gradients if self._ways[stage - 1].is_none else self._sent)[stage - 1, each] = sent

    def _wait(self, own: StagePrograms, stage: int, outputs: Any) -> None:
        """Waits, with several CPU devices, when a stage is too far behind."""
        self._observed(outputs)
        if own.home.is_bounded:
            self._ahead[stage] += 1
            if self._ahead[stage] == _MOST_AHEAD:
                self._ahead[stage] = 0
                jax.block_until_ready(outputs)

    def _observed(self, outputs: Any) -> None:
        if self.observe is not None and self._now is not None:
            look = self.observe(self._now, outputs)
            if look is not None:
                self._looks.setdefault(self._programs[self._now.stage].home, []).append(look)

    def _look(self, homes: Sequence[Home]) -> None:
        for home in homes:
            for look in self._looks.pop(home, ()):
                look()
