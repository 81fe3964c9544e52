"""What mixes samples: statistics over the batch that go back into what is computed of each sample."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import JaxprEqn
from jax.extend.core import primitives as p
from jax.extend.core.primitives import custom_jvp_call_p, custom_vjp_call_p

from braidax.program.batch_dims import BatchDims, Dim, batch_seeds
from braidax.program.bodies import Path
from braidax.program.flow import Place, flow
from braidax.program.kinds import CUMULATIVE, REDUCTIONS
from braidax.program.lines import line_of
from braidax.program.trace import Program


class Mixing(NamedTuple):
    """An equation by which the result of one sample depends on others.

    **Fields:** `path`, and the user's `line`. `trained`: whether the statistic depends on parameters, so that it cannot
    be computed before anything else.
    """

    path: Path
    line: str
    trained: bool


def find_mixing(program: Program, divided: Mapping[int, Sequence[Dim] | int], params: int = 0) -> tuple[Mixing, ...]:
    """Finds where a program mixes samples, as batch normalization does; means that only go into its outputs do not.

    Dims of the batch are followed as by `find_batch_dims`: what no rule covers is not found.

    **Arguments:** `divided`: as of `find_batch_dims`. `params`: the number of the argument that is trained.

    **Returns:** the equations in which statistics of the batch meet single samples, in the order of the program.
    """
    facts = _Mixed()
    first, count = (len(jax.tree.leaves(one)) for one in (program.in_specs[:params], program.in_specs[params]))
    trained = range(first, first + count)
    seeds = [_Fact(dim, at in trained).or_none() for at, dim in enumerate(batch_seeds(program, divided))]
    flow(program.closed.jaxpr, seeds, facts)
    return tuple(sorted(facts.found.values()))


class _Fact(NamedTuple):
    """Of a value: which dim goes along the samples, and whether it depends on parameters, and on all samples."""

    dim: Dim
    trained: bool = False
    mixed: bool = False

    def or_none(self) -> "_Fact | None":
        """None where it says nothing."""
        return self if self != _NOTHING else None


_NOTHING = _Fact(None)


class _Mixed:
    """Follows the facts."""

    def __init__(self) -> None:
        self.found: dict[Path, Mixing] = {}
        self._dims = BatchDims({})

    def through(self, equation: JaxprEqn, facts: Sequence[_Fact | None], place: Place) -> Sequence[Any]:
        if equation.primitive in (custom_jvp_call_p, custom_vjp_call_p):
            inner = _Mixed()
            results = flow(equation.params["call_jaxpr"].jaxpr, facts, inner)
            for one in inner.found.values():
                self._record(equation, place, one.trained)
            return results
        known = [_NOTHING if one is None else one for one in facts]
        dims = [one.dim for one in known]
        trained = any(one.trained for one in known)
        meets = any(one.mixed for one in known) and any(dim is not None for dim in dims)
        if meets or _mixes_at_once(equation, dims):
            self._record(equation, place, trained if not meets else any(one.mixed and one.trained for one in known))
        mixed = not meets and (any(one.mixed for one in known) or _sums(equation, dims))
        found = self._dims.through(equation, dims, place) if any(dim is not None for dim in dims) else None
        made = [None] * len(equation.outvars) if found is None else found
        return [_Fact(dim, trained, mixed).or_none() for dim in made]

    def _record(self, equation: JaxprEqn, place: Place, trained: bool) -> None:
        self.found[place.path] = Mixing(place.path, line_of(place.source or equation.source_info), trained)

    def into(self, equation: JaxprEqn, operand: int, fact: _Fact, place: Place) -> Any:
        dim = None if fact.dim is None else self._dims.into(equation, operand, fact.dim, place)
        return fact._replace(dim=dim).or_none()

    def out_of(self, equation: JaxprEqn, result: int, fact: _Fact, place: Place) -> Any:
        dim = None if fact.dim is None else self._dims.out_of(equation, result, fact.dim, place)
        return fact._replace(dim=dim).or_none()

    def join(self, one: _Fact | None, other: _Fact | None) -> Any:
        if one is None or other is None:
            return one or other
        return _Fact(self._dims.join(one.dim, other.dim), one.trained or other.trained, one.mixed or other.mixed)


def _sums(equation: JaxprEqn, dims: Sequence[Dim]) -> bool:
    """Whether a result is of all samples, and of no single one."""
    if equation.primitive in REDUCTIONS:
        return dims[0] is not None and dims[0] in equation.params["axes"]
    if equation.primitive is p.dot_general_p:
        contracted, _ = equation.params["dimension_numbers"]
        return any(dim is not None and dim in gone for dim, gone in zip(dims, contracted, strict=True))
    return False


def _mixes_at_once(equation: JaxprEqn, dims: Sequence[Dim]) -> bool:
    """Whether an equation makes results of single samples of several."""
    if equation.primitive in CUMULATIVE:
        return dims[0] is not None and dims[0] == equation.params["axis"]
    if equation.primitive is p.sort_p:
        return equation.params["dimension"] in dims
    if equation.primitive is p.dot_general_p:
        contracted, batched = equation.params["dimension_numbers"]
        sides = zip(dims, contracted, batched, strict=True)
        return all(dim is not None and dim not in (*gone, *kept) for dim, gone, kept in sides)
    return False
