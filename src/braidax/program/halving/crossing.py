"""Which values go from one half of a program to the other."""

from collections.abc import Collection, Sequence
from typing import Any, final

from jax.extend.core import Jaxpr, JaxprEqn, Var, primitives
from jax.extend.core import Literal as Constant
from jax.lax import split_p

from braidax.program.bodies import aval_of
from braidax.program.costs import bytes_of
from braidax.program.cutting.part import variables
from braidax.program.kinds import ARGUMENTS, ARITHMETIC, CUMULATIVE, MOVING, REDUCTIONS, TRANSCENDENTAL

from .least_cut import least_cut
from .loop_parts import LoopParts
from .opened import BARRIER, is_loop

_VIEWS: frozenset[Any] = frozenset(
    {
        primitives.broadcast_in_dim_p, primitives.reshape_p, primitives.rev_p, primitives.squeeze_p,
        primitives.transpose_p, primitives.copy_p, BARRIER,
    }
)  # fmt: skip
_DEAR: frozenset[Any] = frozenset(
    {
        primitives.bessel_i0e_p, primitives.bessel_i1e_p, primitives.digamma_p, primitives.igamma_p,
        primitives.igammac_p, primitives.lgamma_p, primitives.polygamma_p, primitives.regularized_incomplete_beta_p,
    }
)  # fmt: skip
_REPEATED = (
    ARITHMETIC
    | TRANSCENDENTAL - _DEAR
    | MOVING
    | _VIEWS
    | {primitives.concatenate_p, primitives.iota_p, primitives.pad_p, primitives.slice_p, split_p}
)
_CHEAP = (
    _REPEATED | TRANSCENDENTAL | REDUCTIONS | ARGUMENTS | CUMULATIVE | {primitives.dynamic_slice_p, primitives.gather_p}
)
# What a byte counts: of an input, which is there; of what is made; of what is another form of something, unless a
# product of the first half reads it, so that it is written anyway. They decide between about equal sizes. A sum counts
# as little as its terms: XLA would make a chain of sums, such as goes through all layers, anew for each of its readers.
_INPUT, _MADE, _VIEW = 64, 65, 68


@final
class Crossing:
    """What may go from the first half to the second, and what it costs.

    **Arguments:** `first`: what the first half computes or reads in any case.
    """

    def __init__(self, first: set[Var]) -> None:
        self._first = first
        self._sizes: dict[Var, int | None] = {}
        self._arrows: list[tuple[Var, Var]] = []
        self._sources, self._sinks, self._late = set[Var](), set[Var](), set[Var]()
        self._written = set[Var]()

    def begin(self, jaxpr: Jaxpr, free: Collection[int], late: Collection[int]) -> None:
        """Adds the inputs of the program. **Arguments:** `free`: that both halves have; `late`: the second alone."""
        self._sizes.update(dict.fromkeys(jaxpr.constvars))
        for at, one in enumerate(jaxpr.invars):
            self._sizes[one] = None if at in free or at in late else bytes_of(aval_of(one)) * _INPUT
            if at in late:
                self._late.add(one)
            elif at not in free:
                self._sources.add(one)

    def found(self, outputs: Sequence[Any]) -> set[Var]:
        """Returns what goes over. **Arguments:** `outputs`: of the second half."""
        sinks = (self._sinks | variables(outputs)) - self._late
        return least_cut(self._sizes, self._arrows, self._sources, sinks)

    def add(self, jaxpr: Jaxpr, times: int) -> None:
        """Adds equations. **Arguments:** `times`: how often they run."""
        for equation in jaxpr.eqns:
            if any(one in self._first for one in equation.outvars) and not _is_cheap(equation):
                self._written |= variables(equation.invars) | {*equation.outvars}
        for equation in jaxpr.eqns:
            if is_loop(equation):
                self._loop(LoopParts.of(equation), times)
                continue
            inputs, outputs = variables(equation.invars), equation.outvars
            made, is_late = any(one in self._first for one in outputs), bool(inputs & self._late)
            for one in outputs:
                self._sizes[one] = self._size(one, times, equation.primitive in _VIEWS)
            if equation.primitive is BARRIER:
                for atom, one in zip(equation.invars, outputs, strict=True):
                    self._lead(atom, one)
            elif not is_late and (equation.effects or (made and equation.primitive not in _REPEATED)):
                self._sources.update(outputs)
            elif is_late or not _is_cheap(equation):
                self._sinks |= inputs
                self._late.update(outputs)
            else:
                self._arrows += [(one, other) for one in inputs for other in outputs]

    def _loop(self, parts: LoopParts, times: int) -> None:
        inner = times * parts.length
        for one in (*parts.consts, *parts.slices):
            self._sizes[one.inner] = None
            self._lead(one.outer, one.inner)
        for one in parts.carries:
            self._sizes[one.inner] = self._size(one.inner, inner, False)
            self._side(one.inner in self._first, one.inner, one.outer)
        self.add(parts.body, inner)
        for one in parts.equation.outvars:
            self._sizes[one] = self._size(one, times, False)
        for carry, one in zip(parts.carries, parts.equation.outvars, strict=False):
            self._side(carry.inner in self._first, one, carry.result)
        count = len(parts.carries)
        for one, own in zip(parts.equation.outvars[count:], parts.body.outvars[count:], strict=True):
            self._lead(own, one)

    def _side(self, is_first: bool, one: Var, given: Any) -> None:
        """Adds what is of one half alone, and what it is made of."""
        if is_first:
            self._sources.add(one)
        else:
            self._late.add(one)
            self._sinks |= variables([given])

    def _lead(self, atom: Any, one: Var) -> None:
        """Adds what is another variable's value."""
        if isinstance(atom, Constant):
            return
        self._arrows.append((atom, one))
        if atom in self._late:
            self._late.add(one)

    def _size(self, one: Var, times: int, is_view: bool) -> int:
        price = _VIEW if is_view and one not in self._written else _MADE
        return bytes_of(aval_of(one)) * times * price


def _is_cheap(equation: JaxprEqn) -> bool:
    return equation.primitive in _CHEAP and not equation.effects
