"""Plans: what was decided for every variable, and why; frozen, printable, JSON."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from braidax.errors import ArgumentError

from .batch import batch_axes
from .compiling import CompilerOption
from .costs.architectures import compared as architectures
from .costs.machine import in_time
from .costs.ring import PlannedRing, planned_ring
from .layout import Axis, Layout
from .model import Model
from .placements import Placement, Replicated
from .planned.knobs import ComputingKnobs, PlannedKnobs
from .planned.machine import PlannedMachine
from .planned.stages import PlannedPipeline
from .planned.variable import Costs as Costs
from .planned.variable import PlannedAxis as PlannedAxis
from .planned.variable import PlannedVariable as PlannedVariable
from .planned.variable import variable_from
from .rotated import RotatedTensorParallel
from .strategy import Choice, Strategy, in_words, num_bytes
from .text import paragraph, table

_WAITS, _KEPT = "- and waits for it", "- gathered and kept"


@dataclass(frozen=True)
class Plan:
    """All that `parallelize` has decided before anything runs; `print` shows it as a table.

    **Arguments:** `axes`: the mesh. `batch_axes`: the axes that the batch is split over. `microbatches`: pieces that
    gradients are accumulated over. `variables`: one entry per variable. `compiler_options`: what hides that which is
    sent, on the devices of the mesh. `ring`: from how many tokens a device on products hide the hops of what goes
    around. `pipeline`: the stages along an axis, and what they do when. `knobs`: of loader, checkpoints and step, and
    the machine that it was made on.
    """

    axes: tuple[PlannedAxis, ...]
    batch_axes: tuple[str, ...]
    microbatches: int
    variables: tuple[PlannedVariable, ...]
    compiler_options: tuple[CompilerOption, ...] = ()
    ring: PlannedRing | None = None
    pipeline: PlannedPipeline | None = None
    knobs: PlannedKnobs = field(default_factory=PlannedKnobs)

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
                variables=tuple(variable_from(entry) for entry in tree["variables"]),
                compiler_options=tuple(CompilerOption(**entry) for entry in tree.get("compiler_options", ())),
                ring=None if tree.get("ring") is None else PlannedRing(**tree["ring"]),
                pipeline=None if tree.get("pipeline") is None else PlannedPipeline.from_tree(tree["pipeline"]),
                knobs=PlannedKnobs.from_tree(tree.get("knobs") or {}),
            )
        except ArgumentError:
            raise
        except (ValueError, KeyError, TypeError) as error:
            raise ArgumentError(f"text is no plan ({error!r}): expected what Plan.to_json returns") from error

    def __str__(self) -> str:
        """The mesh, a line for every variable, what a device holds and sends, and the reasons: 120 columns at most."""
        mesh = ", ".join(f"{a.name}={a.size} ({a.strategy or 'no strategy: replicated'})" for a in self.axes)
        nothing = "nothing: every device sees all samples"
        if self.pipeline is not None and self.pipeline.num_devices > len(self.pipeline.places):
            nothing = f"the devices that a stage has along {self.pipeline.axis}"
        split = " × ".join(self.batch_axes) or nothing
        reasons = list(dict.fromkeys(one.why for one in self.variables))
        rows = [("variable", "shape", "dtype", "placement, dim", "bytes", "held", "sent", "alpha", "why")]
        rows += [(*_row(one, self.axes), f"[{reasons.index(one.why) + 1}]") for one in self.variables]
        kept = [at for at in range(len(rows[0])) if any(row[at] for row in rows[1:])]
        right = [kept.index(at) for at in (4, 5, 6, 7) if at in kept]
        lines = table([[row[at] for at in kept] for row in rows], right=right, narrow=[0, kept.index(3)])
        options = [
            paragraph("compiler", f"{one.name}={one.value}: {one.why}", indent=14) for one in self.compiler_options
        ]
        ring = [] if self.ring is None else paragraph("ring", str(self.ring), indent=14)
        knobs = paragraph("knobs", str(self.knobs), indent=14) if self.knobs.changed() else []
        compared = [] if self.pipeline else architectures(self.variables, self.axes, self.batch_axes)
        told = [paragraph(f"[{number}]", why, indent=5) for number, why in enumerate(reasons, 1)]
        return "\n".join(
            [
                *paragraph("mesh", mesh, indent=14),
                *paragraph("batch", f"split over {split}, microbatches={self.microbatches}", indent=14),
                *ring,
                *(line for lines in options for line in lines),
                *knobs,
                *([] if self.pipeline is None else ["", *self.pipeline.lines()]),
                "",
                *lines,
                "",
                *self._totals(),
                "",
                *([*compared, ""] if compared else []),
                *(line for lines in told for line in lines),
            ]
        )

    def compare(self, other: "Plan") -> str:
        """Returns what differs from another plan, as tables: what this one has, then what the other has."""
        heads = [("mesh", self._mesh, other._mesh), ("batch over", self.batch_axes, other.batch_axes)]
        heads += [("microbatches", self.microbatches, other.microbatches)]
        heads += [("pipeline", *("none" if plan.pipeline is None else plan.pipeline.short for plan in (self, other)))]
        heads += [("ring", *("none" if plan.ring is None else plan.ring.short for plan in (self, other)))]
        heads += [("machine", self.knobs.machine, other.knobs.machine)]
        values, others = self.knobs.values(), other.knobs.values()
        heads += [(f"knob {name}", value, others[name]) for name, value in values.items()]
        lines = [f"{name}: {one} → {two}" for name, one, two in heads if one != two]
        mine, theirs = ({one.path: _row(one, plan.axes) for one in plan.variables} for plan in (self, other))
        rows: list[tuple[str, ...]] = [("variable", "shape", "placement, dim", "held", "sent")]
        for path in dict.fromkeys([*mine, *theirs]):
            one, two = (rows.get(path, ("", "absent", "", "absent", "", "", "", "")) for rows in (mine, theirs))
            if one[1:4] != two[1:4] or one[5:] != two[5:]:
                rows.append((path, *(_changed(one[at], two[at]) for at in (1, 3, 5, 6))))
        if len(rows) > 1:
            lines += ["", *table(rows, right=[3, 4], narrow=[0, 2])]
        if not lines:
            return "the plans are alike"
        mine, theirs = self._figures, other._figures
        totals = [(name, mine.get(name, ""), theirs.get(name, "")) for name in {**mine, **theirs}]
        lines += ["", *table([("in all", "this plan", "the other"), *totals], right=[1, 2])]
        return "\n".join(lines).strip()

    def timeline(self, path: str | Path | None = None, *, measured: Any = None, width: int = 100) -> str:
        """Draws what the stages of a pipeline do when: as it is planned, every pass as long as any, and as it is
        simulated with what each takes.

        **Arguments:** `path`: of a file of HTML to write besides, with what lives on each device, and seconds and bytes
        of each operation. `measured`: drawn, too: what `PipelinedStep.measure` returns. `width`: as of
        `schedules.timeline`.

        **Raises:** `ArgumentError` for a plan without a pipeline.
        """
        if self.pipeline is None:
            raise ArgumentError("the plan has no pipeline, whose stages a timeline shows: print the plan itself")
        return self.pipeline.timeline(path, measured=measured, width=width)

    def to_html(self) -> str:
        """Returns a page of HTML that needs nothing else: the batch on its mesh, and a treemap of a device's memory."""
        from .pictures import Shown, plan_page

        shown = Shown(self.axes, self.batch_axes, self.microbatches, self.variables, self.pipeline)
        return plan_page(shown, str(self))

    @property
    def _mesh(self) -> str:
        return ", ".join(f"{axis.name}={axis.size} ({axis.strategy or 'no strategy'})" for axis in self.axes)

    def _totals(self) -> list[str]:
        """What a device holds and sends."""
        number, whole, *more = self._figures.values()
        if not more:
            return [f"{number} variables, {whole}"]
        held, parameters, gradients, state, sent, *_ = more
        parts = f"parameters {parameters}, gradients {gradients}, optimizer's state {state}"
        kept, waits = (self._figures.get(name, "") for name in (_KEPT, _WAITS))
        return [
            f"{number} variables, {whole}",
            f"a device holds {held}: {parts}" + (f", gathered and kept {kept}" if kept else ""),
            'activations come on top: compile_for("here") compiles the step, and tells the peak memory',
            f"a device sends {sent} a step for them"
            + (f", and waits for {waits} of that by the machine's figures" if waits else ""),
        ]

    @property
    def _figures(self) -> dict[str, str]:
        """How many variables there are, their bytes, and what a device holds and sends, as far as that is known."""
        costs = [one.costs for one in self.variables]

        def total(values: Iterable[int | None]) -> str:
            return in_words(sum(value or 0 for value in values))

        figures = {"variables": str(len(costs)), "bytes of all": total(one.num_bytes for one in self.variables)}
        if any(one.held_bytes is None for one in costs):
            return figures
        waits = [one.exposed_seconds for one in costs if one.exposed_seconds is not None]
        return {
            **figures,
            "a device holds": total(_held(one) for one in costs),
            "- parameters": total(one.held_bytes for one in costs),
            "- gradients": total(one.gradient_bytes for one in costs),
            "- optimizer's state": total(one.state_bytes for one in costs),
            "a device sends a step": total(one.sent_bytes for one in costs),
            **({_WAITS: in_time(sum(waits))} if waits else {}),
            **({_KEPT: total(one.kept_bytes for one in costs)} if any(one.kept_bytes for one in costs) else {}),
        }


