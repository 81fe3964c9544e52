"""Following facts about values through a program: one walk for all analyses, into loops and branches."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.extend.core import Literal as Constant
from jax.extend.core.primitives import jit_p, scan_p, while_p

from .bodies import Body, Path, bodies
from .lines import comes_from_library


@dataclass(frozen=True)
class Place:
    """Where an equation stands.

    **Fields:** `path`. `lengths`: of the scans around it, the outermost first. `in_while`: whether a while is around
    it. `source`: what tells its line instead of itself: the call of a library's jitted function that it is in.
    """

    path: Path = ()
    lengths: tuple[int, ...] = ()
    in_while: bool = False
    source: Any = None


@runtime_checkable
class Facts(Protocol):
    """What is followed: a fact is anything but None, which says that nothing is known of a value."""

    def through(self, equation: JaxprEqn, facts: Sequence[Any], place: Place) -> Sequence[Any]:
        """Returns the facts of the results of an equation that is not entered."""
        ...

    def into(self, equation: JaxprEqn, operand: int, fact: Any, place: Place) -> Any:
        """Returns the fact of an operand as the bodies of its equation have it: of a scan's `xs` that of a slice.

        **Arguments:** `place`: of the equation.
        """
        ...

    def out_of(self, equation: JaxprEqn, result: int, fact: Any, place: Place) -> Any:
        """Returns the fact of a result from what the body gives for it. **Arguments:** `place`: of the equation."""
        ...

    def join(self, one: Any, other: Any) -> Any:
        """Returns what holds of both: of the results of branches, of what a loop carries. Either may be None."""
        ...


def flow(jaxpr: Jaxpr, inputs: Sequence[Any], facts: Facts) -> list[Any]:
    """Follows facts through a jaxpr and all that `bodies` opens.

    What a loop carries is followed until nothing changes: `through` may see an equation several times, the last time
    with what holds.

    **Arguments:** `inputs`: a fact or None for each input. **Returns:** the same of the outputs.
    """
    return _walk(jaxpr, inputs, facts, Place())


def _walk(jaxpr: Jaxpr, inputs: Sequence[Any], facts: Facts, place: Place) -> list[Any]:
    known: dict[Var, Any] = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> Any:
        return None if isinstance(atom, Constant) else known.get(atom)

    for index, equation in enumerate(jaxpr.eqns):
        operands = [read(atom) for atom in equation.invars]
        if any(fact is not None for fact in operands):
            here = replace(place, path=(*place.path, index))
            known.update(zip(equation.outvars, _visit(equation, operands, facts, here), strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _visit(equation: JaxprEqn, operands: Sequence[Any], facts: Facts, here: Place) -> Sequence[Any]:
    inner = bodies(equation)
    if not inner:
        return facts.through(equation, operands, here)
    given = [None if fact is None else facts.into(equation, at, fact, here) for at, fact in enumerate(operands)]
    if equation.primitive in (scan_p, while_p):
        return _loop(equation, inner, given, facts, here)
    results, *others = [
        _leave(equation, _enter(equation, inner, which, given, facts, here), facts, here) for which in range(len(inner))
    ]
    for other in others:
        results = [facts.join(*pair) for pair in zip(results, other, strict=True)]
    return results


def _loop(equation: JaxprEqn, inner: Sequence[Body], given: list[Any], facts: Facts, here: Place) -> list[Any]:
    first, num_carry = carried(equation)
    while True:
        results: list[Any] = []
        for which in range(len(inner)):  # of a while the condition comes first
            results = _enter(equation, inner, which, given, facts, here)
        before = given[first : first + num_carry]
        after = [facts.join(*pair) for pair in zip(before, results[:num_carry], strict=True)]
        if after == before:
            left = _leave(equation, results, facts, here)
            return [*(facts.join(*pair) for pair in zip(before, left[:num_carry], strict=True)), *left[num_carry:]]
        given[first : first + num_carry] = after


def _leave(equation: JaxprEqn, results: Sequence[Any], facts: Facts, here: Place) -> list[Any]:
    return [None if fact is None else facts.out_of(equation, at, fact, here) for at, fact in enumerate(results)]


def _enter(
    equation: JaxprEqn, inner: Sequence[Body], which: int, given: Sequence[Any], facts: Facts, here: Place
) -> list[Any]:
    body, source = inner[which], here.source
    if equation.primitive is jit_p:
        source = (source or equation.source_info) if comes_from_library(body.jaxpr) else None
    place = Place(
        (*here.path, which),
        (*here.lengths, equation.params["length"]) if equation.primitive is scan_p else here.lengths,
        here.in_while or equation.primitive is while_p,
        source,
    )
    return _walk(body.jaxpr, [given[operand] for operand in body.operands], facts, place)


def is_slice(equation: JaxprEqn, operand: int) -> bool:
    """Whether an operand of an equation is one that a scan takes slices of along dim 0, one a step."""
    return equation.primitive is scan_p and operand >= sum(carried(equation))


def is_stack(equation: JaxprEqn, result: int) -> bool:
    """Whether a result of an equation is one that a scan stacks along dim 0, of a slice a step."""
    return equation.primitive is scan_p and result >= equation.params["num_carry"]


def carried(equation: JaxprEqn) -> tuple[int, int]:
    """Returns the first operand of a scan or a while that is carried, and how many are."""
    params = equation.params
    if equation.primitive is scan_p:
        return params["num_consts"], params["num_carry"]
    first = params["cond_nconsts"] + params["body_nconsts"]
    return first, len(equation.invars) - first
