"""`parallelize`: single-device code and a mesh in, a training step out."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, overload

import jax
import optax
from jax.sharding import Mesh

from braidax.errors import ArgumentError
from braidax.program import named_leaves, specs_of

from .compiler_options import CompilerOptions, compiler_options, options_of_plan
from .compute.work import GRAD_NORM, Work
from .given.dim_names import Rules
from .given.initial import trace_init, traced_loss
from .given.loss import Loss
from .given.trainable import Trainable, check_trainable, frozen_by
from .named_dims import named_strategies
from .plan.batch import batch_axes, shard_batch
from .plan.footprint import with_sent
from .plan.parameter_servers import ParameterServers, over_rows, parameter_servers
from .plan.plan import Plan, make_plan
from .plan.replanning import tables_of
from .plan.replaying import check_devices, check_frozen, check_mesh, check_placements, check_variables
from .plan.strategies import Hybrid
from .plan.strategy import Strategy, check_strategies, stages_axis
from .rows.read_rows import ReadRows
from .served.feed import ServedFeed, is_served
from .step import Step
from .train_step import TrainStep

if TYPE_CHECKING:
    from braidax.gang import Gang

    from .served.meetings.meeting import Meeting


@overload
def parallelize(
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    mesh: Mesh | None = None,
    strategies: Mapping[str, Strategy] | None = None,
    *,
    init: Callable[..., Any],
    batch: Any,
    microbatches: int = 1,
    plan: Plan | None = None,
    trainable: Trainable = None,
    metrics: Collection[str] = (),
    compiler_options: Mapping[str, Any] | None = None,
    rules: Rules | None = None,
    servers: "Gang | Meeting | None" = None,
) -> Step: ...


@overload
def parallelize(
    loss_fn: Mesh,
    optimizer: Mapping[str, Strategy],
    /,
    *,
    batch: Sequence[str] | None = None,
    microbatches: int = 1,
    compiler_options: Mapping[str, Any] | None = None,
    rules: Rules | None = None,
) -> Callable[[Callable[..., Any]], TrainStep]: ...


def parallelize(
    loss_fn: Any,
    optimizer: Any,
    mesh: Any = None,
    strategies: Any = None,
    *,
    init: Any = None,
    batch: Any = None,
    microbatches: int = 1,
    plan: Plan | None = None,
    trainable: Trainable = None,
    metrics: Collection[str] = (),
    compiler_options: Mapping[str, Any] | None = None,
    rules: Rules | None = None,
    servers: "Gang | Meeting | None" = None,
) -> Any:
    """Turns single-device code into a training step on a mesh.

    **Arguments:** `loss_fn`: `loss_fn(params, batch) -> loss` or `(loss, aux dict)`, written for one device and the
    whole batch. It may ask by name for `key` (one PRNG key a step), `variables` (mutable collections, new ones
    returned as `aux["variables"]`) and `train` (a bool, False in `evaluate`). `optimizer`: from optax; extra
    arguments that it takes are `value`, the loss, and `grad`. `mesh`: any `jax.sharding.Mesh`, with explicit axes or
    not; None: that of `jax.set_mesh`. `strategies`: what each mesh axis is for, such as
    `{"data": bx.DataParallel()}`; over an axis without one everything is replicated. `init`: `init(key) -> params`,
    or `(params, variables)` when the loss asks for them. `batch`: a PyTree of `jax.ShapeDtypeStruct` `[batch, …]`.
    `microbatches`: how many equal pieces of the batch gradients and metrics are averaged over (those along samples are
    put together); sample `i` is in piece `i % microbatches`. `plan`: built as it is instead of planning anew, such as
    `Plan.from_json(text)`, for this model and these devices; of `strategies` then counts only what no plan holds: row
    optimizers, counts of rows, `out_of_range`, other `combine_bytes`. `trainable`: a pattern of variables' paths
    (`fnmatch`), several, or a PyTree of bools like the parameters; all others are frozen: they have no gradient, and
    the optimizer is not shown them. `metrics`: more of them, by name: `"grad_norm"`, the global norm of all gradients.
    `compiler_options`: of `jax.jit`, for gradients and apply, or for all programs of
    stages; one that is a dict holds those of a platform, such as `{"tpu": {…}}`. `rules`: which mesh axes the logical
    names of dims stand for that Flax keeps with parameters, as a dict or as pairs, such as `{"mlp": "model", "embed":
    None}`; names that are axes of the mesh need none. What names ask for is honored like an override. `servers`: a gang
    that runs, whose ranks have the tables of `Hybrid(tables="servers")` in their host memory, or all variables of
    `ParameterServers`; None in all processes but the first, and for the servers of `braidax launch --servers`. Workers
    of `ParameterServers`, which each have a JAX of their own, are given `meeting.of_worker(number)` in place of it.

    As a decorator, `@parallelize(mesh, strategies)` takes a whole `train_step(state, batch) -> (state, metrics)`
    instead, and gives a `TrainStep`. It may have more parameters: `batch=("x", "y")` names those that are samples;
    of a step that changes objects of Flax NNX they are those that hold none. With `microbatches` its gradients are
    averages over these, what else the losses compute as above, and the rest of the step sees the whole batch. Names of
    dims are those that the state keeps.

    **Returns:** a `Step`; with a `Pipeline` among the strategies a `PipelinedStep`, with tables on servers a
    `ServedStep`, with `ParameterServers` a `WorkerStep`, to be closed. Nothing has been trained yet.
    **Raises:** `ArgumentError`, `SpecError` or `StateError` naming what does not fit.
    """
    from .compute.heap import keep_heaps  # which whoever only imports braidax does without

    if isinstance(loss_fn, Mesh):
        if any(given is not None for given in (mesh, strategies, init, plan)):
            raise ArgumentError(
                "parallelize was given a mesh first and more than strategies behind it: as a decorator it is "
                "@bx.parallelize(mesh, strategies), with a loss it is "
                "bx.parallelize(loss_fn, optimizer, mesh, strategies, init=…, batch=…)"
            )
        if trainable is not None or metrics:
            given = "trainable" if trainable is not None else "metrics"
            raise ArgumentError(
                f"parallelize was given {given} as a decorator, which a whole step says itself: differentiate by what "
                f"is trained, and return what is measured"
            )
        over, roles = loss_fn, optimizer
        check_strategies(over, roles)
        _check_decorator(roles, servers)
        _check_microbatches(microbatches)
        keep_heaps(over)
        options = {"microbatches": microbatches, "compiler_options": compiler_options, "rules": rules}
        return partial(TrainStep, mesh=over, strategies=roles, batch=batch, **options)
    strategies = {} if strategies is None and plan is not None else strategies
    for name, value in {"strategies": strategies, "init": init, "batch": batch}.items():
        if value is None:
            raise ArgumentError(
                f"parallelize is missing {name}: bx.parallelize(loss_fn, optimizer, mesh, strategies, init=…, batch=…)"
            )
    if plan is not None and microbatches not in (1, plan.microbatches):
        raise ArgumentError(
            f"microbatches is {microbatches}, and plan has {plan.microbatches}: leave it out, or plan anew"
        )
    pieces = microbatches if plan is None else plan.microbatches
    mesh, more = (
        _context_mesh() if mesh is None else mesh,
        (trainable, tuple(metrics), compiler_options, rules, servers),
    )
    given = _Given(Loss(loss_fn), optimizer, mesh, strategies, init, batch, pieces, *more)
    if plan is not None:
        check_mesh(plan, mesh)
        check_devices(plan, mesh)
    keep_heaps(mesh)
    return given.step(plan) if stages_axis(strategies) is None else given.pipelined_step(plan)


def _check_decorator(strategies: Mapping[str, Strategy], servers: Any) -> None:
    """Raises `ArgumentError` for what a decorated step, which keeps its whole state itself, cannot have."""
    loss_itself = "give the loss itself, bx.parallelize(loss_fn, optimizer, mesh, strategies, init=…, batch=…)"
    if stages_axis(strategies) is not None:
        raise ArgumentError(f"strategies has a Pipeline, and a decorated step is not cut into stages: {loss_itself}")
    if parameter_servers(strategies) is not None:
        raise ArgumentError(
            f"strategies has ParameterServers, and a decorated step keeps its variables in its own state: {loss_itself}"
        )
    if servers is not None:
        raise ArgumentError(
            f"servers was given, and a decorated step keeps its variables in its own state: {loss_itself}"
        )


@dataclass(frozen=True)
class _Given:
    """What `parallelize` was given with a loss, of which a step is made by any plan."""

    loss: Loss
    optimizer: Any
    mesh: Mesh
    strategies: Mapping[str, Strategy]
    init: Any
    batch: Any
    microbatches: int
    trainable: Trainable
    metrics: tuple[str, ...]
    compiler_options: Mapping[str, Any] | None
    rules: Rules | None
    servers: "Gang | Meeting | None"

    def __post_init__(self) -> None:
        if not hasattr(self.optimizer, "init") or not hasattr(self.optimizer, "update"):
            raise ArgumentError(f"optimizer is {self.optimizer!r}, expected one from optax, such as optax.adamw(1e-3)")
        if not isinstance(self.mesh, Mesh):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ArgumentError(f"mesh is {self.mesh!r}, expected what jax.make_mesh(shape, names) returns")
        check_strategies(self.mesh, self.strategies)
        _check_microbatches(self.microbatches)
        if strange := [name for name in self.metrics if name != GRAD_NORM]:
            raise ArgumentError(
                f"metrics names {strange}, expected {GRAD_NORM!r}; others are returned by the loss as aux"
            )

    def step(self, plan: Plan | None) -> Any:
        """Makes a step by a plan, or by one that strategies make."""
        if plan is not None:
            check_mesh(plan, self.mesh)
            if plan.pipeline is not None:
                raise ArgumentError(
                    f"plan has a pipeline along {plan.pipeline.axis!r}, and strategies has none: give "
                    f"strategies={{{plan.pipeline.axis!r}: bx.parallel.Pipeline(), …}} with it"
                )
        axes = batch_axes(self.mesh, self.strategies) if plan is None else plan.batch_axes
        shardings = shard_batch(self.mesh, axes, specs_of(self.batch), microbatches=self.microbatches)
        work = self._work(plan, axes)
        options = compiler_options(self.mesh, work.plan, self.strategies, self.compiler_options)
        if (apart := parameter_servers(self.strategies)) is not None:
            return self._worker_step(work, apart, shardings, options)
        if isinstance(work.feed, ServedFeed):
            return self._served_step(work, work.feed, shardings, options)
        return Step(
            work,
            specs_of(self.batch),
            shardings,
            compiler_options=options,
            replanned=self._replanned,
            rekeyed=lambda key: self._work(work.plan, axes, key),
            elsewhere=lambda mesh: replace(self, mesh=mesh).step(work.plan),
        )

    def _worker_step(self, work: Work, strategy: ParameterServers, shardings: Any, options: CompilerOptions) -> Any:
        """Makes a step all of whose variables are on servers."""
        from .served.meetings.launched import launched_servers  # with gangs, which others do without
        from .workers.step import WorkerStep

        if self.servers is None and not launched_servers():
            raise ArgumentError(
                "strategies has ParameterServers, and servers is None: give parallelize a gang, with "
                "bx.gang.LocalGang(2) as gang: bx.parallelize(…, servers=gang), or, to one of several workers, "
                "servers=meeting.of_worker(number), of bx.parallel.open_meeting(gang, workers=…); or start the program "
                "by braidax launch --servers 2 --initialize nothing"
            )
        born = trace_init(self.init, self.loss)
        return WorkerStep(
            work,
            born,
            specs_of(self.batch),
            strategy,
            self.servers,
            batch_shardings=shardings,
            compiler_options=options,
        )

    def _served_step(self, work: Work, feed: ServedFeed, shardings: Any, options: CompilerOptions) -> Any:
        """Makes a step whose tables are on servers."""
        from .served.meetings.launched import launched_servers  # with gangs, which others do without
        from .served.meetings.meeting import Meeting
        from .served.step import ServedStep

        if self.servers is None and jax.process_index() == 0 and not launched_servers():
            raise ArgumentError(
                f"plan has {[*feed.tables]} on servers, and servers is None: give parallelize the gang whose ranks "
                f"have them, with bx.gang.LocalGang(2) as gang: bx.parallelize(…, servers=gang), or start the program "
                f"by braidax launch --servers 2"
            )
        if isinstance(self.servers, Meeting):
            raise ArgumentError(
                "servers is a meeting, for workers of ParameterServers that each have a JAX of their own: expected the "
                'gang itself with Hybrid(tables="servers"), in the first process'
            )
        born = trace_init(self.init, self.loss)
        return ServedStep(
            work, feed, born, specs_of(self.batch), self.servers, batch_shardings=shardings, compiler_options=options
        )

    def pipelined_step(self, plan: Plan | None) -> Any:
        """Makes a step whose loss lies in stages. **Raises:** `ArgumentError` for what is not run in stages yet."""
        # With all that it needs: who has no pipeline does not wait for it.
        from .pipelined_step import Training, make_pipelined

        if self.rules is not None:
            raise ArgumentError("rules is given with a Pipeline, which does not take it yet: leave it out")
        mesh, batch = self.mesh, specs_of(self.batch)
        if plan is not None:
            check_mesh(plan, mesh)
            if plan.pipeline is None:
                raise ArgumentError("plan has no pipeline, and strategies has one: leave either out, or plan anew")
        axes = batch_axes(mesh, self.strategies)
        shard_batch(mesh, axes, batch, microbatches=self.microbatches)
        born = trace_init(self.init, self.loss)
        frozen = self._frozen(plan, born.out_specs.params)
        training = Training(self.loss, born, self.optimizer, batch, self.metrics, frozen)
        if plan is None:
            rows = ReadRows(
                training.traced(self.microbatches), self.optimizer, self.strategies, self.microbatches, frozen
            )
            model = rows.model(math.prod(mesh.shape[axis] for axis in axes), axes)
            plan = make_plan(mesh, self.strategies, model)
        else:
            check_variables(plan, dict(named_leaves(born.out_specs.params, "params")))
        if served := [one.path for one in plan.variables if is_served(one)]:
            raise ArgumentError(
                f"plan has {served}, tables on servers, and a Pipeline, which does not take them yet: expected "
                f'Hybrid(tables="rows")'
            )
        options = compiler_options(mesh, plan, self.strategies, self.compiler_options).gradients
        return make_pipelined(training, mesh, self.strategies, plan, compiler_options=options)

    def _work(self, plan: Plan | None, axes: tuple[str, ...], key: jax.ShapeDtypeStruct | None = None) -> Work:
        """Makes what a step computes. **Arguments:** `axes`: of the batch. `key`: as of `trace_init`."""
        mesh, strategies, batch = self.mesh, self.strategies, specs_of(self.batch)
        born = trace_init(self.init, self.loss, key)
        if plan is not None:
            check_variables(plan, dict(named_leaves(born.out_specs.params, "params")))
        frozen = self._frozen(plan, born.out_specs.params)
        program = traced_loss(self.loss, born.out_specs, batch, self.microbatches, mesh)
        rows = ReadRows(program, self.optimizer, over_rows(strategies), self.microbatches, frozen)
        model = rows.model(math.prod(mesh.shape[axis] for axis in axes), axes)
        if plan is None:
            plan = make_plan(mesh, named_strategies(strategies, born.out_specs.params, self.rules, mesh), model)
        else:
            check_placements(plan, model)
        plan = replace(with_sent(plan, model), compiler_options=options_of_plan(plan, mesh, model))
        feed = rows.feed(mesh, plan) if tables_of(plan) else None
        if served := [one.path for one in plan.variables if is_served(one)]:
            if feed is not None:
                raise ArgumentError(
                    f"plan has {served} on servers and {list(tables_of(plan))} by rows on devices: expected all tables "
                    f"in one place; say which by Hybrid(tables=…) and overrides"
                )
            feed = rows.served_feed(mesh, plan, wants_norm=GRAD_NORM in self.metrics)
        return Work(self.loss, self.optimizer, born, program, mesh, plan, feed, metrics=self.metrics)

    def _frozen(self, plan: Plan | None, params: Any) -> frozenset[str]:
        """Returns the paths of the variables that are not trained."""
        frozen = frozen_by(self.trainable, params)
        if plan is not None and self.trainable is None:
            frozen = frozenset(one.path for one in plan.variables if one.frozen)
        if plan is not None:
            check_frozen(plan, frozen)
        check_trainable(params, frozen)
        return frozen

    def _replanned(self, plan: Plan) -> Step:
        """Makes a step by another plan, for which rows were not counted."""
        strategies: dict[str, Strategy] = {
            axis: replace(strategy, touched={}) if isinstance(strategy, Hybrid) else strategy
            for axis, strategy in self.strategies.items()
        }
        return replace(self, strategies=strategies).step(plan)


def _check_microbatches(microbatches: int) -> None:
    if microbatches < 1:
        raise ArgumentError(f"microbatches is {microbatches}, expected a whole number of at least 1")


def _context_mesh() -> Mesh:
    """Returns the mesh that `jax.set_mesh` has set."""
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        raise ArgumentError(
            "mesh is None, and no mesh is set: give mesh=jax.make_mesh(shape, names), or call parallelize under "
            "jax.set_mesh(mesh)"
        )
    return mesh
