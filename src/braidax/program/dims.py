"""Which dims of a program's values belong together, so that dividing one among devices divides them all.

Every operation says which dims of its operands and results are the same: of a product the contracted dims of both
sides, of a sum of two arrays all. The hidden dim of an MLP is thus one group, with the columns of the first weight, the
bias and the rows of the second; so are the heads of an attention, and a vocabulary.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, NamedTuple

import jax
from jax.extend.core import JaxprEqn
from jax.extend.core.primitives import (
    closed_call_p,
    custom_jvp_call_p,
    custom_vjp_call_p,
    dot_general_p,
    jit_p,
    remat_p,
    scan_p,
)

from .bodies import Path, aval_of
from .dim_rules import At, line_at, num_bytes, rule_of
from .flow import Place, flow, is_slice, is_stack
from .trace import Program
from .unions import Unions

ValueOrigin = tuple[Path, int]
"""What made a value: an equation's path and which result; or a jaxpr's path and -1 - input."""


@dataclass(frozen=True)
class Dot:
    """A product, and the groups of its dims.

    **Fields:** `path`. `operands`, `result`: for each dim its group. `origins`: what made each operand, where it can be
    told. `result_bytes`. `times`: how often it is computed.
    """

    path: Path
    operands: tuple[tuple[int | None, ...], tuple[int | None, ...]]
    result: tuple[int | None, ...]
    origins: tuple[ValueOrigin | None, ValueOrigin | None]
    operand_bytes: tuple[int, int]
    result_bytes: int
    times: int

    def contracts(self, group: int) -> bool:
        """Whether it sums over the dim of a group."""
        return all(group in dims for dims in self.operands) and group not in self.result

    def spreads(self, group: int) -> int | None:
        """Returns the operand that has nothing of a group, where only the other has it, free; else None."""
        has = [group in dims for dims in self.operands]
        return has.index(False) if sum(has) == 1 and group in self.result else None


@dataclass(frozen=True)
class Group:
    """Dims that belong together.

    **Fields:** `leaves`: pairs of a leaf of the argument that was asked for, and a dim of it. `divisor`: the greatest
    number that divides all of the sizes. `blocked`: why it cannot be divided, "" if it can. `conflicts`: groups that
    share a value with it. `summed_bytes`: of what is summed over devices where it is divided, forward and backward.
    `borders`: where else it is blocked for being taken apart, at which parts of its length.
    """

    leaves: tuple[tuple[int, int], ...]
    divisor: int
    blocked: str
    conflicts: frozenset[int]
    summed_bytes: int
    borders: frozenset[Fraction] = frozenset()


@dataclass(frozen=True)
class Cut:
    """Where a leaf is cut. **Fields:** `dim`, and the `sizes` of the pieces along it."""

    dim: int
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Dims:
    """The dims of a program.

    **Fields:** `groups`: by number. `dots`: all products that can be replaced, in the order of the program. `cuts`: by
    number the leaves that have to be cut, so that a dim of them can be divided.
    """

    groups: Mapping[int, Group]
    dots: tuple[Dot, ...]
    cuts: Mapping[int, Cut] = field(default_factory=dict[int, Cut])


def find_dims(program: Program, argument: int = 0, *, alike: Collection[Collection[tuple[int, int]]] = ()) -> Dims:
    """Groups the dims of all values of a program.

    **Arguments:** `argument`: whose leaves groups tell of. A group with dims of another argument is blocked. `alike`:
    dims that are of one group whatever the program says, each a pair of a leaf and a dim.
    """
    found = _Found()
    inputs: list[Any] = []
    owned: list[tuple[int, int, int]] = []
    for number, given in enumerate(program.in_specs):
        for leaf, spec in enumerate(jax.tree.leaves(given)):
            labels = tuple(found.new(size) for size in spec.shape)
            inputs.append(Held(labels, ((), -1 - len(inputs))))
            found.seen(labels)
            if number == argument:
                owned += [(label, leaf, dim) for dim, label in enumerate(labels)]
            else:
                for label in labels:
                    found.block(label, "it is a dim of the batch, or of what else the loss is given")
    labels = {(leaf, dim): label for label, leaf, dim in owned}
    for dims in alike:
        first, *others = (labels[dim] for dim in dims)
        for other in others:
            found.unite(first, other)
    flow(program.closed.jaxpr, inputs, found)
    return found.told(owned)


class Held(NamedTuple):
    """What is known of a value: for each dim a label, and what made it."""

    dims: tuple[int | None, ...]
    origin: ValueOrigin | None = None


@dataclass
class _Found:
    """Labels are numbers, which `unions` joins to groups."""

    unions: Unions = field(default_factory=Unions)
    sizes: list[int] = field(default_factory=list[int])
    blocks: dict[int, str] = field(default_factory=dict[int, str])
    cuts: dict[int, tuple[set[Fraction], str]] = field(default_factory=dict[int, tuple[set[Fraction], str]])
    values: set[tuple[int, ...]] = field(default_factory=set[tuple[int, ...]])
    dots: dict[Any, Dot] = field(default_factory=dict[Any, Dot])
    summed: dict[Any, tuple[int, int]] = field(default_factory=dict[Any, tuple[int, int]])  # (label, bytes)
    outer: tuple[Any, ...] = ()  # where this stands inside of what cannot be rewritten
    times: int = 1

    def new(self, size: int) -> int:
        self.sizes.append(size)
        return self.unions.new()

    def root(self, label: int) -> int:
        return self.unions.root(label)

    def unite(self, one: int | None, other: int | None) -> int | None:
        if one is None or other is None:
            return other if one is None else one
        size = math.gcd(self.sizes[self.root(one)], self.sizes[self.root(other)])
        root = self.unions.unite(one, other)
        assert root is not None, "both are known"
        self.sizes[root] = size
        return root

    def block(self, label: int | None, why: str) -> None:
        if label is not None:
            self.blocks.setdefault(label, why)

    def cut(self, label: int | None, borders: Collection[Fraction], why: str) -> None:
        if not borders:
            self.block(label, why)
        elif label is not None:
            known, first = self.cuts.get(label, (set[Fraction](), why))
            self.cuts[label] = {*known, *borders}, first

    def shrink(self, label: int | None, size: int) -> None:
        if label is not None:
            root = self.root(label)
            self.sizes[root] = math.gcd(self.sizes[root], size)

    def sums(self, label: int | None, place: Place, num_bytes: int) -> None:
        if label is not None:
            times = self.times * math.prod(place.lengths)
            self.summed[*self.outer, place.path, label] = (label, num_bytes * times)

    def seen(self, labels: Collection[int | None]) -> None:
        self.values.add(tuple(label for label in labels if label is not None))

    # The walk

    def through(self, equation: JaxprEqn, facts: Sequence[Held | None], place: Place) -> Sequence[Held | None]:
        dims = [
            (None,) * aval_of(atom).ndim if held is None else held.dims
            for held, atom in zip(facts, equation.invars, strict=True)
        ]
        if equation.primitive in (custom_jvp_call_p, custom_vjp_call_p):
            return self._inside(equation, dims, place)
        results = rule_of(equation)(At(self, equation, place), dims)
        if equation.primitive is dot_general_p:
            origins = tuple(None if held is None else held.origin for held in facts)
            self._dot(equation, dims, results[0], origins, place)
        for labels in results:
            self.seen(labels)
        return [Held(tuple(labels), (place.path, at)) for at, labels in enumerate(results)]

    def _inside(self, equation: JaxprEqn, dims: Sequence[Any], place: Place) -> Sequence[Held | None]:
        inner = replace(self, outer=(*self.outer, place.path), times=self.times * math.prod(place.lengths))
        results = flow(equation.params["call_jaxpr"].jaxpr, [Held(labels) for labels in dims], inner)
        return [
            None if held is None else Held(held.dims, None if self.outer else (place.path, at))
            for at, held in enumerate(results)
        ]

    def _dot(self, equation: JaxprEqn, dims: Any, result: Any, origins: Any, place: Place) -> None:
        atoms = [*equation.invars, *equation.outvars]
        first, second, made = (num_bytes(atom) for atom in atoms)
        known = (None, None) if self.outer or place.in_while else origins
        times = self.times * math.prod(place.lengths)
        dot = Dot(place.path, (dims[0], dims[1]), tuple(result), known, (first, second), made, times)
        self.dots[*self.outer, place.path] = dot

    def into(self, equation: JaxprEqn, operand: int, fact: Held, place: Place) -> Held:
        if equation.primitive in (jit_p, closed_call_p):
            return fact
        entered = (*place.path, 0) if equation.primitive in (scan_p, remat_p) and not self.outer else None
        dims = fact.dims
        if is_slice(equation, operand):
            self.block(dims[0], f"sliced step by step by scan at {line_at(equation, place)}")
            dims = dims[1:]
        return Held(dims, None if entered is None else (entered, -1 - operand))

    def out_of(self, equation: JaxprEqn, result: int, fact: Held, place: Place) -> Held:
        made = None if self.outer else (place.path, result)
        if equation.primitive in (jit_p, closed_call_p):
            passed = fact.origin is not None and fact.origin[0][: len(place.path)] != place.path
            return fact if passed else Held(fact.dims, made)
        return Held((None, *fact.dims) if is_stack(equation, result) else fact.dims, made)

    def join(self, one: Held | None, other: Held | None) -> Held | None:
        if one is None or other is None:
            return other if one is None else one
        dims = tuple(self.unite(*pair) for pair in zip(one.dims, other.dims, strict=True))
        # What was known before stays as it is, so that a loop comes to an end; labels are as good as their group.
        kept = tuple(new if old is None else old for old, new in zip(one.dims, dims, strict=True))
        return Held(kept, other.origin if _leaves(other.origin, one.origin) else one.origin)

    # The result

    def told(self, owned: Sequence[tuple[int, int, int]]) -> Dims:
        leaves: dict[int, list[tuple[int, int]]] = {}
        for label, leaf, dim in owned:
            leaves.setdefault(self.root(label), []).append((leaf, dim))
        blocked: dict[int, str] = {}
        for label, why in self.blocks.items():
            blocked.setdefault(self.root(label), why)
        borders: dict[int, set[Fraction]] = {}
        for label, (known, why) in self.cuts.items():
            if (root := self.root(label)) not in blocked or root in borders:
                borders.setdefault(root, set()).update(known)
                blocked.setdefault(root, why)
        conflicts: dict[int, set[int]] = {root: set() for root in leaves}
        for labels in self.values:
            roots = [self.root(label) for label in labels]
            for root in {*roots} & leaves.keys():
                conflicts[root] |= {*roots} - {root}
                if roots.count(root) > 1:
                    blocked.setdefault(root, "two dims of one value belong to it")
        dots = tuple(self._numbered(dot) for dot in self.dots.values())
        total = self._total(leaves, dots)
        groups = {
            root: Group(
                tuple(of),
                self.sizes[root],
                blocked.get(root, ""),
                frozenset(conflicts[root]),
                total[root],
                frozenset(borders.get(root, ())),
            )
            for root, of in leaves.items()
        }
        return Dims(groups, dots)

    def _numbered(self, dot: Dot) -> Dot:
        def roots(labels: Any) -> tuple[int | None, ...]:
            return tuple(None if label is None else self.root(label) for label in labels)

        return replace(dot, operands=(roots(dot.operands[0]), roots(dot.operands[1])), result=roots(dot.result))

    def _total(self, groups: Collection[int], dots: Sequence[Dot]) -> dict[int, int]:
        total = dict.fromkeys(groups, 0)
        for label, size in self.summed.values():
            if (root := self.root(label)) in total:
                total[root] += size
        once: set[Any] = set()
        for dot in dots:
            for root in total.keys() & {root for dims in dot.operands for root in dims if root is not None}:
                side = dot.spreads(root)
                if dot.contracts(root):
                    total[root] += dot.result_bytes * dot.times
                elif side is not None and (root, dot.origins[side] or dot.path) not in once:
                    once.add((root, dot.origins[side] or dot.path))  # its gradient, for all its uses together
                    total[root] += dot.operand_bytes[side] * dot.times
        return total


def _leaves(made: ValueOrigin | None, within: ValueOrigin | None) -> bool:
    """Whether a value is the result of the loop that another one is in: what is carried comes out as that."""
    return made is None or (within is not None and within[0][: len(made[0])] == made[0] != within[0])
