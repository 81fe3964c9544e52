"""A state that was saved by another plan: which one that was, and the way from there.

What a state looks like is decided by which variables are tables by rows, and that by batch size, mesh and strategies.
So a state in the form in which it was saved is that of another step, which is made for it, and `Step.adopt` goes on
from there.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from braidax.errors import ArgumentError

from .placements import Replicated, Rows
from .plan import Costs, Plan, PlannedVariable

Tables = Collection[str]
"""The paths of the variables that are tables by rows, in their order."""

_MAX_NAMED = 3


@runtime_checkable
class Adopting(Protocol):
    """What is needed of a `Step` here."""

    plan: Plan

    @property
    def state_specs(self) -> Any:
        """As of `Step`."""
        ...

    def settled(self, state: Any) -> Any:
        """As of `Step`."""
        ...

    def check_adoptable(self, step: Any) -> None:
        """As of `Step`."""
        ...

    def adopt(self, state: Any, step: Any) -> Any:
        """As of `Step`."""
        ...


def tables_of(plan: Plan) -> Tables:
    """Returns the tables that a plan makes of variables."""
    return [one.path for one in plan.variables if any(isinstance(placement, Rows) for placement in one.placements)]


def tables_in(saved: Mapping[str, int | None]) -> Tables:
    """Returns the tables of a state that was saved.

    **Arguments:** `saved`: the paths of its leaves, with V of those that have padded rows.
    """
    return [path for path, num_rows in saved.items() if num_rows is not None and path.startswith("params")]


def changes(saved: Tables, now: Tables) -> str:
    """Returns in words how the tables of two plans differ, empty if they do not."""
    told = [f"{path} was by rows and is whole now" for path in saved if path not in now]
    told += [f"{path} was whole and is by rows now" for path in now if path not in saved]
    if not told:
        return ""
    more = f", and {len(told) - _MAX_NAMED} more" if len(told) > _MAX_NAMED else ""
    return f"the plan has changed since it was saved: {', '.join(told[:_MAX_NAMED])}{more} (batch size, mesh and " + (
        "strategies decide that)"
    )


def with_tables(plan: Plan, tables: Tables) -> Plan:
    """Returns a plan that makes those variables tables by rows, along all axes of the batch, and no others.

    **Raises:** `ArgumentError` when the batch is split over no axis.
    """
    if tables and not plan.batch_axes:
        raise ArgumentError("the batch is split over no axis along which rows could be")

    def placed(variable: PlannedVariable) -> PlannedVariable:
        is_table = any(isinstance(placement, Rows) for placement in variable.placements)
        if is_table == (variable.path in tables):
            return variable
        by_rows = [variable.path in tables and axis.name in plan.batch_axes for axis in plan.axes]
        placements = tuple(Rows() if rows else Replicated() for rows in by_rows)
        return replace(variable, placements=placements, why="as it was saved", costs=Costs())

    return replace(plan, variables=tuple(map(placed, plan.variables)))


def way_to(
    step: Adopting, replanned: Callable[[Plan], Adopting], saved: Mapping[str, int | None]
) -> tuple[Any, Callable[[Any], Any], str] | str | None:
    """Returns the form in which a state was saved and the way from there to a step, as `State.saved_as` does.

    **Arguments:** `replanned`: makes the same step by another plan.
    """
    now, before = tables_of(step.plan), tables_in(saved)
    said = changes(before, now)
    if not said:
        return (step.state_specs, step.settled, "") if now else None
    try:
        other = replanned(with_tables(step.plan, before))
        step.check_adoptable(other)
    except ArgumentError as error:
        return f"{said}, and there is no way from there: {error}"
    return other.state_specs, lambda state: step.adopt(state, other), said
