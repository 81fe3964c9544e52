"""What a decorated step computes, before it is compiled: two parts, in the global view, cut where gradients are."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from braidax.errors import ArgumentError
from braidax.parallel.plan.batch import along_batch, batch_axes
from braidax.parallel.plan.footprint import shard_bytes, with_held, with_sent
from braidax.parallel.plan.layout import Axis, Layout
from braidax.parallel.plan.model import ExpertUses, Model, RotatedUses, RowWork
from braidax.parallel.plan.placements import Replicated
from braidax.parallel.plan.plan import Costs, Plan, PlannedVariable, layouts_of, make_plan
from braidax.parallel.plan.ring_uses import expert_uses, rotated_uses
from braidax.parallel.plan.strategy import Strategy, num_bytes
from braidax.parallel.rows.options import OutOfRange
from braidax.parallel.rows.reads import LATE, RowReads, row_reads
from braidax.program import (
    Cut,
    Kept,
    LeafUses,
    Like,
    Origin,
    Part,
    Path,
    Program,
    Rule,
    Site,
    batch_dims_of_results,
    evaluate,
    find_batch_dims,
    find_dims_in_pieces,
    find_kept,
    find_likes,
    find_meetings,
    find_sites,
    named_leaves,
    split_at_marks,
    trace,
)

from .kept_loss import KeptLoss
from .kept_microbatches import KeptMicrobatches

_KEEPS_SHAPES = "the state of a decorated step keeps its shapes"
_ALONE = "there is one device, and the optimizer of a decorated step moves all rows"


@dataclass(frozen=True)
class _Loss:
    """A gradient that a step takes.

    **Fields:** `one`: the same, of one microbatch. `likes`: the leaves of the state that its operands are like. `dims`:
    of operands, which one is the batch.
    """

    kept: Kept
    one: Kept
    likes: tuple[Like | None, ...]
    dims: tuple[int | None, ...]

    def operands_of(self, leaves: Sequence[int] | Mapping[int, Any]) -> list[int]:
        """Returns the operands that are like one of some leaves, in order."""
        return [at for at, like in enumerate(self.likes) if like is not None and like.leaf in leaves]

    @property
    def moved(self) -> set[int]:
        """The leaves that the gradient is taken by."""
        return {like.leaf for like in self.likes[: self.kept.num_gradients] if like is not None}


class TracedStep:
    """A whole step, traced with its gradients kept: `(state, batch) -> (state, metrics)`.

    The state's *weights* are what a gradient is taken by, and what a loss reads and the step never changes. A leaf that
    has an element for each element of a weight, such as Adam's moments, *follows* it: it lies as the weight does.
    """

    def __init__(self, program: Program, one: Program | None = None, *, microbatches: int = 1) -> None:
        self.program, self.split = program, split_at_marks(program)
        self._microbatches = microbatches
        state, batch = program.in_specs
        self._names: list[str] = [name for name, _ in named_leaves(state, "state")]
        self._specs: list[Any] = jax.tree.leaves(state)
        self._num_samples = min(leaf.shape[0] for leaf in jax.tree.leaves(batch))
        gradients = self.split.gradients.closed
        kept = find_kept(gradients.jaxpr)
        dims = find_batch_dims(_as_program(self.split.gradients), {each.path for each in kept}, {0: self._given_dims})
        _, likes = find_likes(gradients, self._seeds(self.split.gradient_inputs, range(len(self._specs))))
        losses = [
            _Loss(each, small, likes.get(each.path, (None,) * len(each.equation.invars)), dims[each.path])
            for each, small in zip(kept, kept if one is None else _alike(kept, one, microbatches), strict=True)
        ]
        self._weights = sorted({leaf for loss in losses for leaf in self._weights_of(loss)})
        _, likes = find_likes(gradients, self._seeds(self.split.gradient_inputs, self._weights))
        self._follows = self._find_followers()
        seeds = self._seeds(self.split.gradient_inputs, {**self._follows, **{leaf: leaf for leaf in self._weights}})
        self._first_likes, likes = find_likes(gradients, seeds)
        self._losses = [replace(loss, likes=likes.get(loss.kept.path, loss.likes)) for loss in losses]

    @property
    def _given_dims(self) -> list[int | None]:
        """Which dim of the inputs of the first part is the batch."""
        return [0 if at >= len(self._specs) else None for at in self.split.gradient_inputs]

    # What a plan is made of

    def plan(self, mesh: Mesh, strategies: Mapping[str, Strategy]) -> Plan:
        """Lets strategies place the weights; what follows one lies as it does, and all else is replicated.

        **Raises:** `ArgumentError` naming a variable that cannot lie as it is told.
        """
        model = self.model(mesh, batch_axes(mesh, strategies))
        placed = make_plan(mesh, strategies, model)
        for variable, layout in zip(placed.variables, layouts_of(placed), strict=True):
            if any(layout.padding):
                raise ArgumentError(
                    f"{variable.path} {list(variable.shape)} would be padded, and {_KEEPS_SHAPES}: place it on a dim "
                    f"that its axes divide"
                )
        known = {variable.path: variable for variable in with_sent(placed, model).variables}
        planned = tuple(self._planned(leaf, known, placed) for leaf in range(len(self._names)))
        return self._with_held(replace(placed, variables=planned), mesh)

    def model(self, mesh: Mesh, axes: Sequence[str]) -> Model:
        """Returns what strategies are told. **Arguments:** `axes`: over which samples are divided."""
        return Model(
            {self._names[leaf]: self._specs[leaf] for leaf in self._weights},
            math.prod(mesh.shape[axis] for axis in axes),
            self._microbatches,
            tuple(axes),
            find_uses=self._uses,
            find_sites=self._sites,
            find_met=self._met,
            find_dims=lambda: find_dims_in_pieces(self._joint),
            find_rotated=lambda cuts, axis: self._rotated(cuts, axis, mesh, axes),
            find_experts=lambda: self._experts(mesh, axes),
            no_rows=lambda path: _ALONE if mesh.size == 1 else "" if path in self._sparse else LATE,
            row_work=lambda path: RowWork(self._sparse[path]),
            find_state_bytes=self._state_bytes,
            frozen=[self._names[leaf] for leaf in self._weights if leaf not in self._moved],
            no_padding=_KEEPS_SHAPES,
        )

    def _state_bytes(self) -> dict[str, int]:
        found: Counter[str] = Counter()
        for leaf, (kind, spec) in enumerate(zip(self.kinds, self._specs, strict=True)):
            if kind != "parameters":
                found[self._names[self._follows[leaf]] if kind == "followers" else ""] += num_bytes(spec)
        return found

    @property
    def kinds(self) -> list[str]:
        """Of each leaf of the state: of "parameters", of "followers" of them, or of "others"."""
        leaves = range(len(self._specs))
        return [
            "parameters" if at in self._weights else "followers" if at in self._follows else "others" for at in leaves
        ]

    def _with_held(self, plan: Plan, mesh: Mesh) -> Plan:
        """Says what a device holds: of weights, and of all else as of an optimizer's state."""
        held: list[tuple[int, int, int]] = []
        for at, (kind, spec, layout) in enumerate(zip(self.kinds, self._specs, layouts_of(plan), strict=True)):
            own = shard_bytes(spec, sharding_of(layout, mesh))
            held.append((own, own if at in self._moved else 0, 0) if kind == "parameters" else (0, 0, own))
        return with_held(plan, held)

    def _planned(self, leaf: int, known: Mapping[str, PlannedVariable], plan: Plan) -> PlannedVariable:
        name, spec = self._names[leaf], self._specs[leaf]
        if name in known:
            return known[name]
        placements = tuple(Replicated() for _ in plan.axes)
        why = "no gradient uses it" if self._is_unread(leaf) else "no gradient is taken by it as it stands in the state"
        if leaf in self._follows:
            leader = known[self._names[self._follows[leaf]]]
            placements, why = leader.placements, f"follows {leader.path}"
        form = (tuple(spec.shape), str(spec.dtype), num_bytes(spec))
        return PlannedVariable(name, *form, placements, why, costs=Costs(sent_bytes=0))

    @cached_property
    def _joint(self) -> Program:
        """All losses as one program, whose first argument is the list of weights."""
        number = {leaf: at for at, leaf in enumerate(self._weights)}
        firsts = [loss.operands_of(self._weights) for loss in self._losses]
        programs = [loss.one.program(first) for loss, first in zip(self._losses, firsts, strict=True)]

        def run(weights: list[Any], *others: list[Any]) -> Any:
            outputs: list[Any] = []
            for loss, first, program, rest in zip(self._losses, firsts, programs, others, strict=True):
                likes = [loss.likes[at] for at in first]
                leaves = [weights[number[like.leaf]] for like in likes if like is not None]
                types = [spec.dtype for spec in program.in_specs[0]]
                given = [leaf.astype(dtype) for leaf, dtype in zip(leaves, types, strict=True)]
                outputs.append(program(given, rest))
            return outputs

        return trace(run, [self._specs[leaf] for leaf in self._weights], *(one.in_specs[1] for one in programs))

    def _rotated(self, cuts: Mapping[str, Cut], axis: Axis, mesh: Mesh, axes: Sequence[str]) -> RotatedUses:
        paths, num_parts = [self._names[leaf] for leaf in self._weights], math.prod(mesh.shape[one] for one in axes)
        return rotated_uses(self._joint, paths, cuts, axis, self._joint_dims, num_parts)

    def _experts(self, mesh: Mesh, axes: Sequence[str]) -> list[ExpertUses]:
        paths, num_parts = [self._names[leaf] for leaf in self._weights], math.prod(mesh.shape[one] for one in axes)
        return expert_uses(self._joint, paths, self._joint_dims, num_parts)

    def _by_name(self, found: Sequence[Any]) -> dict[str, Any]:
        return dict(zip((self._names[leaf] for leaf in self._weights), found, strict=True))

    def _sites(self) -> Mapping[str, Sequence[Site]]:
        found: list[list[Site]] = [[] for _ in self._weights]
        for site in find_sites(self._joint):
            found[site.value.entry.leaf].append(site)
        return self._by_name(found)

    def _met(self) -> Mapping[Path, bool]:
        return find_meetings(self._joint, {site.path for site in find_sites(self._joint)}, self._joint_dims)

    def _uses(self) -> Mapping[str, LeafUses]:
        return self._by_name(self._reads.uses)

    @property
    def _moved(self) -> set[int]:
        """The weights that a gradient is taken by; the others are frozen."""
        return {leaf for loss in self._losses for leaf in loss.moved}

    @cached_property
    def _joint_dims(self) -> Mapping[int, Sequence[int | None]]:
        """Which dims of what the losses take, besides weights, are the batch."""
        first = [loss.operands_of(self._weights) for loss in self._losses]
        pairs = enumerate(zip(self._losses, first, strict=True), 1)
        return {at: [dim for n, dim in enumerate(loss.dims) if n not in own] for at, (loss, own) in pairs}

    @cached_property
    def _reads(self) -> RowReads:
        return row_reads(self._joint, divided=self._joint_dims)

    @cached_property
    def _sparse(self) -> Mapping[str, int]:
        """The weights that are read by rows known before the loss, and how many ids all samples share."""
        names = [name for name, _ in named_leaves(self._joint.in_specs[0])]
        known = dict(zip(names, (self._names[leaf] for leaf in self._weights), strict=True))
        return {known[name]: self._reads.shared[name] for name in self._reads.sparse}

    # Which leaves are what

    def _seeds(self, inputs: Sequence[int], leaves: Any) -> list[Like | None]:
        return [Like(at) if at in leaves else None for at in inputs]

    def _weights_of(self, loss: _Loss) -> Iterator[int]:
        for at, like in enumerate(loss.likes):
            if like is None:
                continue
            unchanged = self.split.outputs[like.leaf] == Origin("input", like.leaf)
            is_float = jnp.issubdtype(self._specs[like.leaf].dtype, jnp.floating)
            if at < loss.kept.num_gradients or (like.itself and unchanged and is_float):
                yield like.leaf

    def _find_followers(self) -> dict[int, int]:
        first, _ = find_likes(self.split.gradients.closed, self._seeds(self.split.gradient_inputs, self._weights))
        seeds = [*self._seeds(self.split.apply_inputs, self._weights), *(first[at] for at in self.split.carried)]
        second, _ = find_likes(self.split.apply.closed, seeds)
        found: dict[int, int] = {}
        for leaf in range(len(self._specs)):
            origin = self.split.outputs[leaf]
            likes = {"input": {}, "gradients": dict(enumerate(first)), "apply": dict(enumerate(second))}[origin.part]
            like = likes.get(origin.at)
            if like is not None and leaf not in self._weights:
                found[leaf] = like.leaf
        return found

    def _is_unread(self, leaf: int) -> bool:
        return leaf not in self.split.gradient_inputs

    # What is compiled

    def parts(
        self, mesh: Mesh, plan: Plan, *, out_of_range: OutOfRange = "as jax"
    ) -> tuple[Callable[..., list[Any]], Part, list[Any], list[Any], list[int]]:
        """Returns the two functions, and how what they give lies.

        **Arguments:** `out_of_range`: with "raise" the first gives one result more where tables are by rows, int32
        `[tables]`: how many ids no row has.

        **Returns:** gradients and apply, of flat arrays; the shardings of the outputs of each; which variables of the
        plan the tables are.
        """
        split, layouts = self.split, layouts_of(plan)
        rules = {loss.kept.path: self._rule(loss, layouts, mesh, plan, out_of_range) for loss in self._losses}
        tables = sorted({leaf for rule in rules.values() for leaf in rule.tables})

        def first(*inputs: Any) -> list[Any]:
            told = {path: Rule(rule) for path, rule in rules.items()}
            outputs, wrong = evaluate(split.gradients.closed, told, inputs)
            if out_of_range != "raise" or not tables:
                return outputs
            counts = dict.fromkeys(tables, jnp.zeros((), jnp.int32))
            for path, rule in rules.items():
                for at, leaf in enumerate(rule.tables):
                    counts[leaf] += jnp.sum(wrong[path][..., at])
            return [*outputs, jnp.stack([*counts.values()])]

        gradients = _as_program(split.gradients)
        of_first = batch_dims_of_results(gradients, {0: self._given_dims})
        given = [0 if at >= len(self._specs) else None for at in split.apply_inputs]
        given += [of_first[at] for at in split.carried]
        of_second = batch_dims_of_results(_as_program(split.apply), {0: given})
        first_out = [
            _sharding(mesh, plan, aval, dim, None if like is None else layouts[like.leaf])
            for aval, dim, like in zip(split.gradients.closed.out_avals, of_first, self._first_likes, strict=True)
        ]
        second_out = [
            _sharding(mesh, plan, aval, dim, None)
            for aval, dim in zip(split.apply.closed.out_avals, of_second, strict=True)
        ]
        for origin, layout in zip(split.outputs, layouts, strict=False):  # the state comes first
            if origin.part != "input":
                (first_out if origin.part == "gradients" else second_out)[origin.at] = sharding_of(layout, mesh)
        return first, split.apply, first_out, second_out, tables

    def _rule(
        self, loss: _Loss, layouts: Sequence[Layout], mesh: Mesh, plan: Plan, out_of_range: OutOfRange
    ) -> KeptLoss:
        """Returns what stands in place of a gradient where weights lie as the plan says."""
        lying = [leaf for leaf, layout in enumerate(layouts) if layout.moving or layout.is_split or layout.by_rows]
        by = range(loss.kept.num_gradients)
        first = [*by, *(at for at in loss.operands_of([*self._weights, *lying]) if at not in by)]
        leaves = {at: like.leaf for at in first if (like := loss.likes[at]) is not None}
        pieces = None
        if self._microbatches > 1:
            pieces = KeptMicrobatches(loss.kept, loss.one, first, loss.dims, self._num_samples, self._microbatches)
        return KeptLoss(loss.kept, first, leaves, loss.dims, mesh, plan, out_of_range=out_of_range, pieces=pieces)


