"""Variables of a loss in stages: each lies where it changes."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from braidax.errors import ArgumentError
from braidax.parallel.stages.schedules import Kind, Schedule
from braidax.program import Program, Stage, named_leaves

_VARIABLES = 1


class Carried(NamedTuple):
    """Of a leaf of the variables, the `stage` that keeps it, and which of its results is the new one, if it changes."""

    stage: int
    result: int | None


def check_variables(program: Program, stages: Sequence[Stage], schedule: Schedule) -> list[Carried]:
    """Returns where each leaf of the variables lies.

    **Raises:** `ArgumentError` where a stage reads what another one changes with each microbatch, and where a stage
    that changes some takes microbatches in another order than training on one device.
    """
    names = [name for name, _ in named_leaves(program.in_specs[_VARIABLES], "variables")]
    first = len(jax.tree.leaves(program.in_specs[0]))
    _, (metrics, _) = program.out_specs
    new = 1 + len(jax.tree.leaves(metrics))
    jaxpr, found = program.closed.jaxpr, list[Carried]()
    for at, name in enumerate(names):
        readers = [
            number
            for number, stage in enumerate(stages)
            if any(leaf.argument == _VARIABLES and leaf.number == first + at for leaf in stage.leaves)
        ]
        if jaxpr.outvars[new + at] is jaxpr.invars[first + at]:
            found.append(Carried(min(readers, default=0), None))
            continue
        maker = next(number for number, stage in enumerate(stages) if new + at in stage.results)
        if strange := [number for number in readers if number != maker]:
            raise ArgumentError(
                f"{name} is changed with each microbatch by stage {maker} and read by stage {strange[0]}, which would "
                f"see it late: cut elsewhere, or read it where it is changed"
            )
        _check_ascending(schedule, maker, name)
        found.append(Carried(maker, stages[maker].results.index(new + at)))
    return found


def _check_ascending(schedule: Schedule, stage: int, name: Any) -> None:
    operations = schedule.lists[schedule.device_of_stage[stage]]
    order = [one.microbatch for one in operations if one.kind is Kind.FORWARD and one.stage == stage]
    if order != sorted(order):
        raise ArgumentError(
            f"{name} changes with each microbatch, and schedule {schedule.name!r} takes those of stage {stage} in the "
            f"order {order}: expected an ascending one"
        )
