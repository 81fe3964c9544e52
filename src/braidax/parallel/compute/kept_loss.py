"""A loss in the middle of a traced step: how it is differentiated where its weights lie on a mesh."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

import jax
from jax.sharding import Mesh

from braidax.parallel.dense.passes import last_behind, summed_once
from braidax.parallel.plan.plan import Plan
from braidax.parallel.rows.options import OutOfRange
from braidax.program import Equation, Kept, with_sums_behind_loops

from .accumulate import averaged, wide, wide_zeros
from .kept_microbatches import KeptMicrobatches
from .laid_out import laid_out


class _Found(NamedTuple):
    """What a run of a loss gives: `values`; gradients by operand, and of parts; ids that no row has, of each table."""

    values: list[Any]
    gradients: dict[int, Any]
    parts: tuple[Any, ...]
    out_of_range: Any


@final
class KeptLoss:
    """Stands in place of a kept gradient.

    **Arguments:** `kept`: the gradient. `first`: the operands that are weights, those that it is taken by in front.
    `leaves`: of which variable of the plan each of them is one, by number. `dims`: of all operands, which one is the
    batch. `pieces`: how it is computed in microbatches, if there are several.
    """

    def __init__(
        self,
        kept: Kept,
        first: Sequence[int],
        leaves: Mapping[int, int],
        dims: Sequence[int | None],
        mesh: Mesh,
        plan: Plan,
        *,
        out_of_range: OutOfRange = "as jax",
        pieces: KeptMicrobatches | None = None,
    ) -> None:
        program = (kept if pieces is None else pieces.kept).program(first)
        self._first, self._num_gradients, self._pieces = tuple(first), kept.num_gradients, pieces
        numbers = {number: leaves[at] for number, at in enumerate(first) if at in leaves}
        others = [dim for at, dim in enumerate(dims) if at not in first]
        laid = laid_out(program, numbers, others, mesh, plan, out_of_range)
        program, self._tables, self._given = laid.program, laid.tables, laid.given
        self.tables = laid.names
        """The variables whose rows are exchanged."""
        self._in_parts, lies = None, (laid.layouts, mesh, plan.batch_axes, laid.divided)
        still = [at for at, number in enumerate(self._given) if number >= self._num_gradients]
        if pieces is None:
            program = last_behind(program, *lies, frozen=still)
        else:
            self._in_parts = summed_once(program, *lies, frozen=still)
            program = program if self._in_parts is None else self._in_parts.program
        if (laid.is_split or pieces is not None) and mesh.size > 1:
            program = with_sums_behind_loops(program, laid.divided)
        self._program, self._counts = program, bool(laid.names) and out_of_range == "raise"

    def __call__(self, equation: Equation, inputs: Sequence[Any], fed: Any = None) -> tuple[list[Any], Any]:
        """Returns what the equation gives, and for each of `tables` how many ids no row has: a rule of `evaluate`."""
        weights = [inputs[at] for at in self._first]
        others = [one for at, one in enumerate(inputs) if at not in self._first]
        found = self._once(weights, others) if self._pieces is None else self._summed(weights, others, self._pieces)
        gradients = [found.gradients[number] for number in range(self._num_gradients)]
        return [*found.values, *(jax.lax.convert_element_type(one, one.dtype) for one in gradients)], found.out_of_range

    def _once(self, weights: Sequence[Any], others: Sequence[Any], parts: tuple[Any, ...] = ()) -> _Found:
        alone = {self._given[at] for at in self._in_parts.alone} if self._in_parts else set[int]()
        moved = {at: weights[at] for at in self._given if at < self._num_gradients and at not in alone}
        pulled = None if self._tables is None else self._tables.pull(weights, others)

        def loss(moved: dict[int, Any], rows: Any, parts: Any) -> Any:
            given = [moved.get(at, weights[at]) if at in self._given else None for at in range(len(weights))]
            more = (*((rows,) if self._tables else ()), *((parts,) if self._in_parts else ()))
            value, *found = self._program(given, list(others), *more)
            return value, found

        wanted = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)
        rows = () if pulled is None else pulled.rows
        (value, values), (gradients, of_rows, of_parts) = wanted(moved, rows, parts)
        if self._tables is None or pulled is None:
            return _Found([value, *values], gradients, of_parts, None)
        gradients |= self._tables.gradients(pulled.routes, of_rows)
        wrong = pulled.out_of_range if self._counts else None
        return _Found([value, *values], gradients, of_parts, wrong)

    def _summed(self, weights: Sequence[Any], others: Sequence[Any], pieces: KeptMicrobatches) -> _Found:
        """The same, of the mean over microbatches that run one after another."""
        in_parts, given = self._in_parts, self._given
        alone = {given[at] for at in in_parts.alone} if in_parts else set[int]()
        summed = [at for at in range(self._num_gradients) if at not in alone]
        parts = () if in_parts is None else in_parts.zeros()
        begun = {at: wide_zeros(weights[at]) for at in summed}, tuple(map(wide, parts)), pieces.no_scalars()

        def one(sums: Any, piece: Any) -> Any:
            found = self._once(weights, pieces.others(others, piece), parts)
            scalars, along = pieces.parted(found.values)
            new = {at: found.gradients[at] for at in summed}, found.parts, scalars
            return jax.tree.map(lambda total, leaf: total + leaf.astype(total.dtype), sums, new), (
                along,
                found.out_of_range,
            )

        (gradients, of_parts, scalars), (along, wrong) = jax.lax.scan(one, begun, pieces.of(others))
        every: list[Any] = [gradients.get(at) for at in given]
        if in_parts is not None:
            every = in_parts.summed(of_parts, every)
        gradients |= {at: total for at, total in zip(given, every, strict=True) if total is not None}
        mean = {at: averaged(total, weights[at], pieces.microbatches) for at, total in gradients.items()}
        return _Found(pieces.results(scalars, along), mean, (), jax.tree.map(lambda leaf: leaf.sum(0), wrong))
