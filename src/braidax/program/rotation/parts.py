"""Evaluating a jaxpr on parts: of values that are divided along some dims, one part each.

What a dim is divided by is a *division*: a number of equal parts, and which of them this is. An operand that is whole
is cut where it meets a divided one; a sum over a divided dim gives a *partial* result, which nothing else may use.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, primitives
from jax.extend.core.primitives import custom_jvp_call_p, jit_p

from braidax.program.bodies import aval_of, bind
from braidax.program.dim_rules import At, line_at, rule_of
from braidax.program.flow import Place
from braidax.program.products import product_in_order
from braidax.program.reading import read_part
from braidax.program.unions import Unions

from .division import Division, Undivided
from .labels import BATCH

Divided = tuple[int | None, ...]
"""For each dim of a value the number of the division that it is divided by."""


@dataclass(frozen=True)
class Part:
    """A part of a value.

    **Fields:** `value`; `divided`, its dims. `is_partial`: it is one term of a sum. `made`: the equation that made it,
    and of what, if that can be made smaller at once. `given`: which input it is.
    """

    value: Any
    divided: Divided
    is_partial: bool = False
    made: tuple[JaxprEqn, Sequence[Any]] | None = None
    given: int | None = None


@dataclass
class Evaluation:
    """One evaluation of a jaxpr on parts.

    **Fields:** `divisions`: by number. `maxima`: values of maxima over a divided dim that are known; those that are not
    are taken over the part, which is put into `found`. `cut`: inputs that were cut, as `(input, dim, division)`, and
    `uncut`: those that were also used whole. `in_order`: whether gradients of products are made in the order of dims.
    `products`: those that were computed before.
    """

    divisions: Mapping[int, Division]
    maxima: Mapping[Var, Any] | None = None
    tops: Collection[Var] = ()
    found: dict[Var, Any] = field(default_factory=dict[Var, Any])
    cut: set[tuple[int, int, int]] = field(default_factory=set[tuple[int, int, int]])
    uncut: set[int] = field(default_factory=set[int])
    in_order: bool = False
    products: Mapping[Var, Any] = field(default_factory=dict[Var, Any])

    def run(self, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Part]) -> dict[Var, Part]:
        """Evaluates a jaxpr. **Returns:** every value of it. **Raises:** `Undivided`."""
        known: dict[Var, Part] = {
            var: Part(value, (None,) * aval_of(var).ndim) for var, value in zip(jaxpr.constvars, consts, strict=True)
        }
        known.update(zip(jaxpr.invars, args, strict=True))
        for equation in jaxpr.eqns:
            inputs = [_whole(atom) if isinstance(atom, Literal) else known[atom] for atom in equation.invars]
            try:
                known.update(zip(equation.outvars, self._one(equation, inputs), strict=True))
            except Undivided as error:
                error.equation = equation  # at last the one of this jaxpr, whatever it holds
                raise
        return known

    def part_of(self, one: Part, dim: int, division: int) -> Part:
        """Returns a part of what is whole along a dim."""
        divided = tuple(division if at == dim else to for at, to in enumerate(one.divided))
        return replace(one, value=self._cut(one, divided), divided=divided)

    def _one(self, equation: JaxprEqn, inputs: Sequence[Part]) -> list[Part]:
        name = equation.primitive.name
        if any(one.is_partial for one in inputs):
            raise Undivided(f"a sum over parts is used by {name} at {_line(equation)}")
        first = equation.outvars[0] if equation.outvars else None
        if first is not None and first in self.tops:
            if self.maxima is not None:
                return [Part(self.maxima[first], self._without(equation, inputs[0].divided))]
            (top,) = self._bound(equation, inputs)
            self.found[first] = top.value
            return [Part(top.value, top.divided)]
        if equation.primitive is custom_jvp_call_p:
            return self._custom(equation, inputs)
        if equation.primitive is jit_p:
            return self._inner(equation.params["jaxpr"], inputs)
        in_parts = any(one is not None for one in inputs[0].divided) if inputs else False
        if equation.primitive is primitives.sharding_constraint_p and in_parts:
            return [inputs[0]]
        return self._bound(equation, inputs)

    def _without(self, equation: JaxprEqn, divided: Divided) -> Divided:
        return tuple(one for dim, one in enumerate(divided) if dim not in equation.params["axes"])

    def _bound(self, equation: JaxprEqn, inputs: Sequence[Part]) -> list[Part]:
        """Computes an equation whose params are made those of the parts."""
        classes = _Classes(equation, inputs)
        wanted = [classes.of_operand(at) for at in range(len(inputs))]
        results = [classes.of_result(at) for at in range(len(equation.outvars))]
        summed = classes.summed
        name = f"{equation.primitive.name} at {_line(equation)}"
        for labels in (*wanted, *results):
            there = [one for one in labels if one is not None]
            if len({*there}) < len(there):
                raise Undivided(f"two dims of one value of {name} belong together")
        if classes.blocked:
            raise Undivided(f"{name} cannot be done on parts")
        for one in summed:
            if any(one in labels for labels in results) or not self.divisions[one].sums:
                raise Undivided(f"{name} needs all parts")
            self._check_sum(equation, name)
        if not any(one is not None for labels in (*wanted, *results) for one in labels):
            self.uncut |= {one.given for one in inputs if one.given is not None}
            outputs = bind(equation, [one.value for one in inputs])
            made = (equation, [one.value for one in inputs]) if equation.primitive in _SPREADING else None
            return [Part(value, (None,) * aval_of(atom).ndim, made=made) for value, atom in _zip(outputs, equation)]
        values = [self._cut(one, to) for one, to in zip(inputs, wanted, strict=True)]
        values = self._masked(equation, values, wanted, summed)
        outputs = self._picked(equation, values, wanted)
        if outputs is None:
            resized = self._resized(equation, wanted, results)
            ordered = [at for at, labels in enumerate(wanted) if self.in_order and BATCH not in labels]
            if ordered and equation.primitive is primitives.dot_general_p:
                outputs = [product_in_order(resized, values, ordered, self.products.get(equation.outvars[0]))]
            else:
                outputs = bind(resized, values)
        return [Part(value, labels, is_partial=bool(summed)) for value, labels in zip(outputs, results, strict=True)]

    def _check_sum(self, equation: JaxprEqn, name: str) -> None:
        adds = (primitives.dot_general_p, primitives.conv_general_dilated_p, primitives.reduce_sum_p)
        if equation.primitive in adds or equation.primitive is primitives.gather_p:
            return
        if equation.outvars[0] not in self.tops:
            raise Undivided(f"{name} needs all parts")

    def _cut(self, one: Part, wanted: Divided) -> Any:
        """Returns the part of a value along dims along which it is whole yet."""
        value = one.value
        cuts = [
            (dim, to)
            for dim, (had, to) in enumerate(zip(one.divided, wanted, strict=True))
            if had is None and to is not None
        ]
        if one.given is not None:
            self.cut |= {(one.given, dim, to) for dim, to in cuts}
            if not cuts:
                self.uncut.add(one.given)
        if one.made is not None and cuts:
            value, cuts = self._made_smaller(one, cuts)
        for dim, to in cuts:
            value = self.divisions[to].cut(value, dim)
        return value

    def _made_smaller(self, one: Part, cuts: list[tuple[int, int]]) -> tuple[Any, list[tuple[int, int]]]:
        """Makes a broadcast as small as it is wanted, rather than cutting it."""
        assert one.made is not None, "a broadcast"
        equation, inputs = one.made
        dims = equation.params["broadcast_dimensions"]
        shape, before, left = list(equation.params["shape"]), jnp.shape(inputs[0]), list[tuple[int, int]]()
        for dim, to in cuts:
            if dim in dims and before[dims.index(dim)] != 1:
                left.append((dim, to))
            else:
                shape[dim] = self.divisions[to].part_size(shape[dim])
        params = dict(equation.params, shape=tuple(shape))
        return bind(equation.replace(params=params), inputs)[0], left

    def _masked(
        self, equation: JaxprEqn, values: list[Any], wanted: Sequence[Divided], summed: Collection[int]
    ) -> list[Any]:
        """Sets to nothing what is padding in an operand that is summed over."""
        if equation.primitive is primitives.gather_p:
            return values
        for one in summed:
            division = self.divisions[one]
            if division.size is not None and one in wanted[0]:
                dim = wanted[0].index(one)
                there = division.is_there(aval_of(equation.invars[0]).shape[dim])
                shape = [-1 if at == dim else 1 for at in range(values[0].ndim)]
                values[0] = jnp.where(there.reshape(shape), values[0], _nothing(equation, values[0].dtype))
        return values

    def _picked(self, equation: JaxprEqn, values: list[Any], wanted: Sequence[Divided]) -> list[Any] | None:
        """Reads what of its indices is in this part, and nothing for the others."""
        if equation.primitive is not primitives.gather_p:
            return None
        numbers, shape = equation.params["dimension_numbers"], aval_of(equation.invars[0]).shape
        over = [dim for dim in numbers.collapsed_slice_dims if wanted[0][dim] is not None]
        if not over:
            return None
        if len(over) > 1 or len(numbers.start_index_map) != 1:
            raise Undivided(f"gather at {_line(equation)} reads by several indices")
        division = self.divisions[wanted[0][over[0]]]  # pyright: ignore[reportArgumentType]
        table, ids = values
        resized = self._resized(equation, wanted, [(None,) * aval_of(equation.outvars[0]).ndim])
        size = shape[over[0]]
        bounds = division.start(size), division.first(size), division.start(size) + division.part_size(size)
        try:
            return [read_part(resized, table, ids, bounds, size)]
        except TypeError as error:
            raise Undivided(f"gather at {_line(equation)} {error}") from error

    def _resized(self, equation: JaxprEqn, wanted: Sequence[Divided], results: Sequence[Divided]) -> JaxprEqn:
        """Returns the equation with the sizes of parts in its params."""
        params, primitive = dict(equation.params), equation.primitive

        def sizes(shape: Sequence[int], labels: Divided) -> tuple[int, ...]:
            return tuple(
                size if one is None else self.divisions[one].part_size(size)
                for size, one in zip(shape, labels, strict=True)
            )

        if primitive is primitives.broadcast_in_dim_p:
            params["shape"] = sizes(params["shape"], results[0])
        elif primitive is primitives.reshape_p:
            params["new_sizes"] = sizes(params["new_sizes"], results[0])
        elif primitive is primitives.slice_p:
            shape = aval_of(equation.invars[0]).shape
            limits = zip(params["limit_indices"], sizes(shape, wanted[0]), wanted[0], strict=True)
            params["limit_indices"] = tuple(limit if one is None else size for limit, size, one in limits)
        elif primitive is primitives.dynamic_slice_p:
            params["slice_sizes"] = sizes(params["slice_sizes"], results[0])
        elif primitive is primitives.gather_p:
            shape = aval_of(equation.invars[0]).shape
            whole = zip(params["slice_sizes"], shape, sizes(shape, wanted[0]), strict=True)
            params["slice_sizes"] = tuple(part if had == size and had > 1 else had for had, size, part in whole)
        return equation.replace(params=params)

    def _custom(self, equation: JaxprEqn, inputs: Sequence[Part]) -> list[Part]:
        """Keeps the derivative that a function has of its own: what JAX traces of it is evaluated on parts, too."""
        body: ClosedJaxpr = equation.params["call_jaxpr"]
        plain = replace(self, in_order=False)
        avals = [aval_of(atom) for atom in equation.invars]
        specs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
        floats = [at for at, spec in enumerate(specs) if jnp.issubdtype(spec.dtype, jnp.inexact)]

        def moved(values: Sequence[Any], tangents: Sequence[Any]) -> Any:
            def call(*some: Any) -> Any:
                given = list(values)
                for at, value in zip(floats, some, strict=True):
                    given[at] = value
                return bind(equation, given)

            return jax.jvp(call, [values[at] for at in floats], list(tangents))[1]

        labels = [one.divided for one in inputs]
        whole = plain._inner(body, inputs)

        @jax.custom_jvp
        def called(*values: Any) -> Any:
            parts = [Part(value, divided) for value, divided in zip(values, labels, strict=True)]
            return [one.value for one in plain._inner(body, parts)]

        @called.defjvp
        def of_tangents(values: Any, tangents: Any) -> Any:  # pyright: ignore[reportUnusedFunction]
            closed = jax.make_jaxpr(moved)(specs, [specs[at] for at in floats])
            parts = [Part(value, divided) for value, divided in zip(values, labels, strict=True)]
            parts += [Part(tangents[at], labels[at]) for at in floats]
            found = plain._inner(closed, parts)
            wrong = [one for one, made in zip(found, whole, strict=True) if one.divided != made.divided]
            if wrong:
                raise Undivided(f"the derivative of {equation.primitive.name} at {_line(equation)} has other parts")
            return called(*values), [one.value for one in found]

        values = called(*(one.value for one in inputs))
        return [Part(value, one.divided) for value, one in zip(values, whole, strict=True)]

    def _inner(self, closed: ClosedJaxpr, inputs: Sequence[Part]) -> list[Part]:
        known = self.run(closed.jaxpr, closed.consts, inputs)
        return [_whole(atom) if isinstance(atom, Literal) else known[atom] for atom in closed.jaxpr.outvars]


class _Classes:
    """What the rule of an equation says of the dims of its operands, each of which has a label of its own at first."""

    def __init__(self, equation: JaxprEqn, inputs: Sequence[Part]) -> None:
        self._unions = Unions()
        self._sums, self._blocks = set[int](), set[int]()
        known: dict[int, int] = {}
        self._operands: list[list[int]] = []
        for one in inputs:
            labels: list[int] = []
            for told in one.divided:
                labels.append(self._unions.new())
                if told is not None:
                    known[labels[-1]] = told
            self._operands.append(labels)
        self._results = rule_of(equation)(At(self, equation, Place()), self._operands)
        if equation.primitive in (primitives.dot_general_p, primitives.conv_general_dilated_p):
            self._sums = {self._operands[0][dim] for dim in _contracted(equation)}
        self._divisions: dict[int, int] = {}
        for label, told in known.items():
            if self._divisions.setdefault(self._unions.root(label), told) != told:
                raise Undivided(f"{equation.primitive.name} at {_line(equation)} joins what is divided otherwise")

    def _of(self, labels: Sequence[int | None]) -> Divided:
        return tuple(None if one is None else self._divisions.get(self._unions.root(one)) for one in labels)

    def of_operand(self, at: int) -> Divided:
        return self._of(self._operands[at])

    def of_result(self, at: int) -> Divided:
        return self._of(self._results[at])

    @property
    def summed(self) -> set[int]:
        return {one for one in self._of([*self._sums]) if one is not None}

    @property
    def blocked(self) -> bool:
        return any(one is not None for one in self._of([*self._blocks]))

    # Groups, that rules write to

    def unite(self, one: int | None, other: int | None) -> int | None:
        return self._unions.unite(one, other)

    def block(self, label: int | None, why: str) -> None:
        if label is not None:
            self._blocks.add(label)

    def cut(self, label: int | None, borders: Collection[Any], why: str) -> None:
        self.block(label, why)

    def shrink(self, label: int | None, size: int) -> None:
        """Parts are checked where they are made."""

    def sums(self, label: int | None, place: Place, num_bytes: int) -> None:
        if label is not None:
            self._sums.add(label)


def _contracted(equation: JaxprEqn) -> Sequence[int]:
    """The dims of the first operand that a product or a convolution sums over."""
    numbers = equation.params["dimension_numbers"]
    return numbers[0][0] if equation.primitive is primitives.dot_general_p else [numbers.lhs_spec[1]]


_SPREADING = (primitives.broadcast_in_dim_p,)


def _whole(literal: Literal) -> Part:
    return Part(literal.val, (None,) * aval_of(literal).ndim)


def _zip(outputs: Sequence[Any], equation: JaxprEqn) -> Any:
    return zip(outputs, equation.outvars, strict=True)


def _line(equation: JaxprEqn) -> str:
    return line_at(equation, Place())


def _nothing(equation: JaxprEqn, dtype: Any) -> Any:
    """What changes no result of a sum, or of a maximum."""
    if equation.primitive is primitives.reduce_max_p:
        return jnp.asarray(-jnp.inf if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).min, dtype)
    return jnp.zeros((), dtype)
