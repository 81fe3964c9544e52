"""Options of the compiler for the two programs of a step."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jax.sharding import Mesh

from braidax.errors import ArgumentError

from .plan.compiling import CompilerOption, options_that_hide, sizes_of
from .plan.model import Model
from .plan.plan import Plan, layouts_of
from .plan.strategies import DataParallel, Hybrid
from .plan.strategy import Strategy


class CompilerOptions(NamedTuple):
    """Options of `jax.jit` for the two programs of a step."""

    gradients: Mapping[str, Any] = {}
    apply: Mapping[str, Any] = {}


def options_of_plan(plan: Plan, mesh: Mesh, model: Model) -> tuple[CompilerOption, ...]:
    """Returns the options that hide what a plan sends, on the devices of a mesh.

    **Arguments:** `model`: that the plan was made for.
    """
    platform, layouts = mesh.devices.flat[0].platform, layouts_of(plan)
    if platform == "cpu":
        return ()
    by_path = {one.path: layout for one, layout in zip(plan.variables, layouts, strict=True)}
    gathered = {path: layout for path, layout in by_path.items() if layout.gathered}
    whole = {path: layout for path, layout in by_path.items() if not layout.moving and not layout.by_rows}
    sizes = [(layout, one.num_bytes) for layout, one in zip(layouts, plan.variables, strict=True)]
    return options_that_hide(platform, sizes, sizes_of(gathered, model.sites), sizes_of(whole, model.sites))


def compiler_options(
    mesh: Mesh, plan: Plan, strategies: Mapping[str, Strategy], given: Mapping[str, Any] | None
) -> CompilerOptions:
    """Returns the options of the compiler: those that a plan and strategies ask for, and what the user gives.

    **Arguments:** `given`: as of `parallelize`. **Raises:** `ArgumentError` where strategies ask for different ones.
    """
    asked = {
        strategy.combine_bytes
        for strategy in strategies.values()
        if isinstance(strategy, DataParallel | Hybrid) and strategy.combine_bytes is not None
    }
    if len(asked) > 1:
        raise ArgumentError(f"combine_bytes is {sorted(asked)}: expected the same in all strategies, or said once")
    platform, both = mesh.devices.flat[0].platform, dict[str, Any]()
    for name, value in (given or {}).items():
        if not isinstance(value, Mapping):
            both[name] = value
        elif name == platform or (platform, name) == ("gpu", "cuda"):
            both |= value
    own = {"xla_gpu_all_reduce_combine_threshold_bytes": asked.pop()} if asked else {}
    hiding = {one.name: one.value for one in plan.compiler_options}
    return CompilerOptions({**hiding, **own, **both}, both)
