"""How the variables of a stage lie on its devices, by the strategies of the other mesh axes."""

import fnmatch
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh

from braidax.parallel.compute.metrics import BATCH
from braidax.parallel.dense.passes import dense_passes
from braidax.parallel.plan.footprint import state_bytes
from braidax.parallel.plan.layout import Layout
from braidax.parallel.plan.model import Model, RowWork
from braidax.parallel.plan.placements import Replicated
from braidax.parallel.plan.plan import Plan, PlannedVariable, layouts_of, make_plan
from braidax.parallel.plan.ring_uses import expert_uses, rotated_uses
from braidax.parallel.plan.strategy import Strategy
from braidax.parallel.rows.loss_with_tables import loss_with_tables
from braidax.parallel.rows.reads import LATE, row_reads
from braidax.program import LeafUses, Stage, find_dims_in_pieces, find_meetings, find_sites, named_leaves

from .running.home import axes_of
from .running.owning.ownership import Ownership, Piece

_PARAMS = 0
_INCOMING = BATCH + 1
_ROOT = "params"


class PlacedStage(NamedTuple):
    """A stage whose variables lie by strategies.

    **Fields:** `stage`: with a program for that. `layouts`: of the pieces that it owns, the others are whole. `plan`:
    of what it reads.
    """

    stage: Stage
    layouts: Mapping[Piece, Layout]
    plan: Plan


