"""Options of the compiler for the two programs of a step."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jax.sharding import Mesh

from .plan.compiling import CompilerOption, options_that_hide, sizes_of
from .plan.model import Model
from .plan.plan import Plan, asked_combine_bytes, layouts_of
from .plan.strategy import Strategy


class CompilerOptions(NamedTuple):
    """Options of `jax.jit` for the two programs of a step."""

    gradients: Mapping[str, Any] = {}
    apply: Mapping[str, Any] = {}


def options_of_plan(plan: Plan, mesh: Mesh, model: Model) -> tuple[CompilerOption, ...]:
    """Returns the options that hide what a plan sends, on the devices of a mesh.

    **Arguments:** `model`: that the plan was made for.
    """
    device, layouts = mesh.devices.flat[0], layouts_of(plan)
    if device.platform == "cpu":
        return ()
    by_path = {one.path: layout for one, layout in zip(plan.variables, layouts, strict=True)}
    gathered = {path: layout for path, layout in by_path.items() if layout.gathered}
    whole = {path: layout for path, layout in by_path.items() if not layout.moving and not layout.by_rows}
    sizes = [(layout, one.num_bytes) for layout, one in zip(layouts, plan.variables, strict=True)]
    sizes_of_both = sizes_of(gathered, model.sites), sizes_of(whole, model.sites)
    return options_that_hide(device.platform, sizes, *sizes_of_both, device_kind=device.device_kind)


def compiler_options(
    mesh: Mesh, plan: Plan, strategies: Mapping[str, Strategy], given: Mapping[str, Any] | None
) -> CompilerOptions:
    """Returns the options of the compiler: those that a plan and strategies ask for, and what the user gives.

    Strategies prevail over the knobs of a plan.

    **Arguments:** `given`: as of `parallelize`. **Raises:** `ArgumentError` where strategies ask for different ones.
    """
    asked = asked_combine_bytes(strategies)
    asked = plan.knobs.computing.combine_bytes if asked is None else asked
    platform, both = mesh.devices.flat[0].platform, dict[str, Any]()
    for name, value in (given or {}).items():
        if not isinstance(value, Mapping):
            both[name] = value
        elif name == platform or (platform, name) == ("gpu", "cuda"):
            both |= value
    own = {"xla_gpu_all_reduce_combine_threshold_bytes": asked} if asked is not None else {}
    hiding = {one.name: one.value for one in plan.compiler_options}
    return CompilerOptions({**hiding, **own, **both}, both)
