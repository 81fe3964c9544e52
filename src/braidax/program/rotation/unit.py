"""A unit: a call that is computed part by part, as the parts of its weights come by."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend.core import Jaxpr, Var

from braidax.program.bodies import aval_of

from .labels import BATCH
from .parts import Divided, Division, Evaluation, Part

WEIGHTS = 1
"""The number of the division of weights; `BATCH` is that of samples."""


@dataclass(frozen=True)
class RotatedWeight:
    """An input of a unit that comes in parts. **Fields:** `leaf`; `dims`: which dim of it each dim is, if that is
    known; `divided`: the dim that is in parts."""

    leaf: int
    dims: tuple[int, ...] | None
    divided: int


@dataclass(frozen=True)
class RotatedUnit:
    """A call that can be computed part by part.

    **Fields:** `name`. `weights`: by number, which of its inputs come in parts. `batch`: for each input the dim of the
    samples, and `batch_out` for each output. `stacked`: for each output the dim of which each part gives one part;
    None where parts are summed. `size`: of the dim that is divided, where it is padded. `jaxpr`: what it computes.
    `tops`: values of it that are maxima over all parts, and `batch_of_tops` their dims of samples. `scales`: for an
    output that is a sum of `exp(x - m)`, the value `m`. `of_tops`: outputs that follow from maxima alone.
    """

    name: str
    weights: Mapping[int, RotatedWeight]
    batch: tuple[int | None, ...]
    batch_out: tuple[int | None, ...]
    stacked: tuple[int | None, ...]
    size: int | None
    jaxpr: Jaxpr
    tops: tuple[Var, ...]
    scales: Mapping[int, Var] = field(default_factory=dict[int, Var])
    of_tops: frozenset[int] = frozenset()
    batch_of_tops: tuple[int, ...] = ()

    @property
    def outputs(self) -> list[Var]:
        """The values that it gives."""
        return [atom for atom in self.jaxpr.outvars if isinstance(atom, Var)]

    def maxima(self, args: Sequence[Any], weights: Division, batch: Division) -> list[Any]:
        """Returns maxima over one part."""
        one = self.evaluation(weights, batch)
        one.run(self.jaxpr, (), self.parts(args))
        return [one.found[top] for top in self.tops]

    def part(self, args: Sequence[Any], weights: Division, batch: Division, maxima: Sequence[Any] = ()) -> list[Any]:
        """Returns what one part gives for each output but those that follow from maxima alone, for which it has None.

        **Arguments:** `args`: weights in their part, samples in theirs, all else whole. `maxima`: over all parts that
        were seen; sums are relative to them.
        """
        known = self.evaluation(weights, batch, maxima).run(self.jaxpr, (), self.parts(args))
        return [None if at in self.of_tops else known[var].value for at, var in enumerate(self.outputs)]

    def of_maxima(
        self, args: Sequence[Any], weights: Division, batch: Division, maxima: Sequence[Any]
    ) -> tuple[dict[int, Any], dict[int, Any]]:
        """Returns, by the number of an output, what follows from maxima alone; and what sums are relative to."""
        known = self.evaluation(weights, batch, maxima).run(self.jaxpr, (), self.parts(args))
        shapes = {at: known[self.outputs[at]].value.shape for at in self.scales}
        scales = {at: known[var].value.reshape(shapes[at]) for at, var in self.scales.items()}
        return {at: known[self.outputs[at]].value for at in self.of_tops}, scales

    def evaluation(self, weights: Division, batch: Division, maxima: Sequence[Any] | None = None) -> Evaluation:
        told = None if maxima is None else dict(zip(self.tops, maxima, strict=True))
        return Evaluation({WEIGHTS: weights, BATCH: batch}, told, self.tops)

    def parts(self, args: Sequence[Any]) -> list[Part]:
        return [Part(value, self.divided(at), given=at) for at, value in enumerate(args)]

    def ndim(self, at: int) -> int:
        """Returns how many dims an input has."""
        return aval_of(self.jaxpr.invars[at]).ndim

    def divided(self, at: int) -> Divided:
        weight = self.weights.get(at)
        dims: list[int | None] = [None] * self.ndim(at)
        if (dim := self.batch[at]) is not None:
            dims[dim] = BATCH
        if weight is not None:
            dims[weight.divided] = WEIGHTS
        return tuple(dims)
