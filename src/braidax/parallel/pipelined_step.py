"""`PipelinedStep`: a loss in stages along a mesh axis, and an optimizer, as a training step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, Sharding

from braidax.errors import ArgumentError
from braidax.program import Program, difference, named_leaves, specs_of
from braidax.spans import Trace

from .compute.in_flight import InFlight
from .given.arrays import adopt, place, typed_key
from .given.asking import Asking
from .given.initial import traced_loss
from .given.loss import Loss
from .plan.batch import batch_axes
from .plan.plan import Plan
from .plan.replanning import changes, tables_in
from .plan.rotated import RotatedTensorParallel
from .plan.strategies import DataParallel, FullySharded, Hybrid
from .plan.strategy import Strategy, stages_axis
from .plan.tensor import TensorParallel
from .stages.cut import CutLoss
from .stages.pipeline import Pipeline
from .stages.planning import Setting, bytes_per_parameter, with_stages
from .stages.replaying import agreed_stages, replay_stages
from .stages.running.executor import Pipelined
from .stages.running.feeding import Given
from .stages.running.forward_only.readings import StagedReading, StagedReadings
from .stages.running.home import Home, sub_meshes, without_mesh
from .stages.running.measuring import StageLanes, measured_run
from .stages.running.pipelined_work import PipelinedWork
from .stages.running.sending.agreement import Agreement
from .stages.schedules import Schedule, Simulation
from .stages.stage_layouts import Placing, merged
from .state import Origin, State, Way
from .wrapped import Wrapped

_INSIDE = (DataParallel, FullySharded, Hybrid, RotatedTensorParallel, TensorParallel)
"""What other axes may be for."""


class PipelinedStep:
    """A training step whose loss lies in stages along a mesh axis; `parallelize` makes it for a `Pipeline`.

    `update`, `init`, `finish`, `batch_shardings`, `state_specs`, `mesh` and `plan` are as of `Step`. A state's
    `params` are the user's PyTree, in which the rows of a leaf that several stages have, the stacked weights of a loop,
    are a tuple; each leaf lies with the stage that owns it. `trace`, which may be set, gets a lane for each stage: when
    operations of the fourth update ran on their devices, and of each hundredth after it. `fit` sets that of its report.
    """

    def __init__(
        self,
        work: PipelinedWork,
        loss: Loss,
        batch: Any,
        mesh: Mesh,
        plan: Plan,
        found: CutLoss,
        batch_axes: tuple[str, ...],
    ) -> None:
        self._work, self._batch_specs, self.mesh, self.plan, self.cut = work, batch, mesh, plan, found
        self.schedule: Schedule = work.run.schedule
        self.state_shardings = work.shardings
        self._batch_homes = homes = [work.run.homes[stage] for stage in work.run.batch_homes]
        self._homes: dict[Sharding, Home] = {home.samples: home for home in work.run.homes}
        self._homes |= {home.all_samples: home for home in work.run.homes}
        structure = jax.tree.structure(batch)
        self.batch_shardings: Any = structure.unflatten([home.samples for home in homes])
        self.trace: Trace | None = None
        assert plan.pipeline is not None, "its plan has one"
        self._lanes = StageLanes(work.run, plan.pipeline.costs)
        self._in_flight = InFlight(mesh)
        self._readings = StagedReadings(work, loss, mesh, batch_axes)
        self.fetches_ahead = False

    def init(self, key: jax.Array) -> State:
        """Makes the first state, every leaf born on the devices of its stage.

        **Arguments:** `key`: from `jax.random.key`. **Raises:** `ArgumentError` when it is no such key.
        """
        key = typed_key(key)
        if message := difference(self._work.specs.key, key, "key"):
            raise ArgumentError(f"{message}: make it with jax.random.key(seed), of the PRNG that JAX is configured for")
        with without_mesh():
            return self._own(self._work.begin(key))

    @property
    def state_specs(self) -> State:
        """Of every leaf of a state shape, dtype and sharding: enough for a checkpoint to restore one."""
        return self._own(
            jax.tree.map(
                lambda spec, on: jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=on),
                self._work.specs,
                self.state_shardings,
            )
        )

    def _own(self, state: State) -> State:
        return replace(state, origin=Origin(self._way_to))

    def _way_to(self, saved: Mapping[str, int | None]) -> Way:
        """Whole variables come as they are; from tables by rows and what was put off for these there is no way yet."""
        if said := changes(tables_in(saved), ()):
            return (
                f"{said}, and there is no way from there into stages: restore it with a step of DataParallel(), save "
                "that, and restore this"
            )
        return None

    def update(
        self, state: State, batch: Any, *, before_apply: Callable[[], object] | None = None
    ) -> tuple[State, dict[str, Any]]:
        """Takes one training step, as of `Step.update`; a metric of samples lies with the stage that computes it.

        By a schedule that does not flush it makes several updates, as `Pipeline` says; `before_apply` is called before
        the first of them, and `state.step` counts steps.

        **Raises:** `ArgumentError` when state or batch are not like the ones the step was made for; `PeerLost`
        when a process that has stages has ended.
        """
        self._check(state, batch)
        try:
            with self._lanes.watching(self.trace):
                return self._updated(state, batch, before_apply)
        except jax.errors.JaxRuntimeError:
            self._work.run.check_processes()
            raise

    def _updated(
        self, state: State, batch: Any, before_apply: Callable[[], object] | None
    ) -> tuple[State, dict[str, Any]]:
        self._in_flight.make_room()
        with without_mesh():
            state, given = adopt(state, self.state_shardings), self._given(batch, self._batch_homes)
            if not self.schedule.is_flushed:
                return self._moved(state, given, before_apply)
            found = self._work.gradients(state, given)
        self._in_flight.add(found.metrics["loss"])
        if before_apply is not None:
            before_apply()
        with without_mesh():
            step, params, opt_state = self._work.apply(state, found.gradients, found.loss)
        variables = jax.tree.unflatten(jax.tree.structure(state.variables), found.variables)
        return replace(state, step=step, params=params, opt_state=opt_state, variables=variables), found.metrics

    def _moved(
        self, state: State, given: Sequence[Given], before_update: Callable[[], object] | None = None
    ) -> tuple[State, dict[str, Any]]:
        """Takes a step whose stages update while it is computed."""
        found = self._work.moved(state, given, before_update)
        self._in_flight.add(found.metrics["loss"])
        variables = jax.tree.unflatten(jax.tree.structure(state.variables), found.variables)
        parts = {"step": found.step, "params": found.params, "opt_state": found.opt_state, "variables": variables}
        return replace(state, **parts), found.metrics

    def _given(self, batch: Any, wanted: Sequence[Home]) -> list[Given]:
        """Returns the leaves of a batch, each with where it lies. **Arguments:** `wanted`: where it is first used."""
        found: list[Given] = []
        for (name, leaf), first in zip(named_leaves(batch, "batch"), wanted, strict=True):
            at = self._homes.get(leaf.sharding) if isinstance(leaf, jax.Array) else None
            if at is None and isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
                on = next(on for on, home in self._homes.items() if home is first)
                raise ArgumentError(
                    f"{name} lies as {leaf.sharding}, expected {on}: give the loader step.batch_shardings, or arrays "
                    f"that all processes have alike"
                )
            found.append(Given(leaf, at))
        return found

    def _check(self, state: State, batch: Any) -> None:
        self._check_state(state)
        if message := difference(self._batch_specs, specs_of(batch), "batch"):
            raise ArgumentError(f"{message}: give parallelize the batch={{…}} that the loader yields")

    def _check_state(self, state: State) -> None:
        if message := difference(self._work.specs, state, "state"):
            raise ArgumentError(f"{message}: pass a state that came from this step's init or update")
        if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(state.params)):
            raise ArgumentError("state was given up by an earlier update: go on with the state that it returned")

    def measure(self, state: State, batch: Any, *, trace: Trace | None = None) -> Simulation:
        """Computes the gradients of a batch, and notes when each operation began and ended on its device.

        They are computed twice, and of the second time is told; the state stays what it is, and can be used. Transfers
        are not told of: they are what devices wait for. Of several processes each tells of its own devices.

        **Arguments:** `trace`: gets a lane for each stage.

        **Returns:** what `plan.timeline(measured=…)` draws. **Raises:** as `update`.
        """
        self._check(state, batch)
        assert self.plan.pipeline is not None, "its plan has one"
        with without_mesh():
            state, given = adopt(state, self.state_shardings), self._given(batch, self._batch_homes)
            compute = partial(self._computed, state, given)
            return measured_run(self._work.run, self.plan.pipeline.costs, compute, trace)

    def _computed(self, state: State, given: Sequence[Given]) -> object:
        """Computes a batch, of which the state stays what it is."""
        if self.schedule.is_flushed:
            return self._work.gradients(state, given)
        params, opt_state = jax.tree.map(_copied, (state.params, state.opt_state))
        return self._work.moved(replace(state, params=params, opt_state=opt_state), given)

    def whole_params(self, state: State) -> Any:
        """Returns the parameters as the user's own PyTree, on the host."""
        return self._work.whole_params(state.params)

    def finish(self) -> None:
        """As of `Step.finish`: all is in `trace` that has been noted for it."""
        self._lanes.finish()

    def check_processes(self, *, wait_seconds: float = 2.0) -> None:
        """Looks for other processes with stages that have ended; a run that stands still, or has failed, may ask.

        **Arguments:** `wait_seconds`: how long those are asked that still answer: one may be about to end.

        **Raises:** `PeerLost` naming one.
        """
        self._work.run.check_processes(wait_seconds)

    def evaluate(self, state: State, batch: Any) -> dict[str, Any]:
        """Computes the metrics of a batch, as of `Step.evaluate`: of all samples at once, stage by stage.

        While a stage has one batch, those before it have the next: call it for several, and read metrics afterwards.

        **Returns:** the metrics, as of `update`. **Raises:** `ArgumentError`, `SpecError`, `PeerLost` as `update`.
        """
        self._check_state(state)
        reading = self._readings.of(None, specs_of(batch))
        metrics = self._read(self._readings.metrics, reading, state, batch)
        self._in_flight.add(metrics["loss"])
        return metrics

    def wrap(self, fn: Callable[..., Any], *, batch: Any = None) -> Wrapped:
        """Makes a function of a state and a batch from `fn(params, batch)`, as of `Step.wrap`.

        It is computed where its parameters lie: what reads those of several stages, such as a loop that generates
        token by token, on the devices of the last of them, to which the others are sent each time.

        **Arguments:** as of `Step.wrap`.

        **Returns:** the function; what is one number comes on all devices, the rest with the stage that computes it.
        `lower` is refused: there is a program for each stage.

        **Raises:** as of `Step.wrap`.
        """
        asking, specs = Asking(fn, "fn"), self._batch_specs if batch is None else specs_of(batch)
        made = self._readings.of(asking, specs)
        run, lower = partial(self._run, asking, specs), partial(self._refuse_lower, made)
        return Wrapped(run, lower, made.batch_shardings, made.out_shardings)

    def _run(self, fn: Asking, specs: Any, state: State, batch: Any) -> Any:
        self._check_state(state)
        if message := difference(specs, specs_of(batch), "batch"):
            raise ArgumentError(f"{message}: give wrap the batch={{…}} that it is called with")
        result = self._read(self._readings.run, self._readings.of(fn, specs), state, batch)
        self._in_flight.add(min(jax.tree.leaves(result), key=lambda leaf: leaf.size))
        return result

    def _read(self, run: Callable[..., Any], reading: StagedReading, state: State, batch: Any) -> Any:
        self._in_flight.make_room()
        try:
            with without_mesh():
                state, given = place(state, self.state_shardings), self._given(batch, reading.forward.batch_homes)
                return run(reading, state, given)
        except jax.errors.JaxRuntimeError:
            self._work.run.check_processes()
            raise

    def _refuse_lower(self, made: StagedReading) -> NoReturn:
        raise ArgumentError(
            f"lower is of one program, and over a Pipeline this function is {made.forward.num_programs}: wrap it with "
            f"a step without one to look at it"
        )


