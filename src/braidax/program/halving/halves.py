"""A program in two halves: one gives its first outputs and hands on what the other needs besides inputs.

So the backward pass of a pipeline's stage is divided (Zero Bubble Pipeline Parallelism, Qi et al., ICLR 2024), by its
traced program: products, and whatever else is not known to be cheap, are in one half alone. What goes over are the
values of fewest bytes from which the second half can be computed without them; cheap operations may be repeated for
that. A loop becomes two where both halves need some of it: the first one stacks what the second one goes over.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var, jaxpr_as_fun
from jax.extend.core import Literal as Constant

from braidax.program.bodies import aval_of
from braidax.program.cutting.part import closed_part, spec_of_aval, variables
from braidax.program.prune import prune
from braidax.program.trace import Program

from .alive import alive, made_of
from .batched import batches_first
from .crossing import Crossing
from .held import held
from .loop_parts import LoopParts, Operand, stacked, with_parts
from .merged import loops_merged
from .opened import BARRIER, is_loop, written_out
from .turned import products_turned


@dataclass(frozen=True)
class Halves:
    """Two programs on flat values that give what one gave.

    **Fields:** `both`: the whole, with the same products. `first`: takes the inputs `first_inputs`, gives `num_first`
    outputs and then what is handed on. `second`: takes the inputs `second_inputs` and what is handed on, and gives the
    other outputs.
    """

    both: ClosedJaxpr
    first: ClosedJaxpr
    second: ClosedJaxpr
    first_inputs: tuple[int, ...]
    second_inputs: tuple[int, ...]
    num_first: int

    def held(self) -> "Halves":
        """Returns these with large values that are read several times computed once, on CPUs."""
        return replace(self, both=held(self.both), first=held(self.first), second=held(self.second))

    @property
    def handed(self) -> list[Any]:
        """Shapes and dtypes of what goes from one to the other."""
        return [spec_of_aval(aval_of(one)) for one in self.first.jaxpr.outvars[self.num_first :]]

    def run_both(self, inputs: Sequence[Any]) -> list[Any]:
        """Returns all outputs."""
        return list(jaxpr_as_fun(self.both)(*inputs))

    def run_first(self, inputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Returns the first outputs, and what is handed on. **Arguments:** `inputs`: of the whole program."""
        made = jaxpr_as_fun(self.first)(*(inputs[at] for at in self.first_inputs))
        return list(made[: self.num_first]), list(made[self.num_first :])

    def run_second(self, inputs: Sequence[Any], handed: Sequence[Any]) -> list[Any]:
        """Returns the other outputs. **Arguments:** `inputs`: None will do for what it does not take."""
        return list(jaxpr_as_fun(self.second)(*(inputs[at] for at in self.second_inputs), *handed))


def halves(program: Program, num_first: int, *, free: Collection[int] = (), late: Collection[int] = ()) -> Halves:
    """Divides a program into what its first outputs need, and the rest.

    Nothing that costs much is computed twice. What cannot be divided, such as a `while`, is where it is needed first,
    and so is what has effects.

    **Arguments:** `num_first`: how many outputs the first half gives. `free`: inputs that are there for both in any
    case; others cost their bytes where the second half reads them. `late`: inputs that the first half does not read,
    and that are there for the second.
    """
    pruned, _ = prune(
        program.closed, [True] * len(program.closed.jaxpr.outvars), [False] * len(program.closed.in_avals)
    )
    closed = written_out(pruned)
    jaxpr = batches_first(products_turned(closed.jaxpr))
    firsts, others = jaxpr.outvars[:num_first], jaxpr.outvars[num_first:]
    effects = _Effects.of(jaxpr, [jaxpr.invars[at] for at in late])
    crossing = Crossing(alive(jaxpr, firsts, effects=effects.first))
    crossing.begin(jaxpr, free, late)
    crossing.add(jaxpr, 1)
    held = crossing.found(others)
    first = alive(jaxpr, firsts, also=held, effects=effects.first)
    cut = _Cutting(held, first, alive(jaxpr, others, stops=held, effects=effects.second), effects)
    before, given = cut.first(jaxpr)
    behind, wanted = cut.second(jaxpr), cut.named(others)
    reads = _reads(before, firsts), _reads(behind, wanted)
    handed = [one for one in given if one in reads[1] and one not in {*jaxpr.invars}]
    early, later = (tuple(at for at, one in enumerate(jaxpr.invars) if one in own) for own in reads)
    inputs = [[jaxpr.invars[at] for at in own] for own in (early, later)]
    first = closed_part(jaxpr, closed.consts, inputs[0], [*firsts, *handed], before)
    second = closed_part(jaxpr, closed.consts, [*inputs[1], *handed], wanted, behind)
    second = ClosedJaxpr(loops_merged(second.jaxpr), second.consts)
    return Halves(ClosedJaxpr(jaxpr, closed.consts), first, second, early, later, num_first)


def _reads(equations: Sequence[JaxprEqn], outputs: Sequence[Any]) -> set[Var]:
    return variables(outputs) | variables(atom for one in equations for atom in one.invars)