def _row(variable: PlannedVariable, axes: Sequence[PlannedAxis]) -> tuple[str, ...]:
    """Path, shape, dtype, placement, bytes of all of it, held and sent by a device, alpha."""
    costs = variable.costs
    shape = "×".join(str(size) for size in variable.shape) or "scalar"
    placement = _placement_of(variable, axes) + (", frozen" if variable.frozen else "")
    held, sent = _held(costs), costs.sent_bytes
    return (
        variable.path,
        shape,
        variable.dtype,
        placement,
        in_words(variable.num_bytes),
        "" if held is None else in_words(held),
        "" if sent is None else in_words(sent),
        "" if costs.alpha is None else f"{100 * costs.alpha:.3g} %",
    )


def _held(costs: Costs) -> int | None:
    parts = (costs.held_bytes, costs.gradient_bytes, costs.state_bytes, costs.kept_bytes)
    return None if None in parts else sum(part or 0 for part in parts)


def _changed(one: str, two: str) -> str:
    return one if one == two else f"{one} → {two}"


def _placement_of(variable: PlannedVariable, axes: Sequence[PlannedAxis]) -> str:
    """The placements, with the dim that is split, on axes where it is not replicated."""
    pairs = [
        (axis.name, str(placement).replace(", dim", ""))
        for axis, placement in zip(axes, variable.placements, strict=True)
    ]
    told = [f"{name}: {placement}" for name, placement in pairs if placement != str(Replicated())]
    same = {placement for _, placement in pairs}
    return ", ".join(told) if told and len(same) > 1 else same.pop() if same else str(Replicated())


