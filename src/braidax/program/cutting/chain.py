"""A traced loss as a chain: where it may be cut into stages, and the stages that it is cut into."""

import re
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, final

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jax.extend.core import Literal as Constant
from jax.extend.core.primitives import scan_p

from braidax.errors import ArgumentError
from braidax.program.bodies import aval_of, has_references
from braidax.program.costs import bytes_of, cost_of
from braidax.program.lines import line_of
from braidax.program.names import named_leaves
from braidax.program.trace import Program

from .iterations import Origin, with_scans_split
from .order import Free, Leaves, find_free, in_order, is_light
from .part import Rows, part_of, variables

_TRANSFORM = re.compile(r"\w+\(([^()]*)\)")
_SLICED = re.compile(r"(start|limit)_indices=\([^)]*\)")
_MOST_PIECES = 64  # of a loop, between which borders are looked for
_ALIKE = 17 / 16  # widths that count as one: of such places the last one is taken that fewest arrays cross
_NARROWER = 1.5  # a border is left out beside one that is so many times narrower on either side,
_LITTLE = 1 / 1024  # of the work: no border is needed beside it, unless it reads parameters
_PART_OF_WORK = 1 / 16  # with at most this part of the work between these two


@dataclass(frozen=True, order=True)
class Border:
    """A place between two equations of a chain, or two iterations of a scan, where it may be cut.

    **Fields:** `at`: the equation behind it, by number; `iteration`: of the scan that it is, the first behind the
    border. `live_bytes`: of the values that go over it. `line`: of the user's code behind it.
    """

    at: int
    iteration: int = 0
    live_bytes: int = field(default=0, compare=False)
    line: str = field(default="", compare=False)

    def __str__(self) -> str:
        """`before iteration 4 of model.py:31`."""
        return f"before {f'iteration {self.iteration} of ' if self.iteration else ''}{self.line or self.at}"


@dataclass(frozen=True)
class StageLeaf:
    """A leaf of the loss's arguments that a stage reads.

    **Fields:** `argument`: which one, `name`: of the leaf in it, `number`: of the leaf among all. `rows`: of its
    leading dim, where the stage reads only some. `num_bytes`: that it reads. `frozen`: it has no gradient.
    """

    argument: int
    name: str
    number: int
    rows: Rows | None
    num_bytes: int
    frozen: bool = False


