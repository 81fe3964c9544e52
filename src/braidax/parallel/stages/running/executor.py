"""Runs a schedule: one process dispatches what the stages of a loss do, each on its own devices."""

import copy
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, final

import jax
from jax.sharding import Mesh

from braidax.errors import ArgumentError, ProcessFailed
from braidax.parallel.compute.metrics import MetricDims
from braidax.parallel.plan.layout import Layout
from braidax.parallel.plan.plan import Plan
from braidax.parallel.stages.passes import is_float
from braidax.parallel.stages.schedules import Kind, Operation, Schedule, validate, with_transfers
from braidax.parallel.stages.stage_layouts import Placing
from braidax.program import Program, Stage, named_leaves

from .dispatch_order import dispatch_order
from .feeding import Feeding, Given, check_batch
from .flush import Flush, StageResults, piece_specs
from .home import Home
from .ownership import Ownership
from .sending.agreement import Agreement
from .sending.route import Route
from .sending.sockets import Sockets
from .stage_programs import BATCH, PARAMS, StagePrograms, stored_spec
from .variables import check_variables

Observer = Callable[[Operation, Any], None]
"""Is called with each computation once it is dispatched, and arrays that it gives."""

_MOST_AHEAD = 8
"""Programs that several CPU devices of one stage have not done: XLA ends the process where they are too many."""


class Found(NamedTuple):
    """What a pipeline computes of a batch.

    **Fields:** `gradients`: of each stage those of the pieces that it owns. `variables`: leaves of new ones. `results`:
    the loss and the leaves of its metrics.
    """

    gradients: tuple[tuple[Any, ...], ...]
    variables: list[Any]
    results: list[Any]


