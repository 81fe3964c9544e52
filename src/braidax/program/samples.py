"""Which uses of a leaf have to do with samples: a penalty on a weight has not, and one that is scaled first has."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.extend.core import JaxprEqn

from .batch_dims import batch_seeds
from .bodies import Path, aval_of
from .flow import Place, flow
from .kinds import ARGUMENTS, REDUCTIONS
from .trace import Program


class _Made(NamedTuple):
    """Of what a value is made. **Fields:** `of_samples`: of any. `uses`: of leaves, that samples have not met yet."""

    of_samples: bool = False
    uses: frozenset[Path] = frozenset()


def find_meetings(
    program: Program, uses: Collection[Path], divided: Mapping[int, Sequence[int | None] | int], argument: int = 0
) -> dict[Path, bool]:
    """Returns which uses of leaves samples meet.

    **Arguments:** `uses`: paths of equations that use leaves of one argument, whose number is `argument`. `divided`: as
    of `find_batch_dims`.

    **Returns:** by path, of those that samples meet, whether they do there; else they meet what is made there, which is
    no sum.
    """
    dims = batch_seeds(program, divided)
    skipped = len(jax.tree.leaves(program.in_specs[:argument]))
    leaves = range(skipped, skipped + len(jax.tree.leaves(program.in_specs[argument])))
    seeds = [_Made(dim is not None) if at in leaves or dim is not None else None for at, dim in enumerate(dims)]
    found = _Meetings(frozenset(uses), {})
    flow(program.closed.jaxpr, seeds, found)
    return found.found


@dataclass(frozen=True)
class _Meetings:
    asked: frozenset[Path]
    found: dict[Path, bool]

    def through(self, equation: JaxprEqn, facts: Sequence[Any], place: Place) -> Sequence[Any]:
        made, asked = [one or _Made() for one in facts], {place.path} & self.asked
        sizes = [getattr(aval_of(atom), "size", 1) for atom in equation.invars]
        of_samples, uses = any(one.of_samples for one in made), {path for one in made for path in one.uses}
        if any(one.of_samples and size > 1 for one, size in zip(made, sizes, strict=True)):
            self.found.update(dict.fromkeys(uses - {*self.found}, False))
            self.found.update(dict.fromkeys(asked, True))
            uses, asked = set[Path](), set[Path]()
        is_less = equation.primitive in REDUCTIONS | ARGUMENTS
        return [_Made(of_samples, frozenset() if is_less else frozenset(uses | asked))] * len(equation.outvars)

    def into(self, equation: JaxprEqn, operand: int, fact: Any, place: Place) -> Any:
        if place.path in self.asked:
            self.found[place.path] = True
        return fact

    def out_of(self, equation: JaxprEqn, result: int, fact: Any, place: Place) -> Any:
        return fact

    def join(self, one: Any, other: Any) -> Any:
        if one is None or other is None:
            return one or other
        return _Made(one.of_samples or other.of_samples, one.uses | other.uses)
