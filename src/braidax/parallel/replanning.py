"""A state that was saved by another plan: which one that was, and the way from there.

What a state looks like is decided by which variables are tables by rows, and which of their rows are hot. Both depend
on batch size, mesh and strategies. So a state in the form in which it was saved is that of another step, which is made
for it, and `Step.adopt` goes on from there.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from glob import escape
from typing import Any, Protocol, runtime_checkable

from braidax.errors import ArgumentError

from .placements import Placement, Replicated, Rows
from .plan import Plan
from .strategies import DataParallel, Hybrid, Strategy

Tables = Mapping[str, tuple[int, ...]]
"""The hot rows of each variable that is a table by rows, by its path."""

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
    found: dict[str, tuple[int, ...]] = {}
    for variable in plan.variables:
        rows = [placement for placement in variable.placements if isinstance(placement, Rows)]
        if rows:
            found[variable.path] = tuple(sorted({id for placement in rows for id in placement.hot}))
    return found


def tables_in(saved: Mapping[str, int | None], notes: Mapping[str, str]) -> Tables:
    """Returns the tables of a state that was saved.

    **Arguments:** `saved`: the paths of its leaves, with V of those that have padded rows. `notes`: kept with it, the
    plan among them, which alone knows the ids of hot rows.

    **Raises:** `ArgumentError` when there are hot rows, and no plan.
    """
    paths = [path for path, num_rows in saved.items() if num_rows is not None and path.startswith("params")]
    hot = [path for path in paths if any(name.startswith(f"opt_state/hot{path[6:]}/") for name in saved)]
    if hot and "plan" not in notes:
        raise ArgumentError(
            f"nothing in it tells which rows of {', '.join(hot)} are hot; note the plan before saving, as fit does: "
            'saver.notes["plan"] = step.plan.to_json()'
        )
    told = tables_of(Plan.from_json(notes["plan"])) if hot else {}
    return {path: told[path] if path in hot else () for path in paths}


def changes(saved: Tables, now: Tables) -> str:
    """Returns in words how the tables of two plans differ, empty if they do not."""
    told = [f"{path} was by rows and is whole now" for path in saved if path not in now]
    told += [f"{path} was whole and is by rows now" for path in now if path not in saved]
    told += [f"{path} has other hot rows now" for path, hot in now.items() if saved.get(path, hot) != hot]
    if not told:
        return ""
    more = f", and {len(told) - _MAX_NAMED} more" if len(told) > _MAX_NAMED else ""
    return f"the plan has changed since it was saved: {', '.join(told[:_MAX_NAMED])}{more} (batch size, mesh and " + (
        "strategies decide that)"
    )


def strategies_for(strategies: Mapping[str, Strategy], tables: Tables) -> dict[str, Strategy]:
    """Returns strategies that make those variables tables by rows, and no others.

    **Raises:** `ArgumentError` when there is no axis to split rows over.
    """
    overrides: dict[str, Placement] = {escape(path): Rows(hot=hot) for path, hot in tables.items()}
    overrides["*"] = Replicated()
    told: dict[str, Strategy] = {}
    for axis, strategy in strategies.items():
        if isinstance(strategy, Hybrid):
            told[axis] = replace(strategy, overrides=overrides, touched={})
        else:
            told[axis] = replace(strategy, overrides=overrides) if isinstance(strategy, DataParallel) else strategy
    if tables and not any(isinstance(strategy, DataParallel | Hybrid) for strategy in strategies.values()):
        raise ArgumentError("strategies has no axis with DataParallel or Hybrid over which rows could be split")
    return told


def way_to(
    step: Adopting, replanned: Callable[[Tables], Adopting], saved: Mapping[str, int | None], notes: Mapping[str, str]
) -> tuple[Any, Callable[[Any], Any], str] | str | None:
    """Returns the form in which a state was saved and the way from there to a step, as `State.saved_as` does.

    **Arguments:** `replanned`: makes the same step with other tables.
    """
    now = tables_of(step.plan)
    try:
        before = tables_in(saved, notes)
    except ArgumentError as error:
        return f"the plan may have changed since it was saved, and {error}"
    said = changes(before, now)
    if not said:
        return (step.state_specs, step.settled, "") if now else None
    try:
        other = replanned(before)
        step.check_adoptable(other)
    except ArgumentError as error:
        return f"{said}, and there is no way from there: {error}"
    return other.state_specs, lambda state: step.adopt(state, other), said