class Training(NamedTuple):
    """What is trained.

    **Fields:** `born`: traced `key -> Born`. `batch`: specs of all samples. `metrics`: that are wanted besides.
    `frozen`: the paths of variables that are not trained.
    """

    loss: Loss
    born: Program
    optimizer: optax.GradientTransformation
    batch: Any
    metrics: Sequence[str]
    frozen: frozenset[str]

    @property
    def frozen_leaves(self) -> frozenset[int]:
        """Which leaves of the parameters are not trained."""
        paths = [path for path, _ in named_leaves(self.born.out_specs.params, "params")]
        return frozenset(at for at, path in enumerate(paths) if path in self.frozen)

    @property
    def moved(self) -> Any:
        """Specs of the parameters, with None in place of what is not trained."""
        leaves, structure = jax.tree.flatten(self.born.out_specs.params)
        return structure.unflatten([None if at in self.frozen_leaves else leaf for at, leaf in enumerate(leaves)])

    def traced(self, microbatches: int) -> Program:
        """Returns the loss on a batch in so many pieces."""
        return traced_loss(self.loss, self.born.out_specs, self.batch, microbatches)


def _copied(leaf: jax.Array) -> jax.Array:
    """Returns a copy of what this process has a part of."""
    return jnp.copy(leaf) if leaf.addressable_shards else leaf


