"""What a decorated step computes, before it is compiled: two parts, in the global view, cut where gradients are."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from braidax.errors import ArgumentError
from braidax.parallel.dense.passes import dense_passes
from braidax.parallel.plan.batch import along_batch, batch_axes
from braidax.parallel.plan.layout import Layout
from braidax.parallel.plan.model import Model
from braidax.parallel.plan.placements import Replicated
from braidax.parallel.plan.plan import Plan, PlannedVariable, layouts_of, make_plan
from braidax.parallel.plan.strategy import Strategy, num_bytes
from braidax.program import (
    Kept,
    LeafUses,
    Like,
    Origin,
    Part,
    Program,
    Site,
    batch_dims_of_results,
    evaluate,
    find_batch_dims,
    find_dims_in_pieces,
    find_kept,
    find_likes,
    find_sites,
    find_uses,
    gradients_of,
    named_leaves,
    split_at_marks,
    trace,
    with_sums_behind_loops,
)

_DECORATED = (
    "by rows in the gradients of a decorated step, whose optimizer moves it whole; give the loss and the optimizer to "
    "parallelize, and its rows are exchanged"
)


@dataclass(frozen=True)
class _Loss:
    """A gradient that a step takes. **Fields:** `likes`: the leaves of the state that its operands are like."""

    kept: Kept
    likes: tuple[Like | None, ...]

    def operands_of(self, leaves: Sequence[int] | Mapping[int, Any]) -> list[int]:
        """Returns the operands that are like one of some leaves, in order."""
        return [at for at, like in enumerate(self.likes) if like is not None and like.leaf in leaves]


class TracedStep:
    """A whole step, traced with its gradients kept: `(state, batch) -> (state, metrics)`.

    The state's *weights* are what a gradient is taken by, and what a loss reads and the step never changes. A leaf that
    has an element for each element of a weight, such as Adam's moments, *follows* it: it lies as the weight does.
    """

    def __init__(self, program: Program) -> None:
        self.program, self.split = program, split_at_marks(program)
        state, batch = program.in_specs
        self._names: list[str] = [name for name, _ in named_leaves(state, "state")]
        self._specs: list[Any] = jax.tree.leaves(state)
        self._num_inputs = len(self._specs) + len(jax.tree.leaves(batch))
        gradients = self.split.gradients.closed
        kept = find_kept(gradients.jaxpr)
        _, likes = find_likes(gradients, self._seeds(self.split.gradient_inputs, range(len(self._specs))))
        losses = [_Loss(one, likes.get(one.path, (None,) * len(one.equation.invars))) for one in kept]
        self._weights = sorted({leaf for loss in losses for leaf in self._weights_of(loss)})
        _, likes = find_likes(gradients, self._seeds(self.split.gradient_inputs, self._weights))
        self._follows = self._find_followers()
        seeds = self._seeds(self.split.gradient_inputs, {**self._follows, **{leaf: leaf for leaf in self._weights}})
        self._first_likes, likes = find_likes(gradients, seeds)
        self._losses = [replace(loss, likes=likes.get(loss.kept.path, loss.likes)) for loss in losses]

    # What a plan is made of

    def plan(self, mesh: Mesh, strategies: Mapping[str, Strategy]) -> Plan:
        """Lets strategies place the weights; what follows one lies as it does, and all else is replicated.

        **Raises:** `ArgumentError` naming a variable that cannot lie as it is told.
        """
        axes = batch_axes(mesh, strategies)
        model = Model(
            {self._names[leaf]: self._specs[leaf] for leaf in self._weights},
            math.prod(mesh.shape[axis] for axis in axes),
            find_uses=self._uses,
            find_sites=self._sites,
            find_dims=lambda: find_dims_in_pieces(self._joint),
            no_rows=lambda path: _DECORATED,
        )
        placed = make_plan(mesh, strategies, model)
        for variable, layout in zip(placed.variables, layouts_of(placed), strict=True):
            if any(layout.padding):
                raise ArgumentError(
                    f"{variable.path} {list(variable.shape)} would be padded, and the state of a decorated step keeps "
                    f"its shapes: place it on a dim that its axes divide"
                )
        known = {variable.path: variable for variable in placed.variables}
        return replace(placed, variables=tuple(self._planned(leaf, known, placed) for leaf in range(len(self._names))))

    def _planned(self, leaf: int, known: Mapping[str, PlannedVariable], plan: Plan) -> PlannedVariable:
        name, spec = self._names[leaf], self._specs[leaf]
        if name in known:
            return known[name]
        placements = tuple(Replicated() for _ in plan.axes)
        why = "no gradient uses it" if self._is_unread(leaf) else "no gradient is taken by it as it stands in the state"
        if leaf in self._follows:
            leader = known[self._names[self._follows[leaf]]]
            placements, why = leader.placements, f"follows {leader.path}"
        return PlannedVariable(name, tuple(spec.shape), str(spec.dtype), num_bytes(spec), placements, why)

    @cached_property
    def _joint(self) -> Program:
        """All losses as one program, whose first argument is the list of weights."""
        number = {leaf: at for at, leaf in enumerate(self._weights)}
        firsts = [loss.operands_of(self._weights) for loss in self._losses]
        programs = [loss.kept.program(first) for loss, first in zip(self._losses, firsts, strict=True)]

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

    def _by_name(self, found: Sequence[Any]) -> dict[str, Any]:
        return dict(zip((self._names[leaf] for leaf in self._weights), found, strict=True))

    def _sites(self) -> Mapping[str, Sequence[Site]]:
        found: list[list[Site]] = [[] for _ in self._weights]
        for site in find_sites(self._joint):
            found[site.value.entry.leaf].append(site)
        return self._by_name(found)

    def _uses(self) -> Mapping[str, LeafUses]:
        return self._by_name(find_uses(self._joint))

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

    def parts(self, mesh: Mesh, plan: Plan) -> tuple[Callable[..., list[Any]], Part, list[Any], list[Any]]:
        """Returns the two functions, and how what they give lies.

        **Returns:** gradients and apply, of flat arrays; then the shardings of the outputs of each.
        """
        split, layouts = self.split, layouts_of(plan)
        given: list[int | None] = [0 if at >= len(self._specs) else None for at in split.gradient_inputs]
        gradients = _as_program(split.gradients)
        dims = find_batch_dims(gradients, {loss.kept.path for loss in self._losses}, {0: given})
        rules = {
            loss.kept.path: partial(_differentiated, *self._passed(loss, layouts, mesh, plan, dims[loss.kept.path]))
            for loss in self._losses
        }

        def first(*inputs: Any) -> list[Any]:
            return evaluate(split.gradients.closed, rules, inputs)[0]

        of_first = batch_dims_of_results(gradients, {0: given})
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
                (first_out if origin.part == "gradients" else second_out)[origin.at] = layout.sharding(mesh)
        return first, split.apply, first_out, second_out

    def _passed(
        self, loss: _Loss, layouts: Sequence[Layout], mesh: Mesh, plan: Plan, dims: Sequence[int | None]
    ) -> tuple[Program, list[int], int]:
        """Returns what a loss becomes where its weights lie as the plan says.

        **Returns:** the program, the operands that are in its first argument, and of how many a gradient is taken.
        """
        lying = [leaf for leaf, layout in enumerate(layouts) if layout.gathered or layout.is_split]
        by = range(loss.kept.num_gradients)
        first = [*by, *(at for at in loss.operands_of([*self._weights, *lying]) if at not in by)]
        program = loss.kept.program(first)
        if not loss.operands_of(lying):
            return program, first, len(by)
        others: list[Any] = [dim for at, dim in enumerate(dims) if at not in first]
        told: list[Layout] = []
        for at, spec in zip(first, program.in_specs[0], strict=True):
            like = loss.likes[at]
            told.append(Layout.whole(spec.shape) if like is None else layouts[like.leaf])
        passed = dense_passes(program, told, mesh, plan.batch_axes, {1: others})
        return with_sums_behind_loops(passed) if mesh.size > 1 else passed, first, len(by)


def _differentiated(
    program: Program, first: Sequence[int], num_gradients: int, equation: Any, inputs: Sequence[Any]
) -> list[Any]:
    others = [one for at, one in enumerate(inputs) if at not in first]
    return gradients_of(program, num_gradients, [inputs[at] for at in first], others)


def _as_program(part: Part) -> Program:
    def specs(avals: Sequence[Any]) -> list[Any]:
        return [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]

    return Program(part.closed, (specs(part.closed.in_avals),), specs(part.closed.out_avals))


def _sharding(mesh: Mesh, plan: Plan, aval: Any, dim: int | None, layout: Layout | None) -> NamedSharding:
    """Of a value that lies like a leaf, or is divided along the dim of the batch; else it is replicated."""
    if layout is not None:
        return layout.sharding(mesh)
    return along_batch(mesh, plan.batch_axes, aval.shape, dim)
