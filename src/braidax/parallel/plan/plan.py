"""Plans: what was decided for every variable, and why; frozen, printable, JSON."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from braidax.errors import ArgumentError

from .batch import batch_axes
from .compiling import CompilerOption
from .layout import Axis, Layout
from .model import Model
from .placements import PLACEMENTS, Placement, Replicated
from .strategy import Choice, Strategy, num_bytes


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
    gradients are accumulated over. `variables`: one entry per variable. `compiler_options`: what hides that which is
    sent, on the devices of the mesh.
    """

    axes: tuple[PlannedAxis, ...]
    batch_axes: tuple[str, ...]
    microbatches: int
    variables: tuple[PlannedVariable, ...]
    compiler_options: tuple[CompilerOption, ...] = ()

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
                compiler_options=tuple(CompilerOption(**entry) for entry in tree.get("compiler_options", ())),
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
        head += [f"compiler      {one.name}={one.value}: {one.why}" for one in self.compiler_options]
        foot = f"{len(self.variables)} variables, {total:,} bytes"
        return "\n".join([*head, "", lines[0], "-" * len(lines[0]), *lines[1:], "", foot])

    def _placement_of(self, variable: PlannedVariable) -> str:
        told = {f"{axis.name}: {placement}" for axis, placement in zip(self.axes, variable.placements, strict=True)}
        same = {str(placement) for placement in variable.placements}
        return same.pop() if len(same) == 1 else ", ".join(sorted(told))


def make_plan(mesh: Mesh, strategies: Mapping[str, Strategy], model: Model) -> Plan:
    """Lets the strategy of each axis place every variable, those first that split what is computed with one sample.

    **Raises:** `ArgumentError` naming a variable that cannot lie as it is told.
    """
    axes = [Axis(name, mesh.shape[name]) for name in mesh.axis_names]
    told = tuple(
        PlannedAxis(axis.name, axis.size, repr(strategies[axis.name]) if axis.name in strategies else None)
        for axis in axes
    )
    taken = {path: Layout.whole(spec.shape) for path, spec in model.variables.items()}
    choices: dict[str, Mapping[str, Choice]] = {}
    for axis in sorted(axes, key=lambda axis: axis.name in strategies and strategies[axis.name].splits_batch):
        strategy = strategies.get(axis.name)
        choices[axis.name] = {} if strategy is None else strategy.place(model, axis, taken)
        for path, choice in choices[axis.name].items():
            taken[path] = refined(taken[path], choice.placement, axis, path)
    nothing = Choice(Replicated(), "no strategy")
    chosen = {path: [choices[axis.name].get(path, nothing) for axis in axes] for path in taken}
    variables = tuple(
        PlannedVariable(
            path,
            tuple(spec.shape),
            str(spec.dtype),
            num_bytes(spec),
            tuple(choice.placement for choice in chosen[path]),
            "; ".join(f"{axis.name}: {choice.why}" for axis, choice in zip(axes, chosen[path], strict=True)),
            next((choice.alpha for choice in reversed(chosen[path]) if choice.alpha is not None), None),
        )
        for path, spec in model.variables.items()
    )
    return Plan(told, batch_axes(mesh, strategies), model.microbatches, variables)


def refined(layout: Layout, placement: Placement, axis: Axis, path: str) -> Layout:
    """Returns a layout with an axis added. **Raises:** `ArgumentError` naming the variable that cannot lie so."""
    try:
        return placement.refine(layout, axis)
    except ArgumentError as error:
        raise ArgumentError(f"{path} cannot be placed by {placement!r} on the axis {axis.name!r}: {error}") from error


def layouts_of(plan: Plan) -> list[Layout]:
    """Returns how each variable of a plan lies, in their order. **Raises:** as `refined`."""
    layouts: list[Layout] = []
    for variable in plan.variables:
        layout = Layout.whole(variable.shape)
        for axis, placement in zip(plan.axes, variable.placements, strict=True):
            layout = refined(layout, placement, Axis(axis.name, axis.size), variable.path)
        layouts.append(layout)
    return layouts


def shardings_of(plan: Plan, mesh: Mesh, variables: Any) -> Any:
    """Returns the PyTree of `NamedSharding` that a plan gives to the variables it was made for."""
    shardings = [layout.sharding(mesh) for layout in layouts_of(plan)]
    return jax.tree.unflatten(jax.tree.structure(variables), shardings)


def follow(variables: Any, values: Any, state: Any, otherwise: Callable[[jax.ShapeDtypeStruct], Any]) -> Any:
    """Gives each leaf of an optimizer's state what the variable has that it belongs to: its layout, say.

    A leaf belongs to a variable when its path ends with the variable's and its shape is the same (Adam's moments);
    any other (a step count) gets `otherwise(spec)`.

    **Arguments:** `variables`, `state`: PyTrees of specs. `values`: like `variables`, of what is given.

    **Returns:** a PyTree like `state`.
    """
    paths = jax.tree_util.tree_flatten_with_path(variables)[0]
    known = [
        (tuple(path), spec.shape, value) for (path, spec), value in zip(paths, jax.tree.leaves(values), strict=True)
    ]
    known.sort(key=lambda entry: -len(entry[0]))

    def choose(path: Any, spec: jax.ShapeDtypeStruct) -> Any:
        for suffix, shape, value in known:
            if spec.shape == shape and tuple(path[len(path) - len(suffix) :]) == suffix:
                return value
        return otherwise(spec)

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