@final
class Pipelined:
    """The gradients of a loss in stages, by a schedule; equal to those of one device with the same microbatches.

    Nothing waits for the devices while operations are dispatched, but for stages of several CPU devices; a stage's
    programs are compiled at their first call.

    **Arguments:** `program`: the loss on one microbatch, `(params, variables, key, batch) -> (loss, (metrics,
    variables))`. `stages`: of it. `schedule`: that flushes; transfers are put into it where it has none. `meshes`: of
    each of its devices. `batch_axes`: over which of their axes samples are divided. `recompute`: which stages keep
    nothing for the way back; by default none. `placing`: how variables lie on the devices of a stage; by default whole.
    `agreement`: of the processes that have devices, if there are several.

    **Raises:** `ArgumentError` for counts that do not agree, for a schedule that cannot be run, and for variables that
    stages would have to hand on.
    """

    def __init__(
        self,
        program: Program,
        stages: Sequence[Stage],
        schedule: Schedule,
        meshes: Sequence[Mesh],
        *,
        batch_axes: tuple[str, ...] = (),
        recompute: Sequence[bool] = (),
        placing: Placing | None = None,
        agreement: Agreement | None = None,
    ) -> None:
        _check_counts(stages, schedule, meshes)
        self.schedule, self._order = _in_order(schedule)
        self.program, self._stages = program, tuple(stages)
        self.observe: Observer | None = None
        self._sockets = None if agreement is None else Sockets(agreement)
        homes = [Home(mesh, batch_axes, self._sockets) for mesh in meshes]
        self.homes = [homes[device] for device in schedule.device_of_stage]
        self._counts = [len(jax.tree.leaves(one)) for one in program.in_specs]
        self._numbers = [sum(self._counts[:at]) for at in range(len(self._counts))]
        self.carried = check_variables(program, stages, schedule)
        specs = jax.tree.leaves(program.in_specs[PARAMS])
        self.ownership = Ownership.of(stages, specs, PARAMS)
        pieces, dims = piece_specs(self.ownership, specs), list[int | None]()
        self.stage_programs: list[StagePrograms] = []
        self.layouts = {one: Layout.whole(spec.shape) for one, spec in pieces.items()}
        self.plans: list[Plan] = []
        for at, (stage, home) in enumerate(zip(stages, self.homes, strict=True)):
            again = bool(recompute) and recompute[at]
            if placing is not None and home.is_divided:
                stage, own, plan = placing.place(at, stage, self.ownership, home.mesh, dims)
                self.layouts.update({(at, piece): layout for piece, layout in own.items()})
                self.plans.append(plan)
            reads, lies = self.ownership.reads[at], self.layouts
            made = StagePrograms(stage, home, reads, pieces, dims, layouts=lies, recompute=again)
            self.stage_programs.append(made)
            dims = made.outgoing_dims
        self._prepare(pieces)

    def _prepare(self, pieces: Any) -> None:
        programs, count = self.stage_programs, self.schedule.num_microbatches
        metric_dims = MetricDims(self.program, microbatches=count).of_outputs
        self._batch_specs = named_leaves(self.program.in_specs[BATCH], "batch")
        num_samples = self._batch_specs[0][1].shape[0]
        self.feeding = [Feeding(one, count, self._numbers) for one in programs]
        self._results = [StageResults(one, metric_dims, num_samples, count) for one in programs]
        self._flushes: list[Flush] = []
        for at, home in enumerate(self.homes):
            own = [(at, one) for one in self.ownership.pieces[at]]
            specs = [stored_spec(pieces[one], self.layouts[one]) for one in own]
            on = [home.lies(self.layouts[one]) for one in own]
            self._flushes.append(Flush(at, programs, self.ownership, specs, on, count))
        self._num_results = len(metric_dims)
        self._ways = [Ways.between(one, other) for one, other in pairwise(programs)]

    def scheduled(self, schedule: Schedule) -> "Pipelined":
        """Returns the same with another schedule, which shares all that is compiled.

        **Raises:** `ArgumentError` where that has stages on other devices, or another number of microbatches.
        """
        for name in ("num_microbatches", "device_of_stage"):
            old, new = getattr(self.schedule, name), getattr(schedule, name)
            if new != old:
                raise ArgumentError(f"schedule has {name}={new}, expected {old}, for which stages are compiled")
        found = copy.copy(self)
        _check_counts(self._stages, schedule, [home.mesh for home in dict.fromkeys(self.homes)])
        found.schedule, found._order = _in_order(schedule)
        check_variables(self.program, self._stages, found.schedule)
        return found

    def check_processes(self, wait_seconds: float = 2.0) -> None:
        """Looks for processes that have ended, for so long. **Raises:** `ProcessFailed` naming one, with its stages."""
        for process in [] if self._sockets is None else self._sockets.ended(wait_seconds):
            stages = [
                at
                for at, home in enumerate(self.homes)
                if any(device.process_index == process for device in home.mesh.devices.flat)
            ]
            raise ProcessFailed(
                f"process {process}, which has stages {stages}, has ended: start all processes again, and restore the "
                f"last checkpoint",
                process,
            )

    @property
    def batch_homes(self) -> list[int]:
        """The first stage that uses each leaf of a batch, the first of all for what none uses."""
        found = [0] * self._counts[BATCH]
        for at in reversed(range(len(self.stage_programs))):
            for leaf in self.feeding[at].batch:
                found[leaf] = at
        return found

    def variable_home(self, leaf: int) -> Home:
        """Returns where a leaf of the variables lies."""
        return self.homes[self.carried[leaf].stage]

    @property
    def result_homes(self) -> list[Home]:
        """Where the loss and each leaf of its metrics lie."""
        found = {number: self.homes[at] for at, one in enumerate(self._results) for number in one.numbers}
        return [found[number] for number in range(self._num_results)]

    def gradients(
        self, pieces: Sequence[Sequence[Any]], variables: Sequence[Any], key: Any, batch: Sequence[Given]
    ) -> Found:
        """Computes gradients of a batch; gives nothing up that it is given.

        **Arguments:** `pieces`: of parameters, of each stage those that it owns, on its devices. `variables`: leaves.
        `key`: data of the step's, with the first stage. `batch`: leaves of all samples, which go to the stages that
        use them.

        **Raises:** `ArgumentError` for a batch that is not the microbatches'.
        """
        names, specs = zip(*self._batch_specs, strict=True)
        check_batch(specs, [one.array for one in batch], self.schedule.num_microbatches, names)
        run = _Run(self.stage_programs, self._ways, self._params(pieces), self.schedule.num_microbatches)
        for feeding, given in zip(self.feeding, run.samples, strict=True):
            given.extend(feeding.begin(key, self.homes[0], batch))
        held = list(variables)
        run.variables = [self._lent_variables(at, held) for at in range(len(self.homes))]
        run.replaced = [
            [one.result for one in (self.carried[at] for at in feeding.variables)] for feeding in self.feeding
        ]
        run.observe = self.observe
        run.all(self._order)
        return self._flushed(run, held)

    def _lent_variables(self, stage: int, held: Sequence[Any]) -> list[Any]:
        """Returns the variables that a stage reads, where it reads them."""
        to = self.homes[stage]
        return [to.bring([held[at]], self.variable_home(at), [to.whole])[0] for at in self.feeding[stage].variables]

    def _params(self, pieces: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """Returns the buffers of parameters of each stage."""
        found: list[list[Any]] = []
        places = [{piece: at for at, piece in enumerate(own)} for own in self.ownership.pieces]
        for one in self.stage_programs:
            arrays: list[Any] = []
            for owner, piece in one.read_pieces:
                array = pieces[owner][places[owner][piece]]
                arrays += one.home.bring([array], self.homes[owner], [one.home.whole])
            small = one.flat.small(arrays)
            found.append([*(one.joined(small) if small else ()), *one.flat.alone(arrays)])
        return found

    def _flushed(self, run: "_Run", held: list[Any]) -> Found:
        results: list[Any] = [None] * self._num_results
        for stage, one in enumerate(self._results):
            for number, value in zip(one.numbers, one.join(run.results[stage]), strict=True):
                results[number] = value
        for leaf, one in enumerate(self.carried):
            if one.result is not None:
                held[leaf] = run.results[one.stage][-1][one.result]
        lent = [
            [
                self.homes[stage].bring(given, self.homes[other], [self.homes[stage].whole] * len(given))
                for other, _ in flush.borrowers
                for given in [self._flushes[other].lend(stage, run.sums[other])]
            ]
            for stage, flush in enumerate(self._flushes)
        ]
        pairs = zip(self._flushes, run.sums, lent, strict=True)
        return Found(tuple(flush.means(sums, given) for flush, sums, given in pairs), held, results)


class Ways(NamedTuple):
    """The ways between two neighboring stages. **Fields:** `is_none`: they lie at one home, where all is there."""

    forward: Route
    backward: Route
    is_none: bool

    @classmethod
    def between(cls, one: StagePrograms, other: StagePrograms) -> "Ways":
        """Returns those of two stages."""
        incoming = other.stage.incoming
        gradients = [spec for spec in incoming if is_float(spec)]
        return cls(
            other.home.route(one.home, incoming, other.incoming_shardings),
            one.home.route(other.home, gradients, one.gradient_shardings),
            one.home is other.home,
        )


class _Run:
    """What there is while a batch is computed, by stage and microbatch."""

    def __init__(
        self, programs: Sequence[StagePrograms], ways: Sequence[Ways], params: list[list[Any]], count: int
    ) -> None:
        self._programs, self._ways, self._params = programs, ways, params
        self.samples: list[list[tuple[Any, ...]]] = [[] for _ in programs]
        self.variables: list[list[Any]] = []
        self.replaced: list[list[int | None]] = []
        self.results: list[list[Any]] = [[] if one.home.is_here else [one.absent_results] * count for one in programs]
        self.sums: list[Any] = [one.zeros() for one in programs]
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
        self._now: Operation | None = None

    def all(self, order: Sequence[Operation]) -> None:
        """Dispatches what this process has a part in. Updates are made by whoever asked for gradients."""
        do = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.INPUT: self._inputs,
            Kind.WEIGHT: self._weights,
            Kind.SEND_F: self._send_forward,
            Kind.RECV_F: self._receive_forward,
            Kind.SEND_B: self._send_backward,
            Kind.RECV_B: self._receive_backward,
        }
        for one in order:
            if one.kind is not Kind.UPDATE and self._programs[one.stage].home.is_here:
                self._now = one
                do[one.kind](one.stage, one.microbatch)

    def _forward(self, stage: int, each: int) -> None:
        own, at = self._programs[stage], (stage, each)
        given = self._given[at] = (*self.variables[stage], *self.samples[stage][each])
        incoming = self._incoming.pop(at, ())
        ran = own.forward(self._params[stage], given, incoming)
        self._held[at] = own.parted(incoming)
        self.results[stage].append(ran.results)
        self._kept[at] = ran.kept
        for place, result in enumerate(self.replaced[stage]):
            if result is not None:
                self.variables[stage][place] = ran.results[result]
        if stage < len(self._ways):
            (self._incoming if self._ways[stage].is_none else self._outgoing)[stage + 1, each] = ran.outgoing
        self._wait(own, stage, ran)

    def _send_forward(self, stage: int, each: int) -> None:
        to = stage + 1, each
        moved = self._ways[stage].forward.send(self._outgoing.pop(to))
        if moved is not None:
            self._incoming[to] = moved

    def _receive_forward(self, stage: int, each: int) -> None:
        way = self._ways[stage - 1].forward
        if way.receives:
            self._incoming[stage, each] = way.receive()

    def _send_backward(self, stage: int, each: int) -> None:
        to = stage - 1, each
        moved = self._ways[stage - 1].backward.send(self._sent.pop(to))
        if moved is not None:
            self._gradients[to] = moved

    def _receive_backward(self, stage: int, each: int) -> None:
        way = self._ways[stage].backward
        if way.receives:
            self._gradients[stage, each] = way.receive()

    def _backward(self, stage: int, each: int) -> None:
        own, at = self._programs[stage], (stage, each)
        moved, others = self._held.pop(at)
        given, kept, gradients = self._given.pop(at), self._kept.pop(at), self._gradients.pop(at, ())
        sums = self.sums[stage]
        self.sums[stage], sent = own.backward(sums, moved, others, self._params[stage], given, kept, gradients)
        self._send(stage, each, sent)
        self._wait(own, stage, sent or self.sums[stage])

    def _inputs(self, stage: int, each: int) -> None:
        own, at = self._programs[stage], (stage, each)
        moved, others = self._held.pop(at)
        given, kept, gradients = self._given[at], self._kept.pop(at), self._gradients.pop(at, ())
        sent, self._left[at] = own.inputs(moved, others, self._params[stage], given, kept, gradients)
        self._send(stage, each, sent)
        if sent:
            self._wait(own, stage, sent)

    def _weights(self, stage: int, each: int) -> None:
        own, at = self._programs[stage], (stage, each)
        left, given = self._left.pop(at), self._given.pop(at)
        if own.specs:
            self.sums[stage] = own.weights(self.sums[stage], left, self._params[stage], given)
            self._wait(own, stage, self.sums[stage])

    def _send(self, stage: int, each: int, sent: Any) -> None:
        if stage:
            (self._gradients if self._ways[stage - 1].is_none else self._sent)[stage - 1, each] = sent

    def _wait(self, own: StagePrograms, stage: int, outputs: Any) -> None:
        """Waits, with several CPU devices, when a stage is too far behind."""
        if self.observe is not None and self._now is not None:
            self.observe(self._now, outputs)
        if own.home.is_bounded:
            self._ahead[stage] += 1
            if self._ahead[stage] == _MOST_AHEAD:
                self._ahead[stage] = 0
                jax.block_until_ready(outputs)


def _in_order(schedule: Schedule) -> tuple[Schedule, tuple[Operation, ...]]:
    """Returns a schedule with transfers, and in which order it is dispatched."""
    validate(schedule)
    if schedule.num_devices > 1 and not any(one.is_transfer for one in schedule.operations()):
        schedule = with_transfers(schedule)
    return schedule, dispatch_order(schedule)


def _check_counts(stages: Sequence[Stage], schedule: Schedule, meshes: Sequence[Mesh]) -> None:
    if not schedule.is_flushed:
        raise ArgumentError(
            f"schedule {schedule.name!r} computes with several versions of the weights ({schedule.weights}), which is "
            f"not run yet: take one that flushes, such as one_forward_one_backward or zero_bubble_h1"
        )
    if len(stages) != schedule.num_stages:
        raise ArgumentError(
            f"stages has {len(stages)}, and schedule {schedule.name!r} is of {schedule.num_stages} on "
            f"{schedule.num_devices} devices: cut the loss into as many"
        )
    if len(meshes) != schedule.num_devices:
        raise ArgumentError(
            f"meshes has {len(meshes)}, and schedule {schedule.name!r} has lists for {schedule.num_devices} devices: "
            f"give one for each"
        )
