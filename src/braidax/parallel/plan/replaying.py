"""A plan that is given instead of made: does it fit the mesh and the model?"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import Mesh

from braidax.errors import ArgumentError
from braidax.program import named_leaves

from .model import Model
from .plan import Plan, layouts_of
from .planned.machine import DEVICES, PlannedMachine
from .strategy import refused

_MAX_NAMED = 3


def check_mesh(plan: Plan, mesh: Mesh) -> None:
    """Raises `ArgumentError` when a plan is of another mesh."""
    planned, given = {axis.name: axis.size for axis in plan.axes}, dict(mesh.shape)
    if list(planned.items()) != list(given.items()):
        raise ArgumentError(f"plan is for a mesh {planned}, and mesh is {given}: give that mesh, or plan anew")
    if strange := [axis for axis in plan.batch_axes if axis not in planned]:
        raise ArgumentError(f"plan splits the batch over {strange}, and its axes are {[*planned]}: plan anew")


def check_devices(plan: Plan, mesh: Mesh) -> None:
    """Raises `ArgumentError` naming what differs when a plan was made on other devices."""
    _check_machine(plan, mesh, only=DEVICES)


def check_plan(plan: Plan, mesh: Mesh, params: Any = None) -> None:
    """Checks that a plan was made for a model, a mesh and this machine, host included.

    `parallelize(plan=…)` checks all but the host, which knobs of loading are for.

    **Arguments:** `mesh`: to apply it on. `params`: a PyTree of arrays or `jax.ShapeDtypeStruct`; None: any model.

    **Raises:** `ArgumentError` naming all that differs.
    """
    check_mesh(plan, mesh)
    _check_machine(plan, mesh)
    if params is not None:
        check_variables(plan, dict(named_leaves(params, "params")))


def anywhere(plan: Plan) -> Plan:
    """Returns a plan that may be applied on any machine that has its mesh."""
    return replace(plan, knobs=replace(plan.knobs, machine=None))


def _check_machine(plan: Plan, mesh: Mesh, only: Collection[str] | None = None) -> None:
    if plan.knobs.machine is None:
        return
    found = plan.knobs.machine.differences(PlannedMachine.of(mesh))
    told = [words for name, words in found.items() if only is None or name in only]
    if told:
        raise ArgumentError(
            f"plan is of another machine: {'; '.join(told)}: plan anew, or take braidax.parallel.anywhere(plan), which "
            "fits any machine that has its mesh"
        )


def check_variables(plan: Plan, variables: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    """Raises `ArgumentError` naming the variables of a plan that a model does not have, or has otherwise."""
    planned = {one.path: (one.shape, one.dtype) for one in plan.variables}
    known = {path: (tuple(spec.shape), str(spec.dtype)) for path, spec in variables.items()}
    told = [f"{path} is in the plan, and not in the model" for path in planned if path not in known]
    told += [f"{path} is in the model, and not in the plan" for path in known if path not in planned]
    told += [
        f"{path} is {_form(planned[path])} in the plan, and {_form(known[path])} in the model"
        for path in planned
        if path in known and planned[path] != known[path]
    ]
    if told:
        more = f", and {len(told) - _MAX_NAMED} more" if len(told) > _MAX_NAMED else ""
        raise ArgumentError(f"plan is of another model: {'; '.join(told[:_MAX_NAMED])}{more}: plan anew")
    if list(planned) != list(known):
        raise ArgumentError("plan has the variables of the model in another order: leave it as to_json has written it")


def check_frozen(plan: Plan, frozen: Collection[str]) -> None:
    """Raises `ArgumentError` naming a variable that a plan freezes and `trainable` does not, or the other way round."""
    for variable in plan.variables:
        if variable.frozen != (variable.path in frozen):
            now, then = ("trained", "frozen") if variable.frozen else ("frozen", "trained")
            raise ArgumentError(
                f"trainable leaves {variable.path} {now}, and it is {then} in the plan: leave it out, or plan anew"
            )


def check_placements(plan: Plan, model: Model) -> None:
    """Raises `ArgumentError` naming a variable that cannot lie as a plan says."""
    for variable in plan.variables:
        if len(variable.placements) != len(plan.axes):
            raise ArgumentError(
                f"plan places {variable.path} on {len(variable.placements)} axes, expected {len(plan.axes)}"
            )
        for placement in variable.placements:
            if cannot := refused(placement, model, variable.path):
                raise ArgumentError(f"plan asks for {cannot}: plan anew")
    layouts_of(plan)


def _form(form: tuple[tuple[int, ...], str]) -> str:
    return f"{form[1]}{list(form[0])}"
