"""What constructors take, by the knobs of a plan."""

from typing import Any

from braidax.checkpoint import Adaptive, Every
from braidax.data import Knobs
from braidax.parallel import Plan
from braidax.parallel.plan.planned.knobs import PlannedKnobs


def loader_options(knobs: PlannedKnobs) -> dict[str, Any]:
    """Returns what `DataLoader` takes: `DataLoader(source, mesh, specs, **loader_options(knobs))`."""
    of = knobs.loading
    made = Knobs(
        threads=of.threads,
        prefetch=of.prefetch,
        max_bytes=of.max_bytes,
        hedge_seconds=of.hedge_seconds,
        read_bytes=of.read_bytes,
    )
    return {"knobs": made, "workers": of.workers}


def checkpointer_options(knobs: PlannedKnobs) -> dict[str, Any]:
    """Returns what `Checkpointer` takes: `Checkpointer(path, **checkpointer_options(knobs))`.

    `snapshot` and `limit_bytes_per_second` are set on it afterwards, as `apply_knobs` does.
    """
    of = knobs.checkpointing
    adaptive = Adaptive(of.overhead, of.max_lost_seconds, of.mtbf_seconds)
    return {"interval": adaptive if of.every is None else Every(of.every)}


def parallelize_options(plan: Plan) -> dict[str, Any]:
    """Returns what `parallelize` takes: `parallelize(loss_fn, optimizer, mesh, **parallelize_options(plan), …)`.

    That is the plan, and where it has stages the `Pipeline` that they are run by. What no plan holds is up to you: row
    optimizers, servers, and the strategies of axes beside a pipeline's.
    """
    if plan.pipeline is None:
        return {"plan": plan}
    from braidax.parallel import Pipeline  # with all that it needs

    return {"plan": plan, "strategies": {plan.pipeline.axis: Pipeline(plan.pipeline.parsed())}}


def fit_options(knobs: PlannedKnobs) -> dict[str, Any]:
    """Returns what `fit` takes: `fit(step, state, loader, **fit_options(knobs))`."""
    return {"coming": knobs.computing.coming}