def make_plan(mesh: Mesh, strategies: Mapping[str, Strategy], model: Model) -> Plan:
    """Lets the strategy of each axis place every variable, those first that split what is computed with one sample.

    A ring comes next.

    **Raises:** `ArgumentError` naming a variable that cannot lie as it is told.
    """
    axes = [Axis(name, mesh.shape[name]) for name in mesh.axis_names]
    told = tuple(
        PlannedAxis(axis.name, axis.size, repr(strategies[axis.name]), _rate(strategies[axis.name], axis))
        if axis.name in strategies
        else PlannedAxis(axis.name, axis.size, None)
        for axis in axes
    )
    taken = {path: Layout.whole(spec.shape) for path, spec in model.variables.items()}
    choices: dict[str, Mapping[str, Choice]] = {}
    for axis in sorted(axes, key=lambda axis: _turn(strategies.get(axis.name))):
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
            "; ".join(
                f"{axis.name}: {_frozen(choice) if path in model.frozen else choice.why}"
                for axis, choice in zip(axes, chosen[path], strict=True)
            ),
            path in model.frozen,
            _measured(chosen[path]),
        )
        for path, spec in model.variables.items()
    )
    knobs = PlannedKnobs(computing=ComputingKnobs(asked_combine_bytes(strategies)), machine=PlannedMachine.of(mesh))
    return Plan(told, batch_axes(mesh, strategies), model.microbatches, variables, ring=_ring(choices), knobs=knobs)


def _ring(choices: Mapping[str, Mapping[str, Choice]]) -> PlannedRing | None:
    """Returns the ring of an axis, which is the only one. **Arguments:** `choices`: by axis, then by path."""
    rings = [planned_ring(axis, [one.ring for one in chosen.values()]) for axis, chosen in choices.items()]
    return next((ring for ring in rings if ring is not None), None)


def asked_combine_bytes(strategies: Mapping[str, Strategy]) -> int | None:
    """Returns the `combine_bytes` that strategies ask for. **Raises:** `ArgumentError` where they ask for different."""
    given = [getattr(strategy, "combine_bytes", None) for strategy in strategies.values()]
    asked = {one for one in given if one is not None}
    if len(asked) > 1:
        raise ArgumentError(f"combine_bytes is {sorted(asked)}: expected the same in all strategies, or said once")
    return asked.pop() if asked else None


def _innermost(strategy: Any) -> Any:
    """Returns what places all that is not by rows."""
    while (inner := getattr(strategy, "strategy", getattr(strategy, "dense", None))) is not None:
        strategy = inner
    return strategy


def _rate(strategy: Any, axis: Axis) -> float | None:
    """Returns the bytes that a device sends in a second along an axis, where a strategy has a machine's figures."""
    machine = getattr(_innermost(strategy), "machine", None)
    return None if machine is None or axis.size == 1 else machine.collective(axis.name).bytes_per_second


def _turn(strategy: Any) -> int:
    """When an axis places variables: first those that split work, then a ring, whose parts others divide further."""
    if strategy is None or not strategy.splits_batch:
        return 0
    strategy = _innermost(strategy)
    return 1 if isinstance(strategy, RotatedTensorParallel) else 2


def _frozen(choice: Choice) -> str:
    return f"frozen: {choice.placement}, no gradient"


def _measured(choices: Sequence[Choice]) -> Costs:
    """What strategies have counted of a variable, by axis."""
    counted = next((choice for choice in reversed(choices) if choice.alpha is not None), None)
    waits = [choice.exposed_seconds for choice in choices if choice.exposed_seconds is not None]
    costs = Costs(exposed_seconds=sum(waits) if waits else None)
    if counted is None:
        return costs
    return replace(costs, alpha=counted.alpha, sent_bytes=counted.sent_bytes, num_rows=counted.num_rows)


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
