"""What a plan says of the axes of a mesh, and of each variable."""

from dataclasses import dataclass
from typing import Any

from braidax.parallel.plan.placements import PLACEMENTS, Placement, Seen


@dataclass(frozen=True)
class PlannedAxis:
    """One axis of the mesh: its `name`, its `size`, and the `strategy` it has been given, or None.

    `bytes_per_second`: that a device sends along it in collectives, where the strategy has the figures of a machine.
    """

    name: str
    size: int
    strategy: str | None
    bytes_per_second: float | None = None


@dataclass(frozen=True)
class Costs:
    """What a variable costs one device, as far as it is known.

    **Fields:** bytes that it holds: `held_bytes` of the variable, `gradient_bytes` between the two programs of a step
    (0 for a table by rows: what its gradient takes depends on the rows of a batch), `state_bytes` of what the optimizer
    keeps of it. `sent_bytes`: that it sends in a step, by formula. `alpha`: the part of its rows that a step touches,
    where that was measured. `exposed_seconds`: that it waits in a step for what is sent, by a machine's figures.
    `kept_bytes`: of what is gathered, and kept for the backward pass. `num_rows`: how many different rows of a table by
    rows a device reads in a step: on average where that was measured, at most where `alpha` is None.
    """

    held_bytes: int | None = None
    gradient_bytes: int | None = None
    state_bytes: int | None = None
    sent_bytes: int | None = None
    alpha: float | None = None
    exposed_seconds: float | None = None
    kept_bytes: int = 0
    num_rows: float | None = None


@dataclass(frozen=True)
class PlannedVariable:
    """One variable.

    **Fields:** its `path`, global `shape`, `dtype`, `num_bytes` of all of it, its `placements` (one per mesh axis), and
    `why`. `frozen`: it is not trained. `costs`: for one device.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    placements: tuple[Placement, ...]
    why: str
    frozen: bool = False
    costs: Costs = Costs()


def variable_from(entry: dict[str, Any]) -> PlannedVariable:
    """Returns the variable that a plan has written as JSON."""
    placements: list[Placement] = []
    for fields in entry["placements"]:
        options: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
        }  # pyright: ignore
        if options.get("seen") is not None:
            options["seen"] = Seen(**options["seen"])
        placements.append(PLACEMENTS[options.pop("placement")](**options))
    made = {"shape": tuple(entry["shape"]), "placements": tuple(placements), "costs": Costs(**entry["costs"])}
    fields: dict[str, Any] = {**entry, **made}
    return PlannedVariable(**fields)