@dataclass(frozen=True)
class Stage:
    """A piece of a chain.

    **Fields:** `program`: takes the arguments of the loss, None in place of leaves that it does not read, and the tuple
    of incoming values; it gives the tuple of outgoing values and that of its results. `leaves`: that it reads.
    `results`: which outputs of the loss, by number, its results are; the loss itself is the last stage's.
    """

    program: Program
    leaves: tuple[StageLeaf, ...]
    results: tuple[int, ...]

    @property
    def incoming(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and dtypes of the incoming values."""
        return self.program.in_specs[-1]

    @property
    def outgoing(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Those of the outgoing values."""
        return self.program.out_specs[0]

    def told(self) -> str:
        """Returns what the stage computes, as text: the same for two that differ in the values of inputs only.

        What goes through it as it is counts for nothing; what is sent to it is another thing than what it has of an
        argument of the loss, since gradients go back to it.
        """
        jaxpr = self.program.closed.jaxpr
        read = variables(atom for one in jaxpr.eqns for atom in one.invars)
        made = [atom for atom in jaxpr.outvars if not variables([atom]) & {*jaxpr.invars}]
        own = jaxpr.replace(
            invars=[one for one in jaxpr.invars if one in read], outvars=made,
            debug_info=jaxpr.debug_info.with_unknown_names(),
        )  # fmt: skip
        still = [at for at, leaf in enumerate(self.leaves) if leaf.frozen]
        of = [*(leaf.argument for leaf in self.leaves), *("sent" for _ in self.incoming)]
        origins = [name for one, name in zip(jaxpr.invars, of, strict=True) if one in read]
        return f"{_SLICED.sub('', str(own))} of {origins}" + (f" without gradients of {still}" if still else "")

    def take(self, *args: Any) -> tuple[Any, ...]:
        """Returns of arguments of the loss what the stage reads, in the form in which it takes it."""
        flat, found = jax.tree.leaves(args), [None] * len(jax.tree.leaves(args))
        for leaf in self.leaves:
            one = flat[leaf.number]
            found[leaf.number] = one if leaf.rows is None else one[slice(*leaf.rows)]
        return jax.tree.unflatten(jax.tree.structure(args), found)


@dataclass(frozen=True)
class _Line:
    """A jaxpr with loops in pieces: where each equation comes from, and what is free."""

    program: Program
    origins: Sequence[Origin]
    free: Free

    @property
    def jaxpr(self) -> Jaxpr:
        return self.program.closed.jaxpr

    def stages_of(self, borders: Sequence[Border]) -> list[int | None]:
        """Returns for each equation the number of its stage, None for what is free."""
        keys = [(one.at, one.iteration) for one in borders]
        return [
            None if at in self.free.equations else bisect_right(keys, origin) for at, origin in enumerate(self.origins)
        ]


@final
class Chain:
    """A traced loss in an order in which it may be cut.

    **Arguments:** `program`: of any arguments; its output `loss`, by number, is what is differentiated. `params`: the
    number of the argument that is trained, but for the leaves that are `frozen`, by number among all.

    **Raises:** `ArgumentError` for a program that changes references.
    """

    def __init__(
        self, program: Program, *, params: int = 0, loss: int = 0, frozen: Collection[int] = frozenset()
    ) -> None:
        jaxpr = program.closed.jaxpr
        for one in jaxpr.eqns:
            if has_references(one):
                raise ArgumentError(
                    f"the loss changes a reference ({one.primitive.name} at {line_of(one.source_info)}): stages cannot "
                    f"share it; return a new value instead"
                )
        first, count = (len(jax.tree.leaves(one)) for one in (program.in_specs[:params], program.in_specs[params]))
        self._trained: Leaves = frozenset(range(first, first + count))
        self._program, self._loss, self._frozen = in_order(program, self._trained), loss, frozenset(frozen)
        self.out_specs: Any = program.out_specs

    # Where it may be cut

    def borders(self) -> tuple[Border, ...]:
        """Returns where the chain is narrow: at most one border between any two products, loops' iterations, lookups.

        What is wide is left out where something narrower is close by on either side.
        """
        line = self._fine()
        (widths, counts), jaxpr = self._widths(line), line.jaxpr
        own = [at for at in range(len(jaxpr.eqns)) if at not in line.free.equations]
        costs = {at: cost_of(jaxpr.eqns[at]) for at in own}
        each = {at: one.flops + one.read_bytes for at, one in costs.items()}
        done = dict(zip(own, accumulate(each.values(), initial=0.0), strict=False))
        work = sum(each.values())
        heavy = [
            at
            for at in own
            if not is_light(jaxpr.eqns[at])
            and (each[at] > work * _LITTLE or line.free.leaves(jaxpr.eqns[at].invars) & self._trained)
        ]
        found: list[tuple[Border, float]] = []
        for one, other in pairwise(heavy):
            places = [at for at in own if one < at <= other and self._is_border(line, at)]
            if places:
                least = min(widths[at] for at in places) * _ALIKE
                best = min((at for at in reversed(places) if widths[at] <= least), key=counts.__getitem__)
                found.append((self._border(line, best, widths[best]), done[best]))
        ends = [(Border(-1), 0.0), *found, (Border(len(jaxpr.eqns)), work)]
        kept = (at for at in range(1, len(ends) - 1) if not _is_wide(ends, at, work * _PART_OF_WORK))
        return tuple(ends[at][0] for at in kept)

    def at_scope(self, name: str) -> Border:
        """Returns the border before what first belongs to a `jax.named_scope`.

        **Arguments:** `name`: of the scope, or several, `"encoder/layer_3"`, as they are nested.

        **Raises:** `ArgumentError` when the scope is not there, lies within a loop, or nothing is before it.
        """
        line = self._line({})
        own = [at for at in range(len(self._jaxpr.eqns)) if at not in line.free.equations]
        first = next((at for at in own if _is_within(self._jaxpr.eqns[at], name)), None)
        if first is None:
            scopes = dict.fromkeys(scope for at in own for scope in _scopes(self._jaxpr.eqns[at])[:1])
            known = ", ".join(repr(one) for one in list(scopes)[:20]) or "none"
            raise ArgumentError(
                f"cuts has {name!r}, which is no jax.named_scope outside of loops in this loss; there are: {known}; "
                f"loops are cut between iterations, and only by number of stages"
            )
        if not any(at < first and not is_light(self._jaxpr.eqns[at]) for at in own):
            raise ArgumentError(f"cuts has {name!r}, before which the loss does nothing: a cut there leaves no stage")
        return self._border(line, first, self._widths(line)[0][first])

    def _is_border(self, line: _Line, at: int) -> bool:
        """Whether a cut may go before an equation: what joins the stacks of a loop belongs to that."""
        return line.origins[at][1] == 0 or line.jaxpr.eqns[at].primitive is scan_p

    def _border(self, line: _Line, at: int, width: int) -> Border:
        return Border(*line.origins[at], width, line_of(line.jaxpr.eqns[at].source_info))

    def _widths(self, line: _Line) -> tuple[list[int], list[int]]:
        """Returns for each equation what is made before it and read from there on: bytes, and how many arrays."""
        made, last = dict[Var, int](), dict[Var, int]()
        for at, equation in enumerate(line.jaxpr.eqns):
            if at not in line.free.equations:
                last.update((one, at) for one in variables(equation.invars) if one in made)
                made.update((one, at) for one in equation.outvars)
        loss = line.jaxpr.outvars[self._loss]
        if not isinstance(loss, Constant) and loss in made:
            last[loss] = len(line.jaxpr.eqns)
        changes = [[0] * (len(line.jaxpr.eqns) + 2) for _ in range(2)]
        for one, end in last.items():
            for own, size in zip(changes, (bytes_of(aval_of(one)), int(aval_of(one).ndim > 0)), strict=True):
                own[made[one] + 1] += size
                own[end + 1] -= size
        widths, counts = ([*accumulate(own)] for own in changes)
        return widths, counts

    # The stages

    def stages(self, borders: Sequence[Border]) -> tuple[Stage, ...]:
        """Cuts the chain.

        What little work on inputs alone several stages need, each does for itself.

        **Arguments:** `borders`: of this chain, one less than there are to be stages.

        **Returns:** the stages; the outgoing values of each are the incoming ones of the next.

        **Raises:** `ArgumentError` when there are borders between which nothing is.
        """
        borders = sorted(borders)
        line = self._line(self._lengths(borders))
        places, count = line.stages_of(borders), len(borders) + 1
        if empty := sorted({*range(count)} - {*places}):
            told = str(borders[empty[0] - 1]) if empty[0] else str(borders[0])
            raise ArgumentError(f"borders leave nothing to stage {empty[0]} ({told}): leave that one out")
        made = {
            one: place
            for equation, place in zip(line.jaxpr.eqns, places, strict=True)
            if place is not None
            for one in equation.outvars
        }
        carried = self._carried(line, places, made, count)
        results = self._results(line, places, made, count)
        stages: list[Stage] = []
        for stage in range(count):
            outgoing = carried[stage + 1] if stage + 1 < count else []
            outputs = [*outgoing, *(line.jaxpr.outvars[at] for at in results[stage])]
            always = [at for at, one in enumerate(line.jaxpr.eqns) if places[at] == stage and one.effects]
            part, taken = part_of(line.program, carried[stage], outputs, always=always)
            outs = part.out_specs[: len(outgoing)], part.out_specs[len(outgoing) :]
            stages.append(Stage(replace(part, out_specs=outs), self._leaves(taken, part), tuple(results[stage])))
        return tuple(stages)

    def _leaves(self, taken: Mapping[int, Rows | None], part: Program) -> tuple[StageLeaf, ...]:
        """Returns what a stage reads of the arguments of the loss."""
        names = [(at, name) for at, tree in enumerate(self._program.in_specs) for name, _ in named_leaves(tree)]
        avals = part.closed.in_avals[: len(taken)]
        return tuple(
            StageLeaf(*names[number], number, rows, bytes_of(aval), number in self._frozen)
            for (number, rows), aval in zip(taken.items(), avals, strict=True)
        )

    def _carried(
        self, line: _Line, places: Sequence[int | None], made: Mapping[Var, int], count: int
    ) -> list[list[Var]]:
        """Returns for each stage the values that come into it, in the order in which they are made."""
        last = dict[Var, int]()
        for equation, place in zip(line.jaxpr.eqns, places, strict=True):
            if place is not None:
                last.update((one, place) for one in variables(equation.invars) if one in made)
        loss = line.jaxpr.outvars[self._loss]
        if not isinstance(loss, Constant) and loss in made:
            last[loss] = count - 1
        return [[one for one in made if made[one] < stage <= last.get(one, -1)] for stage in range(count)]

    def _results(
        self, line: _Line, places: Sequence[int | None], made: Mapping[Var, int], count: int
    ) -> list[list[int]]:
        """Returns for each stage which outputs it gives: those that it makes; of what is free, those of its inputs."""
        read = [Leaves()] * count
        for equation, place in zip(line.jaxpr.eqns, places, strict=True):
            if place is not None:
                read[place] |= line.free.leaves(equation.invars)
        results: list[list[int]] = [[] for _ in range(count)]
        for at, one in enumerate(line.jaxpr.outvars):
            place = count - 1
            if at != self._loss and not isinstance(one, Constant):
                leaves = line.free.leaves([one])
                users = [stage for stage in range(count) if leaves & read[stage]]
                place = made[one] if one in made else max(users, default=count - 1)
            results[place].append(at)
        return results

    @property
    def _jaxpr(self) -> Jaxpr:
        return self._program.closed.jaxpr

    def _free(self, jaxpr: Jaxpr) -> Free:
        return find_free(jaxpr, self._trained)

    def _line(self, lengths: Mapping[int, Sequence[int]]) -> _Line:
        jaxpr, origins = with_scans_split(self._jaxpr, lengths)
        program = replace(self._program, closed=ClosedJaxpr(jaxpr, self._program.closed.consts))
        return _Line(program, origins, self._free(jaxpr))

    def _fine(self) -> _Line:
        """The chain with all loops in pieces of one iteration each, or a few."""
        lengths: dict[int, list[int]] = {}
        for at, one in enumerate(self._jaxpr.eqns):
            if one.primitive is scan_p and one.params["length"] > 1 and not is_light(one):
                length = one.params["length"]
                pieces = min(length, _MOST_PIECES)
                ends = [length * piece // pieces for piece in range(pieces + 1)]
                lengths[at] = [end - begin for begin, end in pairwise(ends)]
        return self._line(lengths)

    def _lengths(self, borders: Sequence[Border]) -> dict[int, list[int]]:
        ends = dict[int, list[int]]()
        for one in borders:
            if one.iteration:
                ends.setdefault(one.at, [0]).append(one.iteration)
        return {
            at: [end - begin for begin, end in pairwise([*found, self._jaxpr.eqns[at].params["length"]])]
            for at, found in ends.items()
        }


def _is_wide(found: Sequence[tuple[Border, float]], at: int, limit: float) -> bool:
    """Whether on either side of a border there is a much narrower one, with little work between these two."""
    narrow = found[at][0].live_bytes / _NARROWER
    left = [work for one, work in found[:at] if one.live_bytes <= narrow]
    right = [work for one, work in found[at + 1 :] if one.live_bytes <= narrow]
    return bool(left and right) and right[0] - left[-1] <= limit


def _scopes(equation: JaxprEqn) -> list[str]:
    """Returns the named scopes of an equation, the outermost first, without those of `vmap` and the like."""
    text = str(equation.source_info.name_stack)
    while text != (shorter := _TRANSFORM.sub(r"\1", text)):
        text = shorter
    return [one for one in text.split("/") if one]


def _is_within(equation: JaxprEqn, name: str) -> bool:
    scopes, wanted = _scopes(equation), name.split("/")
    return any(scopes[at : at + len(wanted)] == wanted for at in range(len(scopes)))