def make_pipelined(
    training: Training,
    mesh: Mesh,
    strategies: Mapping[str, Strategy],
    plan: Plan,
    *,
    compiler_options: Mapping[str, Any],
) -> PipelinedStep:
    """Makes a step of stages.

    **Arguments:** `plan`: with `microbatches`; one that has a pipeline is followed. `compiler_options`: as of
    `jax.jit`, for all programs of stages.

    **Raises:** `ArgumentError` or `SpecError` naming what does not fit, before anything is compiled.
    """
    _, born, optimizer, batch, metrics, _ = training
    traced, axis = training.traced, stages_axis(strategies)
    assert axis is not None, "there is a Pipeline"
    pipeline = strategies[axis]
    assert isinstance(pipeline, Pipeline), "it is the strategy of that axis"
    inner = {name: one for name, one in strategies.items() if name != axis}
    _check_inside(inner)
    axes, frozen = batch_axes(mesh, strategies), training.frozen_leaves
    if frozen and not pipeline.is_flushed:
        why = f"trainable is given, and schedule {pipeline.name!r} does not flush, which is not run yet"
        raise ArgumentError(f"{why}: take one that flushes, such as 1F1B")
    per = bytes_per_parameter(born.out_specs.params, optimizer, training.moved)
    processes = {device.process_index for device in mesh.devices.flat}
    agreement = Agreement([*processes]) if len(processes) > 1 else None
    given = plan
    once = all(isinstance(one.dense if isinstance(one, Hybrid) else one, DataParallel) for one in inner.values())
    setting = Setting(
        pipeline, traced, mesh, axis, axes, plan.microbatches, per, 1 if once else plan.microbatches, frozen
    )
    if plan.pipeline is None:
        found, schedule, planned = agreed_stages(setting, agreement)
        plan = with_stages(plan, planned)
    else:
        found, schedule, _ = replay_stages(plan.pipeline, setting)
    program = traced(plan.microbatches)
    replicas = found.replicas if max(found.replicas) > 1 else None  # of places, with one stage each
    over = axes if replicas is None else tuple(name for name in mesh.axis_names if name in (axis, *axes))
    inner = inner if mesh.size > mesh.shape[axis] else {}
    placing = Placing(inner, over, born.out_specs.params, optimizer, plan.microbatches, compiler_options, frozen)
    with without_mesh():
        run = Pipelined(
            program, found.stages, schedule, sub_meshes(mesh, axis, replicas), batch_axes=over,
            recompute=found.recompute, placing=placing, agreement=agreement,
        )  # fmt: skip
    plan = merged(plan, axis, run.plans) if run.plans else plan
    if given.pipeline is not None:
        _check_placements(given, plan)
    work = PipelinedWork(run, optimizer, born, mesh, wants_norm="grad_norm" in metrics)
    return PipelinedStep(work, training.loss, batch, mesh, plan, found, axes)


def _check_inside(inner: Mapping[str, Strategy]) -> None:
    """Checks what other axes are for. **Raises:** `ArgumentError`."""
    for axis, one in inner.items():
        if not isinstance(one, _INSIDE):
            raise ArgumentError(
                f"strategies[{axis!r}] is {one!r}, which is not run inside of stages yet: beside a Pipeline "
                f"expected one of {', '.join(one.__name__ for one in _INSIDE)}"
            )
        if isinstance(one, Hybrid) and (one.row_optimizers or one.out_of_range == "raise"):
            given = "row_optimizers" if one.row_optimizers else 'out_of_range="raise"'
            raise ArgumentError(f"strategies[{axis!r}] has {given}, which stages do not have yet: leave it out")


def _check_placements(given: Plan, made: Plan) -> None:
    """Checks that strategies make of stages what a given plan says. **Raises:** `ArgumentError`."""
    for one, other in zip(given.variables, made.variables, strict=True):
        if one.placements != other.placements:
            raise ArgumentError(
                f"plan has {one.path} as {', '.join(map(str, one.placements))}, and strategies make it "
                f"{', '.join(map(str, other.placements))}: give those that the plan was made with, or plan anew"
            )