@dataclass(frozen=True)
class Placing:
    """Lets strategies place the variables of each stage, on its own devices.

    **Fields:** `strategies`: by axis, without that of stages. `batch_axes`: over which samples are divided; that of the
    stages among them if some of these are on several places, which has no strategy. `params`: specs of all, and the
    `optimizer`. `microbatches`: of how many an update consists. `compiler_options`: for the programs of stages, as of
    `jax.jit`. `frozen`: leaves of `params`, by number, that are not trained.
    """

    strategies: Mapping[str, Strategy]
    batch_axes: tuple[str, ...]
    params: Any
    optimizer: optax.GradientTransformation
    microbatches: int
    compiler_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    frozen: frozenset[int] = frozenset()

    def place(
        self, number: int, stage: Stage, ownership: Ownership, mesh: Mesh, incoming_dims: Sequence[int | None]
    ) -> PlacedStage:
        """Places what a stage reads.

        What another stage reads, too, stays whole.

        **Arguments:** `number`: of the stage. `mesh`: of its devices. `incoming_dims`: of incoming values, which goes
        along the samples.

        **Raises:** `ArgumentError` naming a variable that cannot lie as it is told.
        """
        divided = {BATCH: 0, _INCOMING: [*incoming_dims]}
        axes = axes_of(mesh, self.batch_axes)
        model = self._model(stage, divided, axes, math.prod(mesh.shape[axis] for axis in axes))
        strategies = {axis: _fitting(one, model) for axis, one in self.strategies.items()}
        plan = make_plan(mesh, strategies, model)
        pieces = {name: read for (name, _), read in zip(_params(stage), ownership.reads[number], strict=True)}
        readers = Counter(read[:2] for reads in ownership.reads for read in reads)
        still = {
            f"{_ROOT}/{name}": "another stage reads it, too: whole"
            for name, read in pieces.items()
            if readers[read[:2]] > 1 or read.owner != number or read.rows is not None
        }
        pairs = zip(plan.variables, layouts_of(plan), strict=True)
        still |= {
            one.path: f"{lies.num_parts(0)} devices do not divide its {one.shape[0]:,} rows: whole"
            for one, lies in pairs
            if lies.by_rows and lies.padding[0] and one.path not in still
        }
        plan = replace(plan, variables=tuple(_kept_whole(one, still) for one in plan.variables))
        layouts, program = layouts_of(plan), stage.program
        tables = {at: plan.variables[at] for at, lies in enumerate(layouts) if lies.by_rows}
        if tables:
            program = loss_with_tables(program, tables, divided, mesh, plan)
        used = [Layout.whole(lies.shape) if at in tables else lies for at, lies in enumerate(layouts)]
        program = dense_passes(program, used, mesh, axes, divided)
        layouts = [replace(lies, fed="no") for lies in layouts]  # consecutive rows
        reads = ownership.reads[number]
        own = {read.piece: layout for read, layout in zip(reads, layouts, strict=True) if layout.axes}
        return PlacedStage(replace(stage, program=program), own, _on_axes(plan, [*self.strategies]))

    def _model(self, stage: Stage, divided: Mapping[int, Any], axes: tuple[str, ...], num_parts: int) -> Model:
        program, variables = stage.program, {f"{_ROOT}/{name}": spec for name, spec in _params(stage)}
        paths = [*variables]

        def sites() -> dict[str, Any]:
            found: dict[str, list[Any]] = {path: [] for path in paths}
            for site in find_sites(program):
                found[paths[site.value.entry.leaf]].append(site)
            return {path: tuple(one) for path, one in found.items()}

        reads = cache(lambda: row_reads(program, microbatches=self.microbatches, divided=divided))
        frozen = frozenset(f"{_ROOT}/{leaf.name}" for leaf in stage.leaves if leaf.frozen)

        def uses() -> dict[str, LeafUses]:
            named = {f"{_ROOT}/{one.name}": one for one in reads().uses}
            return {path: one for path, one in named.items() if path not in frozen}

        def of_pieces() -> dict[str, int]:
            whole, found = dict(named_leaves(self.params, _ROOT)), state_bytes(self.optimizer, self.params, _ROOT)
            own = {path: found[path] * spec.size // max(whole[path].size, 1) for path, spec in variables.items()}
            return {"": found[""], **own}

        return Model(
            variables,
            num_parts,
            self.microbatches,
            axes,
            find_uses=uses,
            find_sites=sites,
            find_met=lambda: find_meetings(program, {site.path for site in find_sites(program)}, divided),
            find_dims=partial(find_dims_in_pieces, program),
            find_rotated=lambda cuts, axis: rotated_uses(program, paths, cuts, axis, divided, num_parts),
            find_experts=lambda: expert_uses(program, paths, divided, num_parts),
            no_rows=lambda path: "" if path.removeprefix(f"{_ROOT}/") in reads().sparse else LATE,
            row_work=lambda path: RowWork(reads().shared.get(path.removeprefix(f"{_ROOT}/"), 0)),
            find_state_bytes=of_pieces,
            frozen=frozen,
        )


def _on_axes(plan: Plan, names: Sequence[str]) -> Plan:
    """Returns what a plan says of some axes."""
    own = [at for at, axis in enumerate(plan.axes) if axis.name in names]
    others = tuple(f"{axis.name}: " for axis in plan.axes if axis.name not in names)

    def kept(variable: PlannedVariable) -> PlannedVariable:
        reasons = [one for one in variable.why.split("; ") if not one.startswith(others)]
        return replace(variable, placements=tuple(variable.placements[at] for at in own), why="; ".join(reasons))

    if len(own) == len(plan.axes):
        return plan
    return replace(plan, axes=tuple(plan.axes[at] for at in own), variables=tuple(map(kept, plan.variables)))


def merged(plan: Plan, stages_axis: str, plans: Sequence[Plan]) -> Plan:
    """Returns the plan of a loss in stages, of those of its stages.

    **Arguments:** `plan`: of the whole mesh, which says how variables lie that no stage reads. `stages_axis`: along
    which stages lie.
    """
    at = [axis.name for axis in plan.axes].index(stages_axis)
    found: dict[str, list[PlannedVariable]] = {}
    for one in plans:
        for variable in one.variables:
            found.setdefault(variable.path, []).append(variable)

    def planned(whole: PlannedVariable) -> PlannedVariable:
        of_stages = found.get(whole.path)
        if not of_stages:
            placements: list[Any] = [Replicated()] * (len(plan.axes) - 1)
            placements.insert(at, whole.placements[at])
            return replace(whole, placements=tuple(placements), why="no stage reads it: whole")
        placements = [*of_stages[0].placements]
        reasons = dict.fromkeys(one.why for one in of_stages)
        words = f"{stages_axis}: pipeline: with the stage that reads it"
        placements.insert(at, whole.placements[at])
        return replace(whole, placements=tuple(placements), why="; ".join([words, *reasons]))

    return replace(plan, variables=tuple(planned(one) for one in plan.variables))


def _params(stage: Stage) -> list[tuple[str, jax.ShapeDtypeStruct]]:
    return named_leaves(stage.program.in_specs[_PARAMS])


def _fitting(strategy: Any, model: Model) -> Any:
    """Returns a strategy with those overrides that name something of a model."""
    named = {
        pattern: placement
        for pattern, placement in strategy.overrides.items()
        if any(fnmatch.fnmatchcase(path, pattern) for path in model.variables)
    }
    return replace(strategy, overrides=named)


def _kept_whole(variable: PlannedVariable, still: Mapping[str, str]) -> PlannedVariable:
    if variable.path not in still:
        return variable
    return replace(variable, placements=(Replicated(),) * len(variable.placements), why=still[variable.path])
