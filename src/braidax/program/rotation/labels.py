"""Where the dims of a program's samples, and those of some weights, are met again in its values."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend.core import JaxprEqn
from jax.extend.core.primitives import custom_jvp_call_p, custom_vjp_call_p, jit_p

from braidax.program.bodies import Path, aval_of
from braidax.program.dim_rules import At, rule_of
from braidax.program.flow import Place, flow, is_slice, is_stack
from braidax.program.trace import Program
from braidax.program.unions import Unions

BATCH = 0
"""The label of the dim of the samples."""

Labels = tuple[int | None, ...]


@dataclass(frozen=True)
class Labeled:
    """**Fields:** `at`: by the path of an equation, the labels of its operands' dims and of its results'. `blocked`: by
    the path of an equation, labels of dims that it cannot do part by part. `leaves`: the labels of leaves' dims.
    `of_samples`: by the path of an equation, which of its operands are made of samples."""

    at: Mapping[Path, tuple[Sequence[Labels], Sequence[Labels]]]
    blocked: Mapping[Path, Collection[int]]
    leaves: Mapping[int, int]
    of_samples: Mapping[Path, Sequence[bool]]


def labeled(program: Program, dims: Mapping[int, int], divided: Mapping[int, Sequence[int | None] | int]) -> Labeled:
    """Follows dims through a program; those that meet get one label.

    **Arguments:** `dims`: of leaves of the first argument, by number, one dim each. `divided`: as of `find_batch_dims`.
    """
    found = _Found()
    assert found.unions.new() == BATCH, "the first label is that of the samples"
    inputs: list[Labels | None] = []
    leaves: dict[int, int] = {}
    samples: list[bool | None] = []
    for number, argument in enumerate(program.in_specs):
        told = divided.get(number)
        for at, spec in enumerate(jax.tree.leaves(argument)):
            dim = told[at] if isinstance(told, Sequence) else told
            label = BATCH
            samples.append(True if dim is not None else None)
            if number == 0 and at in dims:
                dim, label = dims[at], found.unions.new()
                leaves[at] = label
            inputs.append(tuple(label if one == dim else found.unions.new() for one in range(spec.ndim)))
    flow(program.closed.jaxpr, inputs, found)
    made = _OfSamples()
    flow(program.closed.jaxpr, samples, made)

    def rooted(several: Sequence[Labels]) -> list[Labels]:
        return [tuple(None if one is None else found.unions.root(one) for one in labels) for labels in several]

    return Labeled(
        {path: (rooted(operands), rooted(results)) for path, (operands, results) in found.at.items()},
        {path: {found.unions.root(one) for one in labels} for path, labels in found.blocked.items()},
        {leaf: found.unions.root(label) for leaf, label in leaves.items()},
        made.at,
    )


@dataclass
class _OfSamples:
    """Follows what is made of samples."""

    at: dict[Path, list[bool]] = field(default_factory=dict[Path, list[bool]])

    def through(self, equation: JaxprEqn, facts: Sequence[bool | None], place: Place) -> Sequence[bool | None]:
        self.at[place.path] = [fact is not None for fact in facts]
        return [True] * len(equation.outvars)

    def into(self, equation: JaxprEqn, operand: int, fact: bool, place: Place) -> bool:
        return fact

    def out_of(self, equation: JaxprEqn, result: int, fact: bool, place: Place) -> bool:
        return fact

    def join(self, one: bool | None, other: bool | None) -> bool | None:
        return one or other


@dataclass
class _Found:
    """What `flow` follows, and what rules write to."""

    unions: Unions = field(default_factory=Unions)
    at: dict[Path, tuple[list[Labels], list[Labels]]] = field(default_factory=dict[Path, Any])
    blocked: dict[Path, set[int]] = field(default_factory=dict[Path, set[int]])
    of_results: dict[tuple[Path, int, int, int], int] = field(default_factory=dict[Any, int])
    here: Path = ()
    is_inside: bool = False

    def through(self, equation: JaxprEqn, facts: Sequence[Labels | None], place: Place) -> Sequence[Labels | None]:
        dims = [
            (None,) * aval_of(atom).ndim if labels is None else labels
            for labels, atom in zip(facts, equation.invars, strict=True)
        ]
        here = self.here if self.is_inside else place.path
        self.here = here
        if equation.primitive in (custom_jvp_call_p, custom_vjp_call_p):
            results = self._inside(equation, dims)
            if equation.primitive is custom_vjp_call_p:
                for label in (label for labels in dims for label in labels):
                    self.block(label, "")
        else:
            found = rule_of(equation)(At(self, equation, place), dims)
            results = [self._known(labels, id(equation), at) for at, labels in enumerate(found)]
        if not self.is_inside:
            self.at[here] = ([*dims], results)
        return results

    def _known(self, labels: Sequence[int | None], equation: int, result: int) -> Labels:
        """Gives dims of which nothing is known labels of their own, the same whenever the equation is met again."""
        return tuple(
            self.of_results.setdefault((self.here, equation, result, dim), self.unions.new()) if one is None else one
            for dim, one in enumerate(labels)
        )

    def _inside(self, equation: JaxprEqn, dims: Sequence[Labels]) -> list[Labels]:
        was, self.is_inside = self.is_inside, True
        found = flow(equation.params["call_jaxpr"].jaxpr, dims, self)
        self.is_inside = was
        pairs = zip(found, equation.outvars, strict=True)
        return [(None,) * aval_of(atom).ndim if labels is None else labels for labels, atom in pairs]

    def into(self, equation: JaxprEqn, operand: int, fact: Labels, place: Place) -> Labels:
        if equation.primitive is jit_p or not is_slice(equation, operand):
            return fact
        self.here = self.here if self.is_inside else place.path
        self.block(fact[0], "")
        return fact[1:]

    def out_of(self, equation: JaxprEqn, result: int, fact: Labels, place: Place) -> Labels:
        return (None, *fact) if is_stack(equation, result) else fact

    def join(self, one: Labels | None, other: Labels | None) -> Labels | None:
        if one is None or other is None:
            return other if one is None else one
        made = [self.unite(*pair) for pair in zip(one, other, strict=True)]
        return tuple(new if old is None else old for old, new in zip(one, made, strict=True))

    # Groups

    def unite(self, one: int | None, other: int | None) -> int | None:
        return self.unions.unite(one, other)

    def block(self, label: int | None, why: str) -> None:
        if label is not None:
            self.blocked.setdefault(self.here, set()).add(label)

    def cut(self, label: int | None, borders: Collection[Any], why: str) -> None:
        self.block(label, why)

    def shrink(self, label: int | None, size: int) -> None:
        """Sizes are looked at where parts are made."""

    def sums(self, label: int | None, place: Place, num_bytes: int) -> None:
        """What is summed is seen from the labels of results."""
