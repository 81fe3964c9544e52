"""A program whose inputs lie at several places, divided among these, with what they compute of one another's values."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from jax.extend.core import ClosedJaxpr, JaxprEqn, Var, jaxpr_as_fun
from jax.extend.core import Literal as Constant

from braidax.errors import ArgumentError
from braidax.program.bodies import aval_of
from braidax.program.inline import inlined
from braidax.program.lines import line_of
from braidax.program.trace import Program

from .part import closed_part, needed, variables

_MOST_SENT = 4096  # elements of a value that goes from place to place

JOINT = -1
"""Where that is computed which several places have a part in, and all that nothing of any place goes into."""


@dataclass(frozen=True)
class PlacePart:
    """What one place computes at once.

    **Fields:** `place`: or `JOINT`. `inputs`: of the program that it reads, by number. `taken`: values that other parts
    have sent, by number. `sent`: those that it gives, in front; `outputs`: which outputs of the program, behind.
    """

    place: int
    closed: ClosedJaxpr
    inputs: tuple[int, ...]
    taken: tuple[int, ...]
    sent: tuple[int, ...]
    outputs: tuple[int, ...]

    def __call__(self, inputs: Sequence[Any], taken: Sequence[Any]) -> list[Any]:
        """Computes it: what is sent, then the outputs."""
        return jaxpr_as_fun(self.closed)(*inputs, *taken)


def divided(program: Program, places: Sequence[int | None]) -> tuple[list[PlacePart], list[int]]:
    """Divides a program among places.

    What depends on inputs of one place is computed there; what depends on those of several, such as a norm of all, in a
    part of its own, from values that places send, and goes back to all. A part may compute again what an earlier one
    has.

    **Arguments:** `places`: of each input; None: it is small, and brought wherever it is read.

    **Returns:** parts in an order in which they can run, and for each output its place.

    **Raises:** `ArgumentError` for a large value that would go from place to place.
    """
    return _Division(inlined(program), places).parts()


def apart(program: Program, places: Sequence[int | None], count: int) -> tuple[list[PlacePart], list[int | None]]:
    """Divides a program among places of which none knows another's values.

    What depends on inputs of no place is computed at each of them.

    **Arguments:** `places`: of each input, below `count`; None: all places have it.

    **Returns:** of each place its part, which gives the outputs of this place and those of all; and for each output its
    place, None: that of all.

    **Raises:** `ArgumentError` naming what would take values of several places.
    """
    return _Division(inlined(program), places).apart(count)


@final
class _Division:
    def __init__(self, program: Program, places: Sequence[int | None]) -> None:
        self._closed, self._jaxpr = program.closed, program.closed.jaxpr
        self._at: dict[Var, int | None] = dict.fromkeys(self._jaxpr.constvars)
        self._at.update(zip(self._jaxpr.invars, places, strict=True))
        self._round: dict[Var, int] = dict.fromkeys(self._at, 0)
        self._equations: dict[int | None, list[JaxprEqn]] = {}
        for equation in self._jaxpr.eqns:
            self._see(equation)

    def _see(self, equation: JaxprEqn) -> None:
        operands = variables(equation.invars)
        found = {self._at[one] for one in operands}
        there = found - {None, JOINT}
        turn = max((self._round[one] for one in operands), default=0)
        place = there.pop() if len(there) == 1 else JOINT if there or JOINT in found else None
        if len(found - {None, JOINT}) > 1:
            turn += 1
        for one in equation.outvars:
            self._at[one], self._round[one] = place, turn
        self._equations.setdefault(place, []).append(equation)

    def parts(self) -> tuple[list[PlacePart], list[int]]:
        """Returns the parts in order, and the place of each output."""
        outputs = list(self._jaxpr.outvars)
        at = [self._place_of(one) for one in outputs]
        rounds = max(self._round.values(), default=0)
        stages = sorted({place for place in self._at.values() if place is not None and place != JOINT})
        crossing, found = self._crossing(), list[PlacePart]()
        numbers = {one: number for number, one in enumerate(crossing)}
        for turn in range(rounds + 1):
            for place in (JOINT, *stages):
                sent = [one for one in crossing if self._at[one] == place and self._round[one] == turn]
                if sent:
                    found.append(self._part(place, sent, [], numbers))
        for place in (JOINT, *stages):
            own = [number for number, one in enumerate(at) if one == place]
            if own:
                found.append(self._part(place, [], own, numbers))
        return found, at

    def apart(self, count: int) -> tuple[list[PlacePart], list[int | None]]:
        """As of the function of this name."""
        outputs = list(self._jaxpr.outvars)
        for equation in needed(self._jaxpr.eqns, variables(outputs), set()):
            there = {self._at[one] for one in variables(equation.invars)} - {None}
            if len(there) > 1:
                raise ArgumentError(
                    f"{equation.primitive.name} at {line_of(equation.source_info)} takes values of places "
                    f"{sorted(one for one in there if one is not None)}"
                )
        at = [None if isinstance(one, Constant) else self._at[one] for one in outputs]
        own = [[number for number, place in enumerate(at) if place in (None, one)] for one in range(count)]
        return [self._part(place, [], numbers, {}) for place, numbers in enumerate(own)], at

    def _place_of(self, atom: Any) -> int:
        place = None if isinstance(atom, Constant) else self._at[atom]
        return JOINT if place is None else place

    def _crossing(self) -> list[Var]:
        """Returns what goes from place to place: what joint equations read of places, and what these read of them."""
        found = dict[Var, None]()
        for place, equations in self._equations.items():
            for equation in equations:
                for one in variables(equation.invars):
                    other = self._at[one]
                    if other is not None and other != place and place is not None:
                        _check_size(one, equation)
                        found[one] = None
        return list(found)

    def _part(self, place: int, sent: Sequence[Var], outputs: Sequence[int], numbers: Mapping[Var, int]) -> PlacePart:
        own = [one for one in self._jaxpr.eqns if one.outvars and self._at[one.outvars[0]] in (place, None)]
        wanted = [*sent, *(self._jaxpr.outvars[at] for at in outputs)]
        alive = variables(wanted)
        equations = needed(own, alive, set())
        used = alive | variables(atom for one in equations for atom in one.invars)
        made = {one for equation in equations for one in equation.outvars}
        inputs = [at for at, one in enumerate(self._jaxpr.invars) if one in used]
        known = {*self._jaxpr.invars, *self._jaxpr.constvars}
        taken = [one for one in numbers if one in used - made - known]
        invars = [*(self._jaxpr.invars[at] for at in inputs), *taken]
        closed = closed_part(self._jaxpr, self._closed.consts, invars, wanted, equations)
        of_taken, of_sent = (tuple(numbers[one] for one in some) for some in (taken, sent))
        return PlacePart(place, closed, tuple(inputs), of_taken, of_sent, tuple(outputs))


def _check_size(value: Var, equation: JaxprEqn) -> None:
    shape: Iterable[int] = aval_of(value).shape
    if math.prod(shape) > _MOST_SENT:
        raise ArgumentError(
            f"{equation.primitive.name} at {line_of(equation.source_info)} joins arrays that lie at several places, "
            f"one of {list(shape)}: expected what joins them by scalars, such as a norm of all"
        )