@dataclass(frozen=True)
class _Effects:
    """The ids of equations that have effects, of both halves: the second has those that read what it alone has."""

    first: frozenset[int]
    second: frozenset[int]

    @classmethod
    def of(cls, jaxpr: Jaxpr, late: Sequence[Var]) -> "_Effects":
        """Returns those of a jaxpr. **Arguments:** `late`: which inputs the second half alone has."""
        every, behind = [one for one in jaxpr.eqns if one.effects], made_of(jaxpr, late)
        second = frozenset(id(one) for one in every if variables(one.invars) & behind)
        return cls(frozenset(map(id, every)) - second, second)


class _Cutting:
    """Makes the equations of both halves.

    **Arguments:** `held`: what goes over. `first`, `second`: what the halves compute or read. `effects`: of both.
    """

    def __init__(self, held: set[Var], first: set[Var], second: set[Var], effects: _Effects) -> None:
        self._held, self._first, self._second, self._effects = held, first, second, effects
        self._stacks: dict[Var, Var] = {}
        self._same: dict[Var, Any] = {}

    def first(self, jaxpr: Jaxpr) -> tuple[list[JaxprEqn], list[Var]]:
        """Returns the equations of the first half, and the variables that are held, of inputs and of these."""
        equations, given = list[JaxprEqn](), [one for one in jaxpr.invars if one in self._held]
        for equation in jaxpr.eqns:
            if is_loop(equation):
                made, more = self._first_loop(LoopParts.of(equation))
                given += more
            elif any(one in self._first for one in equation.outvars) or id(equation) in self._effects.first:
                made = equation if equation.primitive is not BARRIER else self._barrier(equation)
            else:
                continue
            if made is not None:
                equations.append(made)
                given += [one for one in made.outvars if one in self._held]
        return equations, given

    def second(self, jaxpr: Jaxpr) -> list[JaxprEqn]:
        """Returns the equations of the second half."""
        equations: list[JaxprEqn] = []
        for equation in jaxpr.eqns:
            if equation.primitive is BARRIER:
                pairs = zip(equation.outvars, equation.invars, strict=True)
                self._same.update((one, atom) for one, atom in pairs if one not in self._held)
            elif id(equation) not in self._effects.second and not any(
                one in self._second and one not in self._held for one in equation.outvars
            ):
                continue
            elif is_loop(equation):
                equations.append(self._second_loop(LoopParts.of(equation)))
            else:
                own = [Var(aval_of(one)) if one in self._held else one for one in equation.outvars]
                equations.append(equation.replace(invars=self.named(equation.invars), outvars=own))
        return equations

    def named(self, atoms: Sequence[Any]) -> list[Any]:
        """Returns what stands for variables behind a barrier."""
        found = list(atoms)
        for at, atom in enumerate(found):
            while not isinstance(atom, Constant) and atom in self._same:
                atom = self._same[atom]
            found[at] = atom
        return found

    def _barrier(self, equation: JaxprEqn) -> JaxprEqn:
        pairs = zip(equation.invars, equation.outvars, strict=True)
        used = [(atom, one) for atom, one in pairs if one in self._first]
        return equation.replace(invars=[atom for atom, _ in used], outvars=[one for _, one in used])

    def _first_loop(self, parts: LoopParts) -> tuple[JaxprEqn | None, list[Var]]:
        equations, given = self.first(parts.body)
        results = [one in self._first for one in parts.equation.outvars]
        if not any(results) and not given:
            return None, []
        operands = [[one for one in own if one.inner in self._first] for own in parts.operands]
        count = len(parts.carries)
        pairs = zip(parts.equation.outvars[count:], parts.body.outvars[count:], results[count:], strict=True)
        stacks = [(outer, inner) for outer, inner, wanted in pairs if wanted]
        for one in given:
            self._stacks[one] = stacked(one, parts.length)
        more = [(self._stacks[one], one) for one in given]
        made = with_parts(parts, operands, [*stacks, *more], equations)
        return made, [outer for outer, _ in more]

    def _second_loop(self, parts: LoopParts) -> JaxprEqn:
        equations, count = self.second(parts.body), len(parts.carries)
        pairs = zip(parts.equation.outvars[count:], self.named(parts.body.outvars[count:]), strict=True)
        results = [(outer, inner) for outer, inner in pairs if outer in self._second and outer not in self._held]
        carries = [one for one in parts.carries if one.inner in self._second and one.inner not in self._held]
        carries = [one._replace(result=self.named([one.result])[0]) for one in carries]
        reads = _reads(equations, [*(one.result for one in carries), *(inner for _, inner in results)])
        held = [one for one in self._stacks if one in reads]
        consts, slices = (
            [one for one in own if one.inner in reads and one.inner not in held] for own in (parts.consts, parts.slices)
        )
        named = [[one._replace(outer=self.named([one.outer])[0]) for one in own] for own in (consts, carries, slices)]
        named[2] += [Operand(self._stacks[one], one) for one in held]
        return with_parts(parts, named, results, equations)
