"""`parallelize`: single-device code and a mesh in, a training step out."""

import math
from collections.abc import Callable, Mapping
from typing import Any, overload

import optax
from jax.sharding import Mesh

from braidax.errors import ArgumentError
from braidax.program import specs_of

from .compute.work import Work, traced_loss
from .given.initial import trace_init
from .given.loss import Loss
from .plan.batch import batch_axes, shard_batch
from .plan.plan import make_plan
from .plan.replanning import Tables, strategies_for, tables_of
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
    strategies: Mapping[str, Strategy],
    *,
    init: Callable[..., Any],
    batch: Any,
    microbatches: int = 1,
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
) -> Any:
    """Turns single-device code into a training step on a mesh.

    **Arguments:** `loss_fn`: `loss_fn(params, batch) -> loss` or `(loss, aux dict)`, written for one device and the
    whole batch. It may ask by name for `key` (one PRNG key a step), `variables` (mutable collections, new ones
    returned as `aux["variables"]`) and `train` (a bool, False in `evaluate`). `optimizer`: from optax. `mesh`: any
    `jax.sharding.Mesh`, with explicit axes or not. `strategies`: what each mesh axis is for, such as
    `{"data": bx.DataParallel()}`; over an axis without one everything is replicated. `init`: `init(key) -> params`,
    or `(params, variables)` when the loss asks for them. `batch`: a PyTree of `jax.ShapeDtypeStruct` `[batch, …]`.
    `microbatches`: how many equal pieces of the batch gradients and metrics are averaged over; sample `i` is in piece
    `i % microbatches`.

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
    for name, value in {"mesh": mesh, "strategies": strategies, "init": init, "batch": batch}.items():
        if value is None:
            raise ArgumentError(
                f"parallelize is missing {name}: bx.parallelize(loss_fn, optimizer, mesh, strategies, init=…, batch=…)"
            )
    return _parallelize_loss(Loss(loss_fn), optimizer, mesh, strategies, init, batch, microbatches)


def _parallelize_loss(
    loss: Loss, optimizer: Any, mesh: Mesh, strategies: Mapping[str, Strategy], init: Any, batch: Any, microbatches: int
) -> Step:
    if not hasattr(optimizer, "init") or not hasattr(optimizer, "update"):
        raise ArgumentError(f"optimizer is {optimizer!r}, expected one from optax, such as optax.adamw(1e-3)")
    if not isinstance(mesh, Mesh):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError(f"mesh is {mesh!r}, expected what jax.make_mesh(shape, names) returns")
    check_strategies(mesh, strategies)
    if microbatches < 1:
        raise ArgumentError(f"microbatches is {microbatches}, expected a whole number of at least 1")
    batch = specs_of(batch)
    batch_shardings = shard_batch(mesh, batch_axes(mesh, strategies), batch, microbatches=microbatches)

    def replanned(tables: Tables) -> Step:
        told = strategies_for(strategies, tables)
        return _parallelize_loss(loss, optimizer, mesh, told, init, batch, microbatches)

    options_of_step: dict[str, Any] = {"compiler_options": _compiler_options(strategies), "replanned": replanned}
    born = trace_init(init, loss)
    program = traced_loss(loss, born.out_specs, batch, microbatches)
    rows = ReadRows(program, optimizer, strategies, microbatches)
    model = rows.model(math.prod(mesh.shape[axis] for axis in batch_axes(mesh, strategies)))
    plan = make_plan(mesh, strategies, model)
    feed = rows.feed(mesh, plan) if tables_of(plan) else None
    work = Work(loss, optimizer, born, program, mesh, plan, feed)
    return Step(work, mesh, plan, batch, batch_shardings, **options_of_step)


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
