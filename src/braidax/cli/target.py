"""What `braidax plan --target` does: compiles a task's step for a machine, which need not be here."""

import json
import math
from collections.abc import Mapping

import typer

from braidax.cli.strategies import has_servers
from braidax.parallel import Step, Strategy
from braidax.program import HERE, find_target


def mesh_for(target: str, axes: Mapping[str, int] | None) -> Mapping[str, int] | None:
    """Returns the axes of a mesh of a machine's devices; where none are given, one axis `data` over all.

    Those of what is here stay as they are: no devices are there before it is known how many.

    **Raises:** `typer.BadParameter` where a mesh has another number; otherwise as `find_target`.
    """
    if target == HERE:
        return axes
    count = len(find_target(target).devices)
    if axes is not None and math.prod(axes.values()) != count:
        raise typer.BadParameter(
            f"it has {math.prod(axes.values())} devices, and --target {target} has {count}; give a mesh of {count}",
            param_hint="--mesh",
        )
    return {"data": count} if axes is None else axes


def check_target(strategies: Mapping[str, Strategy] | None, target: str | None) -> None:
    """Raises `typer.BadParameter` where a machine is asked about a step that has servers."""
    if target is not None and has_servers(strategies):
        raise typer.BadParameter(
            f"{target} is asked for with --strategy servers, whose rows come from processes that no compiler sees: "
            f"expected hybrid",
            param_hint="--target",
        )


def tell(step: Step, target: str, *, as_json: bool) -> None:
    """Prints the plan of a step, and what the compiler of a machine says of it; as one JSON object where asked.

    What is compiled is what `fit` runs there: where rows of tables are fetched ahead, updates that know what comes.
    """
    first, *_ = step.mesh.devices.flat if target == HERE else find_target(target).devices
    is_told = step.fetches_ahead and first.platform != "cpu"
    compiled = step.compile_for(target, coming="known" if is_told else "unknown")
    if as_json:
        typer.echo(json.dumps({"plan": json.loads(step.plan.to_json()), "compiled": json.loads(compiled.to_json())}))
    else:
        typer.echo(f"{step.plan}\n\n{compiled}")
