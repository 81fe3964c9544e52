"""A program in parts that follow its parameters: each is computed where those lie that it reads."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple, final

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jax.extend.core import Literal as Constant
from jax.extend.core.primitives import scan_p

from braidax.errors import ArgumentError
from braidax.program.bodies import aval_of, has_references
from braidax.program.halving.loop_parts import LoopParts
from braidax.program.lines import line_of
from braidax.program.trace import Program

from .iterations import with_scans_split
from .order import find_free, in_order
from .part import Rows, is_cast, needed, part_of, rows_taken, variables


class Lies(NamedTuple):
    """Rows of a leaf, or all of it, and the place where they lie."""

    rows: Rows | None
    place: int


@dataclass(frozen=True)
class FollowingPart:
    """What one place computes.

    **Fields:** `program`: takes the arguments of the whole one, None in place of leaves that it does not read, and the
    tuple of values that come in; it gives the tuple of those that it sends, and that of its outputs. `leaves`: that it
    reads, by number, with the rows. `incoming`, `outgoing`: values that go from place to place, by number. `outputs`:
    of the whole program, by number.
    """

    place: int
    program: Program
    leaves: tuple[tuple[int, Rows | None], ...]
    incoming: tuple[int, ...]
    outgoing: tuple[int, ...]
    outputs: tuple[int, ...]


def following(program: Program, lie: Sequence[Sequence[Lies]]) -> list[FollowingPart]:
    """Divides a program by where its parameters lie, its first argument.

    What an equation reads is brought to the last of the places of its parameters and operands, so that values go from
    earlier places to later ones. A scan over a leaf whose rows lie at several places is one at each. What reads no
    parameter is computed with the first that needs it, and little work on inputs alone wherever it is needed.

    **Arguments:** `lie`: of each leaf of the parameters, in the order of its rows.

    **Returns:** the parts, by place; none reads what a later one makes. **Raises:** `ArgumentError` for a program that
    changes references.
    """
    for one in program.closed.jaxpr.eqns:
        if has_references(one):
            raise ArgumentError(
                f"the function changes a reference ({one.primitive.name} at {line_of(one.source_info)}): stages cannot "
                f"share it; return a new value instead"
            )
    ordered = in_order(program, frozenset(range(len(lie))))
    jaxpr = ordered.closed.jaxpr
    effects = {id(one) for one in jaxpr.eqns if one.effects}
    jaxpr = jaxpr.replace(eqns=needed(jaxpr.eqns, variables(jaxpr.outvars), set(), effects))
    jaxpr, _ = with_scans_split(jaxpr, _lengths(jaxpr, lie))
    return _Following(replace(ordered, closed=ClosedJaxpr(jaxpr, ordered.closed.consts)), lie).parts()


def _lengths(jaxpr: Jaxpr, lie: Sequence[Sequence[Lies]]) -> dict[int, list[int]]:
    """Returns of scans over leaves whose rows lie at several places how many iterations each place runs."""
    leaves = {one: lies for one, lies in zip(jaxpr.invars, lie, strict=False) if len(lies) > 1}
    casts = _Rows(jaxpr.invars[: len(lie)])
    found: dict[int, list[int]] = {}
    for at, equation in enumerate(jaxpr.eqns):
        casts.see(equation)
        if equation.primitive is not scan_p or equation.params["reverse"]:
            continue
        parts = LoopParts.of(equation)
        ends = {0, parts.length}
        for one in variables(operand.outer for operand in parts.slices):
            if one in casts.of:
                leaf, (begin, end) = casts.of[one]
                of_places = [lies.rows[1] for lies in leaves.get(leaf, ()) if lies.rows is not None]
                ends |= {row - begin for row in of_places if begin < row < end}
        found[at] = [end - begin for begin, end in pairwise(sorted(ends))]
    return found


@final
class _Rows:
    """Which values are rows of a leaf, also as another type."""

    def __init__(self, leaves: Sequence[Var]) -> None:
        whole = {one: aval_of(one).shape for one in leaves}
        self.of: dict[Var, tuple[Var, Rows]] = {one: (one, (0, shape[0])) for one, shape in whole.items() if shape}

    def see(self, equation: JaxprEqn) -> None:
        given = variables(equation.invars)
        known = self.of.get(next(iter(given))) if len(given) == 1 else None
        if known is None:
            return
        leaf, (begin, _) = known
        if (rows := rows_taken(equation)) is not None:
            self.of[equation.outvars[0]] = leaf, (begin + rows[0], begin + rows[1])
        elif is_cast(equation):
            self.of[equation.outvars[0]] = known


@final
class _Following:
    def __init__(self, program: Program, lie: Sequence[Sequence[Lies]]) -> None:
        self._program, self._jaxpr, self._lie = program, program.closed.jaxpr, lie
        self._leaves = {one: at for at, one in enumerate(self._jaxpr.invars[: len(lie)])}
        self._free = find_free(self._jaxpr, frozenset(range(len(lie))))
        self._rows = _Rows([*self._leaves])
        self._last: dict[Var, int] = {}
        """Of values, the last place of a parameter that they are made of."""
        for one in self._leaves:
            self._last[one] = self._last_of(one)
        for equation in self._jaxpr.eqns:
            self._rows.see(equation)
            self._see(equation)
        self._places = self._placed()
        pairs = zip(self._jaxpr.eqns, self._places, strict=True)
        self._made = {one: place for equation, place in pairs if place is not None for one in equation.outvars}

    def _see(self, equation: JaxprEqn) -> None:
        last = [self._last[one] for one in variables(equation.invars) if one in self._last]
        for one in equation.outvars:
            if one in self._rows.of:
                self._last[one] = self._last_of(one)
            elif last:
                self._last[one] = max(last)

    def _last_of(self, one: Var) -> int:
        """Returns the last place where any of these rows of a leaf lie."""
        leaf, rows = self._rows.of.get(one, (one, None))
        lies = self._lie[self._leaves[leaf]]
        return max(place for own, place in lies if rows is None or own is None or _overlap(own, rows))

    def _placed(self) -> list[int | None]:
        """Returns the place of each equation; None: it is free."""
        found: list[int | None] = [None] * len(self._jaxpr.eqns)
        first = dict[Var, int]()
        for at in reversed(range(len(found))):
            equation = self._jaxpr.eqns[at]
            if at in self._free.equations:
                continue
            outputs = variables(equation.outvars)
            last = [self._last[one] for one in outputs if one in self._last]
            place = max(last) if last else min((first[one] for one in outputs if one in first), default=0)
            found[at] = place
            for one in variables(equation.invars):
                first[one] = min(place, first.get(one, place))
        return found

    def parts(self) -> list[FollowingPart]:
        """Returns what each place computes."""
        readers: dict[Var, set[int]] = {}
        for equation, place in zip(self._jaxpr.eqns, self._places, strict=True):
            if place is not None:
                for one in variables(equation.invars):
                    readers.setdefault(one, set()).add(place)
        crossing = [one for one, place in self._made.items() if readers.get(one, set()) - {place}]
        at_places = self._outputs_at()
        found: list[FollowingPart] = []
        for place in sorted({*self._made.values(), *at_places, *self._with_effects()}):
            incoming = [
                at for at, one in enumerate(crossing) if self._made[one] != place and place in readers.get(one, set())
            ]
            outgoing = [at for at, one in enumerate(crossing) if self._made[one] == place]
            outputs = [at for at, other in enumerate(at_places) if other == place]
            wanted = [*(crossing[at] for at in outgoing), *(self._jaxpr.outvars[at] for at in outputs)]
            always = [at for at, one in enumerate(self._jaxpr.eqns) if self._places[at] == place and one.effects]
            part, taken = part_of(self._program, [crossing[at] for at in incoming], wanted, always=always)
            outs = part.out_specs[: len(outgoing)], part.out_specs[len(outgoing) :]
            numbers = (tuple(incoming), tuple(outgoing), tuple(outputs))
            found.append(FollowingPart(place, replace(part, out_specs=outs), tuple(taken.items()), *numbers))
        return found

    def _outputs_at(self) -> list[int]:
        """Returns the place of each output: where it is made; what is free, with its parameters, or what else reads
        its inputs."""
        last = max(self._made.values(), default=0)
        read: dict[int, int] = {}
        for equation, place in zip(self._jaxpr.eqns, self._places, strict=True):
            if place is not None:
                for leaf in self._free.leaves(equation.invars):
                    read[leaf] = max(place, read.get(leaf, place))
        found: list[int] = []
        for one in self._jaxpr.outvars:
            if isinstance(one, Constant):
                found.append(last)
            elif one in self._made:
                found.append(self._made[one])
            elif one in self._last:
                found.append(self._last[one])
            else:
                found.append(max((read[leaf] for leaf in self._free.leaves([one]) if leaf in read), default=last))
        return found

    def _with_effects(self) -> set[int]:
        pairs = zip(self._jaxpr.eqns, self._places, strict=True)
        return {place for one, place in pairs if place is not None and one.effects}


def _overlap(one: Rows, other: Rows) -> bool:
    return one[0] < other[1] and other[0] < one[1]
