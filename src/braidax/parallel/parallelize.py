"""`parallelize`: single-device code and a mesh in, a training step out."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, overload

import optax
from jax.sharding import Mesh

from braidax.errors import ArgumentError
from braidax.program import named_leaves, specs_of

from .compute.work import Work, traced_loss
from .given.initial import trace_init
from .given.loss import Loss
from .plan.batch import batch_axes, shard_batch
from .plan.plan import Plan, make_plan
from .plan.replanning import tables_of
from .plan.replaying import check_mesh, check_placements, check_variables
from .plan.strategies import DataParallel, Hybrid
from .plan.strategy import Strategy, check_strategies
from .rows.read_rows import ReadRows
from .step import Step
from .train_step import TrainStep


@overload
def parallelize(
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    strategies: Mapping[str, Strategy] | None = None,
    *,
    init: Callable[..., Any],
    batch: Any,
    microbatches: int = 1,
    plan: Plan | None = None,
) -> Step: ...


@overload
def parallelize(
    loss_fn: Mesh, optimizer: Mapping[str, Strategy], /
) -> Callable[[Callable[[Any, Any], tuple[Any, Any]]], TrainStep]: ...


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
) -> Any:
    """Turns single-device code into a training step on a mesh.

    **Arguments:** `loss_fn`: `loss_fn(params, batch) -> loss` or `(loss, aux dict)`, written for one device and the
    whole batch. It may ask by name for `key` (one PRNG key a step), `variables` (mutable collections, new ones
    returned as `aux["variables"]`) and `train` (a bool, False in `evaluate`). `optimizer`: from optax. `mesh`: any
    `jax.sharding.Mesh`, with explicit axes or not. `strategies`: what each mesh axis is for, such as
    `{"data": bx.DataParallel()}`; over an axis without one everything is replicated. `init`: `init(key) -> params`,
    or `(params, variables)` when the loss asks for them. `batch`: a PyTree of `jax.ShapeDtypeStruct` `[batch, …]`.
    `microbatches`: how many equal pieces of the batch gradients and metrics are averaged over (those along samples are
    put together); sample `i` is in piece `i % microbatches`. `plan`: built as it is instead of planning anew, such as
    `Plan.from_json(text)`; of `strategies` then counts only what no plan holds: row optimizers, counts of rows,
    `out_of_range`, `combine_bytes`.

    As a decorator, `@parallelize(mesh, strategies)` takes a whole `train_step(state, batch) -> (state, metrics)`
    instead, its gradients taken by `bx.value_and_grad`, and gives a `TrainStep`.

    **Returns:** a `Step`; nothing has been computed yet. **Raises:** `ArgumentError`, `SpecError` or `StateError`
    naming what does not fit.
    """
    if isinstance(loss_fn, Mesh):
        if mesh is not None or strategies is not None:
            raise ArgumentError(
                "parallelize was given a mesh first and more than strategies behind it: as a decorator it is "
                "@bx.parallelize(mesh, strategies), with a loss it is "
                "bx.parallelize(loss_fn, optimizer, mesh, strategies, init=…, batch=…)"
            )
        over, roles = loss_fn, optimizer
        check_strategies(over, roles)
        return lambda train_step: TrainStep(train_step, over, roles)  # pyright: ignore[reportUnknownLambdaType]
    strategies = {} if strategies is None and plan is not None else strategies
    for name, value in {"mesh": mesh, "strategies": strategies, "init": init, "batch": batch}.items():
        if value is None:
            raise ArgumentError(
                f"parallelize is missing {name}: bx.parallelize(loss_fn, optimizer, mesh, strategies, init=…, batch=…)"
            )
    if plan is not None and microbatches not in (1, plan.microbatches):
        raise ArgumentError(
            f"microbatches is {microbatches}, and plan has {plan.microbatches}: leave it out, or plan anew"
        )
    pieces = microbatches if plan is None else plan.microbatches
    return _Given(Loss(loss_fn), optimizer, mesh, strategies, init, batch, pieces).step(plan)


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

    def __post_init__(self) -> None:
        if not hasattr(self.optimizer, "init") or not hasattr(self.optimizer, "update"):
            raise ArgumentError(f"optimizer is {self.optimizer!r}, expected one from optax, such as optax.adamw(1e-3)")
        if not isinstance(self.mesh, Mesh):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ArgumentError(f"mesh is {self.mesh!r}, expected what jax.make_mesh(shape, names) returns")
        check_strategies(self.mesh, self.strategies)
        if self.microbatches < 1:
            raise ArgumentError(f"microbatches is {self.microbatches}, expected a whole number of at least 1")

    def step(self, plan: Plan | None) -> Step:
        """Makes a step by a plan, or by one that strategies make."""
        mesh, strategies = self.mesh, self.strategies
        if plan is not None:
            check_mesh(plan, mesh)
        batch, axes = specs_of(self.batch), batch_axes(mesh, strategies) if plan is None else plan.batch_axes
        batch_shardings = shard_batch(mesh, axes, batch, microbatches=self.microbatches)
        options = _compiler_options(strategies)
        born = trace_init(self.init, self.loss)
        if plan is not None:
            check_variables(plan, dict(named_leaves(born.out_specs.params, "params")))
        program = traced_loss(self.loss, born.out_specs, batch, self.microbatches)
        rows = ReadRows(program, self.optimizer, strategies, self.microbatches)
        model = rows.model(math.prod(mesh.shape[axis] for axis in axes))
        if plan is None:
            plan = make_plan(mesh, strategies, model)
        else:
            check_placements(plan, model)
        feed = rows.feed(mesh, plan) if tables_of(plan) else None
        work = Work(self.loss, self.optimizer, born, program, mesh, plan, feed)
        return Step(work, mesh, plan, batch, batch_shardings, compiler_options=options, replanned=self._replanned)

    def _replanned(self, plan: Plan) -> Step:
        """Makes a step by another plan, for which rows were not counted."""
        strategies: dict[str, Strategy] = {
            axis: replace(strategy, touched={}) if isinstance(strategy, Hybrid) else strategy
            for axis, strategy in self.strategies.items()
        }
        return replace(self, strategies=strategies).step(plan)


def _compiler_options(strategies: Mapping[str, Strategy]) -> dict[str, Any]:
    """Returns the options of the compiler that strategies ask for, for the gradients."""
    asked = {
        strategy.combine_bytes
        for strategy in strategies.values()
        if isinstance(strategy, DataParallel | Hybrid) and strategy.combine_bytes is not None
    }
    if len(asked) > 1:
        raise ArgumentError(f"combine_bytes is {sorted(asked)}: expected the same in all strategies, or said once")
    return {"xla_gpu_all_reduce_combine_threshold_bytes": asked.pop()} if asked else {}
