"""A unit: a call that is computed part by part, as the parts of its weights come by."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, Var

from braidax.program.bodies import aval_of

from .division import Division
from .labels import BATCH
from .parts import Divided, Evaluation, Part

WEIGHTS = 1
"""The number of the division of weights; `BATCH` is that of samples."""


@dataclass(frozen=True)
class RotatedWeight:
    """An input of a unit that comes in parts. **Fields:** `leaf`; `dims`: which dim of it each dim is, if that is
    known; `divided`: the dim that is in parts."""

    leaf: int
    dims: tuple[int, ...] | None
    divided: int


class Taken(NamedTuple):
    """How a unit takes an input.

    **Fields:** `batch`: the dim of the samples. `cut`: of what comes whole, the dim of which a part is taken at once.
    """

    batch: int | None
    cut: int | None


class Result(NamedTuple):
    """What a unit gives. **Fields:** `batch`: the dim of the samples. `stacked`: the dim of which each part gives one
    part; None where parts are summed."""

    batch: int
    stacked: int | None


class Maxima(NamedTuple):
    """What is known of maxima over all parts.

    **Fields:** `batch`: their dims of the samples. `shifts`: for an output that is a sum of `exp(x - m)`, the value
    `m`. `outputs`: those that follow from maxima alone.
    """

    batch: tuple[int, ...]
    shifts: Mapping[int, Var]
    outputs: frozenset[int]


class Length(NamedTuple):
    """Of the dim that is divided, and of products by it. **Fields:** `padded`: its size, where it is padded.
    `num_slices`: into how many a part is cut again, each of which goes around alone. `num_joined`: how many parts go
    around as one; `is_ordered`: whether these must lie as in the whole. `in_order`: whether gradients of products are
    made in the order of a weight's dims. `keeps`: products that the backward pass does not compute again, and their
    dims of the samples."""

    padded: int | None = None
    num_slices: int = 1
    num_joined: int = 1
    is_ordered: bool = True
    in_order: bool = False
    keeps: Mapping[Var, int] = MappingProxyType({})


@dataclass(frozen=True)
class RotatedUnit:
    """A call that can be computed part by part.

    **Fields:** `name`; `jaxpr`: what it computes. `weights`: by number, which of its inputs come in parts; `taken`: of
    each input, how. `length`: of the dim that is divided. `tops`: values of it that are maxima over all parts.
    `results`: of each output what is known, `maxima`: of those.
    """

    name: str
    jaxpr: Jaxpr
    weights: Mapping[int, RotatedWeight]
    taken: tuple[Taken, ...]
    length: Length
    tops: tuple[Var, ...]
    results: tuple[Result, ...] = ()
    maxima: Maxima = field(default_factory=lambda: Maxima((), {}, frozenset()))

    @property
    def size(self) -> int | None:
        """Of the dim that is divided, where it is padded."""
        return self.length.padded

    @property
    def num_slices(self) -> int:
        """Into how many a part is cut again."""
        return self.length.num_slices

    @property
    def num_joined(self) -> int:
        """How many parts are taken as one."""
        return self.length.num_joined

    @property
    def keeps(self) -> Mapping[Var, int]:
        """Products that the backward pass does not compute again, and their dims of the samples."""
        return self.length.keeps

    @property
    def batch(self) -> list[int | None]:
        """Of each input the dim of the samples."""
        return [one.batch for one in self.taken]

    @property
    def outputs(self) -> list[Var]:
        """The values that it gives."""
        return [atom for atom in self.jaxpr.outvars if isinstance(atom, Var)]

    def maxima_of(self, args: Sequence[Any], weights: Division, batch: Division) -> list[Any]:
        """Returns maxima over one part."""
        one = self.evaluation(weights, batch)
        self.run(one, args)
        return [one.found[top] for top in self.tops]

    def kept_of(self, args: Sequence[Any], weights: Division, batch: Division) -> list[Any]:
        """Returns the products of one part that are kept."""
        known = self.run(self.evaluation(weights, batch), args) if self.keeps else {}
        return [known[var].value for var in self.keeps]

    def part(
        self,
        args: Sequence[Any],
        weights: Division,
        batch: Division,
        maxima: Sequence[Any] = (),
        kept: Sequence[Any] = (),
    ) -> list[Any]:
        """Returns what one part gives for each output but those that follow from maxima alone, for which it has None.

        **Arguments:** `args`: weights in their part, samples in theirs, all else whole. `maxima`: over all parts that
        were seen; sums are relative to them.
        """
        one = self.evaluation(weights, batch, maxima)
        known = self.run(replace(one, products=dict(zip(self.keeps, kept, strict=False))), args)
        return [None if at in self.maxima.outputs else known[var].value for at, var in enumerate(self.outputs)]

    def of_maxima(
        self, args: Sequence[Any], weights: Division, batch: Division, maxima: Sequence[Any]
    ) -> tuple[dict[int, Any], dict[int, Any]]:
        """Returns, by the number of an output, what follows from maxima alone; and what sums are relative to."""
        known = self.run(self.evaluation(weights, batch, maxima), args)
        shapes = {at: known[self.outputs[at]].value.shape for at in self.maxima.shifts}
        scales = {at: known[var].value.reshape(shapes[at]) for at, var in self.maxima.shifts.items()}
        return {at: known[self.outputs[at]].value for at in self.maxima.outputs}, scales

    def evaluation(self, weights: Division, batch: Division, maxima: Sequence[Any] | None = None) -> Evaluation:
        """Returns one that has not run. **Arguments:** `maxima`: None where they are taken over the part."""
        told = None if maxima is None else dict(zip(self.tops, maxima, strict=True))
        return Evaluation({WEIGHTS: weights, BATCH: batch}, told, self.tops, in_order=self.length.in_order)

    def run(self, one: Evaluation, args: Sequence[Any]) -> dict[Var, Part]:
        """Evaluates the unit. **Returns:** every value of it."""
        parts: list[Part] = []
        for at, (value, taken) in enumerate(zip(args, self.taken, strict=True)):
            part = Part(value, self.divided(at), given=at)
            parts.append(part if taken.cut is None else one.part_of(part, taken.cut, WEIGHTS))
        return one.run(self.jaxpr, (), parts)

    def ndim(self, at: int) -> int:
        """Returns how many dims an input has."""
        return aval_of(self.jaxpr.invars[at]).ndim

    def divided(self, at: int) -> Divided:
        """Returns how the dims of an input are divided."""
        weight = self.weights.get(at)
        dims: list[int | None] = [None] * self.ndim(at)
        if (dim := self.batch[at]) is not None:
            dims[dim] = BATCH
        if weight is not None:
            dims[weight.divided] = WEIGHTS
        return tuple(dims)