def _alike(kept: Sequence[Kept], one: Program, microbatches: int) -> list[Kept]:
    """Returns the same gradients as a step takes them of a microbatch. **Raises:** `ArgumentError` when it does not."""
    if not kept:
        raise ArgumentError(
            f"microbatches is {microbatches}, and the step takes no gradient that can be divided, such as one of each "
            f"sample in a vmap: leave it out, or take the gradient of a mean over the batch"
        )
    found = find_kept(split_at_marks(one).gradients.closed.jaxpr)
    forms = [[(each.num_gradients, len(each.equation.invars)) for each in some] for some in (kept, found)]
    if forms[0] != forms[1]:
        raise ArgumentError(
            f"microbatches is {microbatches}, and the step takes other gradients of a microbatch than of the batch: "
            f"what it does must not depend on the number of samples"
        )
    return found


def sharding_of(layout: Layout, mesh: Mesh) -> NamedSharding:
    """Returns where a leaf of the state lies, which keeps its shape: of a table by rows, consecutive ones."""
    return replace(layout, fed="no").sharding(mesh)


def _as_program(part: Part) -> Program:
    def specs(avals: Sequence[Any]) -> list[Any]:
        return [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]

    return Program(part.closed, (specs(part.closed.in_avals),), specs(part.closed.out_avals))


def _sharding(mesh: Mesh, plan: Plan, aval: Any, dim: int | None, layout: Layout | None) -> NamedSharding:
    """Of a value that lies like a leaf, or is divided along the dim of the batch; else it is replicated."""
    if layout is not None:
        return sharding_of(layout, mesh)
    return along_batch(mesh, plan.batch_axes, aval.shape, dim)
