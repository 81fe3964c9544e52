"""Runs a schedule: one process dispatches what the stages of a loss do, each on its own devices."""

import copy
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, final

import jax
from jax.sharding import Mesh

from braidax.errors import ArgumentError, PeerLost
from braidax.parallel.compute.metrics import MetricDims
from braidax.parallel.plan.layout import Layout
from braidax.parallel.plan.plan import Plan
from braidax.parallel.stages.products import packs
from braidax.parallel.stages.schedules import Schedule, validate, with_transfers
from braidax.parallel.stages.stage_layouts import Placing
from braidax.program import Program, Stage, named_leaves
from braidax.spans import OPERATIONS, span

from .dispatch_order import at_once, dispatch_order
from .feeding import Feeding, Given, check_batch
from .flush import Flush, StageResults, piece_specs
from .home import Home
from .owning.carried import check_variables
from .owning.ownership import Ownership
from .run import Observer, Run, Ways
from .sending.agreement import Agreement
from .sending.sockets import Sockets
from .stage_programs import BATCH, PARAMS, StagePrograms, stored_spec
from .updating.stage_update import Owned, StageUpdate
from .updating.under_way import Updating


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

    A schedule that does not flush has updates of its stages in it, `updated`, and no gradients of a batch.

    Nothing waits for the devices while operations are dispatched, but for stages of several CPU devices; a stage's
    programs are compiled at their first call.

    **Arguments:** `program`: the loss on one microbatch, `(params, variables, key, batch) -> (loss, (metrics,
    variables))`. `stages`: of it. `schedule`: transfers are put into it where it has none. `meshes`: of
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
        self._follow(schedule)
        self.program, self._stages = program, tuple(stages)
        self.observe: Observer | None = None
        self._sockets = None if agreement is None else Sockets(agreement)
        options = None if placing is None else placing.compiler_options
        homes = [Home(mesh, batch_axes, self._sockets, compiler_options=options) for mesh in meshes]
        self.homes = [homes[device] for device in schedule.device_of_stage]
        self._counts = [len(jax.tree.leaves(one)) for one in program.in_specs]
        self._numbers = [sum(self._counts[:at]) for at in range(len(self._counts))]
        self.carried = check_variables(program, stages, schedule)
        specs = jax.tree.leaves(program.in_specs[PARAMS])
        self.ownership = Ownership.of(stages, specs, PARAMS)
        self._check_owned()
        self.frozen = frozenset[int]() if placing is None else placing.frozen
        """Which leaves of the parameters have no gradient."""
        pieces, dims = piece_specs(self.ownership, specs), list[int | None]()
        self.stage_programs: list[StagePrograms] = []
        self.layouts = {one: Layout.whole(spec.shape) for one, spec in pieces.items()}
        self.plans: list[Plan] = []
        for at, (stage, home) in enumerate(zip(stages, self.homes, strict=True)):
            again = bool(recompute) and recompute[at]
            if placing is not None and placing.strategies and home.is_divided:
                stage, own, plan = placing.place(at, stage, self.ownership, home.mesh, dims)
                self.layouts.update({(at, piece): layout for piece, layout in own.items()})
                self.plans.append(plan)
            reads, lies = self.ownership.reads[at], self.layouts
            turn = home.is_one_cpu and packs(schedule.num_microbatches, is_flushed=schedule.is_flushed)
            made = StagePrograms(stage, home, reads, pieces, dims, layouts=lies, recompute=again, turn_weights=turn)
            self.stage_programs.append(made)
            dims = made.outgoing_dims
        self._prepare(pieces)

    def _follow(self, schedule: Schedule) -> None:
        """Gives it a schedule, with transfers, and in which order that is dispatched."""
        self.versions = validate(schedule)
        """Which weights it computes with."""
        if schedule.num_devices > 1 and not any(one.is_transfer for one in schedule.operations()):
            schedule = with_transfers(schedule)
        self.schedule, self._order, self._at_once = schedule, dispatch_order(schedule), at_once(schedule)

    def _check_owned(self) -> None:
        """Checks that what several stages read is updated at one moment."""
        names = [name for name, _ in named_leaves(self.program.in_specs[PARAMS], "params")]
        for stage, reads in enumerate(self.ownership.reads if not self.schedule.is_flushed else ()):
            for one in reads:
                if one.owner != stage:
                    raise ArgumentError(
                        f"{names[one.piece.leaf]} is read by stages {one.owner} and {stage}, and by schedule "
                        f"{self.schedule.name!r} stages update at different moments, so that its gradients have no "
                        f"sum: take a schedule that flushes, such as 1F1B, or cut so that one stage reads it"
                    )

    def _prepare(self, pieces: Any) -> None:
        programs, count = self.stage_programs, self.schedule.num_microbatches
        metric_dims = MetricDims(self.program, microbatches=count).of_outputs
        self._batch_specs = named_leaves(self.program.in_specs[BATCH], "batch")
        num_samples = self._batch_specs[0][1].shape[0]
        self.feeding = [Feeding(one, count, self._numbers) for one in programs]
        self._results = [StageResults(one, metric_dims, num_samples, count) for one in programs]
        self.flushes: list[Flush] = []
        each = self.schedule.microbatches_per_update or count
        for at, home in enumerate(self.homes):
            own = [(at, one) for one in self.ownership.pieces[at]]
            stored = [(piece.leaf, stored_spec(pieces[at, piece], self.layouts[at, piece])) for _, piece in own]
            specs = [None if leaf in self.frozen else spec for leaf, spec in stored]
            on = [home.lies(self.layouts[one]) for one in own]
            self.flushes.append(Flush(at, programs, self.ownership, specs, on, each))
        self._num_results = len(metric_dims)
        self._ways = [Ways.between(one, other) for one, other in pairwise(programs)]

    def scheduled(self, schedule: Schedule) -> "Pipelined":
        """Returns the same with another schedule, which shares all that is compiled.

        **Raises:** `ArgumentError` where that has stages on other devices, another number of microbatches or of
        updates, or sees other versions of the weights.
        """
        for name in ("num_microbatches", "device_of_stage", "num_updates", "weights"):
            old, new = getattr(self.schedule, name), getattr(schedule, name)
            if new != old:
                raise ArgumentError(f"schedule has {name}={new}, expected {old}, for which stages are compiled")
        found = copy.copy(self)
        _check_counts(self._stages, schedule, [home.mesh for home in dict.fromkeys(self.homes)])
        found._follow(schedule)
        check_variables(self.program, self._stages, found.schedule)
        return found

    def check_processes(self, wait_seconds: float = 2.0) -> None:
        """Looks for processes that have ended, for so long. **Raises:** `PeerLost` naming one, with its stages."""
        for process in [] if self._sockets is None else self._sockets.ended(wait_seconds):
            stages = [
                at
                for at, home in enumerate(self.homes)
                if any(device.process_index == process for device in home.mesh.devices.flat)
            ]
            raise PeerLost(
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
        assert self.schedule.is_flushed, "there are gradients of all microbatches at once"
        run, held = self._begun(pieces, variables, key, batch)
        with span(*OPERATIONS):
            run.all(self._order)
        results = self._results_of(run, held)
        return Found(self._means([*map(run.sums, range(len(self.homes)))]), held, results)

    def updated(
        self,
        owned: Sequence[Owned],
        variables: Sequence[Any],
        key: Any,
        batch: Sequence[Given],
        updates: Sequence[StageUpdate],
        *,
        before_update: Callable[[], object] | None = None,
    ) -> tuple[list[Owned], list[Any], list[Any]]:
        """Computes a batch by a schedule that does not flush; takes over the memory of what stages own.

        **Arguments:** `owned`: by each stage. `updates`: of each. `before_update`: is called before the first of them.
        Others as of `gradients`.

        **Returns:** what stages own then; leaves of new variables; the loss and the leaves of its metrics.

        **Raises:** as `gradients`.
        """
        assert not self.schedule.is_flushed, "its updates are made behind all gradients"
        run, held = self._begun([one.params for one in owned], variables, key, batch)
        run.updating = updating = Updating(self.schedule, self.versions, owned, updates, before_update)
        with span(*OPERATIONS):
            run.all(self._order)
        return updating.finished(), held, self._results_of(run, held)

    def _begun(
        self, pieces: Sequence[Sequence[Any]], variables: Sequence[Any], key: Any, batch: Sequence[Given]
    ) -> tuple[Run, list[Any]]:
        names, specs = zip(*self._batch_specs, strict=True)
        check_batch(specs, [one.array for one in batch], self.schedule.num_microbatches, names)
        used = self.versions.used
        run = Run(self.stage_programs, self._ways, self._params(pieces), used, self._at_once)
        for feeding, given in zip(self.feeding, run.samples, strict=True):
            given.extend(feeding.begin(key, self.homes[0], batch))
        held = list(variables)
        run.variables = [self._lent_variables(at, held) for at in range(len(self.homes))]
        run.replaced = [
            [one.result for one in (self.carried[at] for at in feeding.variables)] for feeding in self.feeding
        ]
        run.observe = self.observe
        return run, held

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

    def _results_of(self, run: Run, held: list[Any]) -> list[Any]:
        """Returns the loss and its metrics. **Arguments:** `held`: variables; the new ones are put into it."""
        results: list[Any] = [None] * self._num_results
        for stage, one in enumerate(self._results):
            for number, value in zip(one.numbers, one.join(run.results[stage]), strict=True):
                results[number] = value
        for leaf, one in enumerate(self.carried):
            if one.result is not None:
                held[leaf] = run.results[one.stage][-1][one.result]
        return results

    def _means(self, sums: Sequence[Any]) -> tuple[tuple[Any, ...], ...]:
        lent = [
            [
                self.homes[stage].bring(given, self.homes[other], [self.homes[stage].whole] * len(given))
                for other, _ in flush.borrowers
                for given in [self.flushes[other].lend(stage, sums[other])]
            ]
            for stage, flush in enumerate(self.flushes)
        ]
        pairs = zip(self.flushes, sums, lent, strict=True)
        return tuple(flush.means(own, given) for flush, own, given in pairs)


def _check_counts(stages: Sequence[Stage], schedule: Schedule, meshes: Sequence[Mesh]) -> None:
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
