"""Plans: what was decided for every variable, and why; frozen, printable, JSON."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from braidax.errors import ArgumentError
from braidax.program import named_leaves

from .placements import PLACEMENTS, Placement, Replicated
from .strategies import Hybrid, Strategy, Variable, batch_axes, num_bytes


@dataclass(frozen=True)
class PlannedAxis:
    """One axis of the mesh: its `name`, its `size`, and the `strategy` it has been given, or None."""

    name: str
    size: int
    strategy: str | None


@dataclass(frozen=True)
class PlannedVariable:
    """One variable.

    **Fields:** its `path`, global `shape`, `dtype`, `num_bytes` of all of it, its `placements` (one per mesh axis), and
    `why`. `alpha`: the part of its rows that a step touches, where that was measured.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    placements: tuple[Placement, ...]
    why: str
    alpha: float | None = None


@dataclass(frozen=True)
class Plan:
    """All that `parallelize` has decided before anything runs; `print` shows it as a table.

    **Arguments:** `axes`: the mesh. `batch_axes`: the axes that the batch is split over. `microbatches`: pieces that
    gradients are accumulated over. `variables`: one entry per variable.
    """

    axes: tuple[PlannedAxis, ...]
    batch_axes: tuple[str, ...]
    microbatches: int
    variables: tuple[PlannedVariable, ...]

    def to_json(self) -> str:
        """Returns the plan as one JSON object."""
        tree = asdict(self)
        for entry, variable in zip(tree["variables"], self.variables, strict=True):
            entry["placements"] = [{"placement": type(p).__name__, **asdict(p)} for p in variable.placements]  # pyright: ignore
        return json.dumps(tree)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Returns the plan that `to_json` has written.

        **Raises:** `ArgumentError` when `text` is not such a plan.
        """
        try:
            tree: dict[str, Any] = json.loads(text)
            return cls(
                axes=tuple(PlannedAxis(**axis) for axis in tree["axes"]),
                batch_axes=tuple(tree["batch_axes"]),
                microbatches=tree["microbatches"],
                variables=tuple(_variable_from(entry) for entry in tree["variables"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ArgumentError(f"text is no plan ({error!r}): expected what Plan.to_json returns") from error

    def __str__(self) -> str:
        """The mesh, then a line for every variable."""
        mesh = ", ".join(f"{a.name}={a.size} ({a.strategy or 'no strategy: replicated'})" for a in self.axes)
        split = " × ".join(self.batch_axes) or "nothing: every device sees all samples"
        total = sum(variable.num_bytes for variable in self.variables)
        rows = [("variable", "shape", "dtype", "bytes", "alpha", "placement", "why")]
        for v in self.variables:
            shape = "×".join(str(size) for size in v.shape) or "scalar"
            alpha = "" if v.alpha is None else f"{100 * v.alpha:.3g} %"
            rows.append((v.path, shape, v.dtype, f"{v.num_bytes:,}", alpha, self._placement_of(v), v.why))
        if not any(variable.alpha is not None for variable in self.variables):
            rows = [(*row[:4], *row[5:]) for row in rows]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        head = [f"mesh          {mesh}", f"batch         split over {split}, microbatches={self.microbatches}"]
        foot = f"{len(self.variables)} variables, {total:,} bytes"
        return "\n".join([*head, "", lines[0], "-" * len(lines[0]), *lines[1:], "", foot])

    def _placement_of(self, variable: PlannedVariable) -> str:
        told = {f"{axis.name}: {placement}" for axis, placement in zip(self.axes, variable.placements, strict=True)}
        same = {str(placement) for placement in variable.placements}
        return same.pop() if len(same) == 1 else ", ".join(sorted(told))


def make_plan(
    mesh: Mesh, strategies: Mapping[str, Strategy], variables: Sequence[Variable], *, microbatches: int
) -> Plan:
    """Lets every strategy place every variable."""
    axes = tuple(
        PlannedAxis(name, mesh.shape[name], repr(strategies[name]) if name in strategies else None)
        for name in mesh.axis_names
    )
    over = batch_axes(mesh, strategies)
    num_parts = math.prod(mesh.shape[axis] for axis in over)
    hybrids = [strategy for strategy in strategies.values() if isinstance(strategy, Hybrid)]
    planned: list[PlannedVariable] = []
    for variable in variables:
        placements: list[Placement] = []
        reasons: list[str] = []
        for axis in mesh.axis_names:
            placement, why = strategies[axis].place(variable, num_parts) if axis in strategies else (Replicated(), "")
            placements.append(placement)
            reasons.append(f"{axis}: {why or 'no strategy'}")
        spec = variable.spec
        planned.append(
            PlannedVariable(
                variable.path,
                tuple(spec.shape),
                str(spec.dtype),
                num_bytes(spec),
                tuple(placements),
                "; ".join(reasons),
                next((one.touched[variable.path].alpha for one in hybrids if variable.path in one.touched), None),
            )
        )
    return Plan(axes, over, microbatches, tuple(planned))


def variables_of(tree: Any, root: str) -> list[Variable]:
    """Returns the variables of a PyTree of specs, of whose uses nothing is known; `root` is what names start with."""
    return [Variable(path, spec) for path, spec in named_leaves(tree, root)]


def shardings_of(plan: Plan, mesh: Mesh, variables: Any) -> Any:
    """Returns the PyTree of `NamedSharding` that a plan gives to the variables it was made for."""
    shardings: list[NamedSharding] = []
    for variable in plan.variables:
        spec = PartitionSpec()
        for axis, placement in zip(plan.axes, variable.placements, strict=True):
            spec = placement.split(spec, axis.name)
        shardings.append(NamedSharding(mesh, spec))
    return jax.tree.unflatten(jax.tree.structure(variables), shardings)


def follow(variables: Any, shardings: Any, state: Any, otherwise: NamedSharding) -> Any:
    """Gives each leaf of an optimizer's state the sharding of the variable that it belongs to.

    A leaf belongs to a variable when its path ends with the variable's and its shape is the same (Adam's moments);
    any other (a step count) gets `otherwise`.

    **Arguments:** `variables`, `shardings`: PyTrees alike. `state`: PyTree of `jax.ShapeDtypeStruct`.

    **Returns:** a PyTree of `NamedSharding` like `state`.
    """
    known = [
        (tuple(path), spec.shape, sharding)
        for (path, spec), sharding in zip(
            jax.tree_util.tree_flatten_with_path(variables)[0], jax.tree.leaves(shardings), strict=True
        )
    ]
    known.sort(key=lambda entry: -len(entry[0]))

    def choose(path: Any, spec: jax.ShapeDtypeStruct) -> NamedSharding:
        for suffix, shape, sharding in known:
            if spec.shape == shape and tuple(path[len(path) - len(suffix) :]) == suffix:
                return sharding
        return otherwise

    return jax.tree_util.tree_map_with_path(choose, state)


def _variable_from(entry: dict[str, Any]) -> PlannedVariable:
    placements: list[Placement] = []
    for fields in entry["placements"]:
        options: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
        }  # pyright: ignore
        placements.append(PLACEMENTS[options.pop("placement")](**options))
    fields: dict[str, Any] = {**entry, "shape": tuple(entry["shape"]), "placements": tuple(placements)}
    return PlannedVariable(**fields)
