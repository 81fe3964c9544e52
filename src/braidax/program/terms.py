"""Terms: a traced program as values made of values, with what is known of each about the rows of some inputs.

A value goes *by rows* of a table when its dim 0 is that of the table and each of its rows is made of the same row of
what goes by rows of that table, and of what does not go by rows at all. So a few rows of it can be computed from a few
rows of the table.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jax.extend.core.primitives import select_n_p
from jax.extend.source_info_util import current_name_stack, user_context

from .bodies import CALLS, aval_of
from .row_rules import SUMS, by_rows, is_even
from .simplify import simpler


class Making(NamedTuple):
    """What makes a value: output `output` of a primitive. **Fields:** `equation`: that it comes from, if from one."""

    primitive: Any
    params: Mapping[str, Any]
    operands: "tuple[Term, ...]"
    output: int
    equation: JaxprEqn | None


class OfRows(NamedTuple):
    """What is known of the rows of a value.

    **Fields:** `table`: whose rows it goes by, or "". `even`: whether all its rows are alike. `why`: why it cannot be
    computed without whole tables, or "", and `blamed` of which ones.
    """

    table: str = ""
    even: bool = False
    why: str = ""
    blamed: frozenset[str] = frozenset()


_NOTHING = OfRows()


@dataclass(frozen=True, eq=False)
class Term:
    """A value of a program; the same value is the same object.

    **Fields:** `number`: higher than those of its operands. `shape`, `dtype`. `making`: None of inputs, literals and
    constants. `at`: of an input, which one it is. `value`: of a literal the number that all elements are, of a constant
    the array. `reads`: the numbers of the inputs it is made of, as bits. `rows`: what is known of these.
    """

    number: int
    shape: tuple[int, ...]
    dtype: Any
    making: Making | None = None
    at: int = -1
    value: Any = None
    reads: int = 0
    rows: OfRows = _NOTHING

    @property
    def operands(self) -> "tuple[Term, ...]":
        """What it is made of."""
        return () if self.making is None else self.making.operands

    @property
    def name(self) -> str:
        """Of the primitive that makes it, or ""."""
        return "" if self.making is None else self.making.primitive.name

    @property
    def table(self) -> str:
        """Whose rows it goes by, or ""."""
        return self.rows.table

    @property
    def even(self) -> bool:
        """Whether all its rows are alike."""
        return self.rows.even

    @property
    def is_input(self) -> bool:
        """Whether it is an input of the program."""
        return self.making is None and self.value is None

    @property
    def is_literal(self) -> bool:
        """Whether all its elements are one known number."""
        return self.making is None and self.value is not None and np.ndim(self.value) == 0

    @property
    def is_sum(self) -> bool:
        """Whether it is made of all rows of a table, summed (or joined by "and", "or")."""
        return not self.table and any(operand.table for operand in self.operands)

    def made_by(self, name: str) -> bool:
        """Whether a primitive of that name makes it."""
        return self.making is not None and self.name == name

    def equals(self, number: Any) -> bool:
        """Whether all its elements are a number."""
        return self.is_literal and bool(self.value == number)


class Terms:
    """Makes terms. **Arguments:** `gradients`: the indices of the inputs that are 0 in rows that nothing has used."""

    def __init__(self, gradients: Collection[int] = ()) -> None:
        self._made: dict[Any, Term] = {}
        self._count = 0
        self._gradients = frozenset(gradients)

    def _new(self, key: Any, **fields: Any) -> Term:
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = Term(self._count, **fields)
            self._count += 1
        return found

    def given(self, index: int, spec: Any, *, table: str = "") -> Term:
        """Returns the input of a number. **Arguments:** `table`: whose rows it goes by, if any."""
        rows = OfRows(table=table)
        return self._new(
            ("input", index), shape=tuple(spec.shape), dtype=spec.dtype, reads=1 << index, at=index, rows=rows
        )

    def literal(self, value: Any, shape: tuple[int, ...], dtype: Any) -> Term:
        """Returns the array, all of whose elements are a number."""
        value = np.asarray(value).astype(dtype)[()]
        key = ("literal", value.tobytes(), str(dtype), shape)
        return self._new(key, shape=shape, dtype=np.dtype(dtype), value=value, rows=OfRows(even=bool(shape)))

    def constant(self, value: Any) -> Term:
        """Returns a constant of a program."""
        aval: Any = jax.typeof(value)
        shape, dtype = tuple(aval.shape), aval.dtype
        if not shape and not jnp.issubdtype(dtype, jax.dtypes.extended):
            return self.literal(np.asarray(value), (), dtype)
        return self._new(("constant", id(value)), shape=shape, dtype=dtype, value=value)

    def made(
        self,
        primitive: Any,
        params: Mapping[str, Any],
        operands: Sequence[Term],
        aval: Any,
        *,
        index: int = 0,
        equation: JaxprEqn | None = None,
    ) -> Term:
        """Returns what a primitive makes of operands, its output of that index, with what is known of its rows."""
        try:
            named: Any = tuple(sorted(params.items()))
            hash(named)
        except TypeError:
            named = id(params)
        key = (primitive, named, tuple(operand.number for operand in operands), index)
        if key in self._made:
            return self._made[key]
        reads = 0
        for operand in operands:
            reads |= operand.reads
        shape = tuple(aval.shape)
        making = Making(primitive, params, tuple(operands), index, equation)
        rows = self._of_rows(primitive, params, operands, shape)
        return self._new(key, shape=shape, dtype=aval.dtype, making=making, reads=reads, rows=rows)

    def _of_rows(
        self, primitive: Any, params: Mapping[str, Any], operands: Sequence[Term], shape: tuple[int, ...]
    ) -> OfRows:
        blamed = frozenset[str]().union(*(operand.rows.blamed for operand in operands))
        if blamed:
            return OfRows(why=next(operand.rows.why for operand in operands if operand.rows.why), blamed=blamed)
        tables = frozenset(operand.table for operand in operands if operand.table)
        if not tables:
            return OfRows(even=is_even(primitive, params, operands, shape))
        (table, *others) = tables
        why = by_rows(primitive, params, operands, shape) if not others else f"{primitive.name} of two tables"
        if not why:
            return OfRows(table=table)
        if not others and primitive.name in SUMS and 0 in params["axes"]:
            if self.rested(operands[0]).equals(SUMS[primitive.name]):
                return _NOTHING
            why = f"{why}, of more than their gradients"
        return OfRows(why=why, blamed=tables)

    def walk(self, jaxpr: Jaxpr, consts: Sequence[Any], inputs: Sequence[Term], *, enter: bool = False) -> list[Term]:
        """Returns the outputs of a jaxpr as terms.

        Calls are entered where something goes by rows, and left whole elsewhere. **Arguments:** `enter`: enter all.
        """
        known: dict[Any, Term] = dict(zip(jaxpr.invars, inputs, strict=True))
        known |= {variable: self.constant(value) for variable, value in zip(jaxpr.constvars, consts, strict=True)}

        def read(atom: Any) -> Term:
            return self.constant(atom.val) if isinstance(atom, Literal) else known[atom]

        for equation in jaxpr.eqns:
            outputs = self._outputs(equation, [read(atom) for atom in equation.invars], enter)
            known.update(zip(equation.outvars, outputs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _outputs(self, equation: JaxprEqn, operands: list[Term], enter: bool) -> list[Term]:
        name, params = equation.primitive.name, equation.params
        inside = enter or any(operand.table or operand.even for operand in operands)
        inside |= not any(operand.shape for operand in operands) and any(
            aval_of(variable).shape for variable in equation.outvars
        )
        if inside and name in CALLS and CALLS[name] in params:
            body = params[CALLS[name]]
            return self.walk(getattr(body, "jaxpr", body), getattr(body, "consts", ()), operands, enter=enter)
        if inside and name == "cond":
            which, *rest = operands
            branches: Any = params["branches"]
            if which.is_literal:
                branches = [branches[int(np.clip(which.value, 0, len(branches) - 1))]]
            found = [self.walk(branch.jaxpr, branch.consts, rest, enter=enter) for branch in branches]
            return [self._chosen(which, cases) for cases in zip(*found, strict=True)]
        make = self.simplified if enter else self.made
        return [
            make(equation.primitive, params, operands, variable.aval, index=index, equation=equation)
            for index, variable in enumerate(equation.outvars)
        ]

    def _chosen(self, which: Term, cases: Sequence[Term]) -> Term:
        """One of the results of the branches of a cond."""
        if all(case is cases[0] for case in cases):
            return cases[0]
        return self.made(select_n_p, {}, [which, *cases], cases[0])

    def simplified(
        self,
        primitive: Any,
        params: Mapping[str, Any],
        operands: Sequence[Term],
        aval: Any,
        *,
        index: int = 0,
        equation: JaxprEqn | None = None,
    ) -> Term:
        """As `made`, or something simpler that is the same."""

        def literal(value: Any) -> Term:
            return self.literal(value, tuple(aval.shape), aval.dtype)

        found = simpler(literal, primitive, params, operands, aval)
        return found or self.made(primitive, params, operands, aval, index=index, equation=equation)

    def rested(self, term: Term, replaced: Mapping[Term, Term] | None = None) -> Term:
        """Returns a term as it is in rows without a gradient, simplified; what it reads besides rows stays as it is.

        **Arguments:** `replaced`: what else stands in place of terms.
        """
        done: dict[int, Term] = {one.number: other for one, other in (replaced or {}).items()}
        for one in terms_between([term], done):
            if one.is_input and one.table and one.at in self._gradients:
                done[one.number] = self.literal(0, one.shape, one.dtype)
            elif one.making is None or one.is_sum or not (one.table or one.even or not one.shape):
                done[one.number] = one
            else:
                done[one.number] = self._again(one, one.making, [done[operand.number] for operand in one.operands])
        return done[term.number]

    def _again(self, term: Term, making: Making, operands: list[Term]) -> Term:
        name, params = making.primitive.name, making.params
        if name in CALLS and CALLS[name] in params:
            body: Any = params[CALLS[name]]
            jaxpr, consts = getattr(body, "jaxpr", body), getattr(body, "consts", ())
            return self.walk(jaxpr, consts, operands, enter=True)[making.output]
        return self.simplified(making.primitive, params, operands, term, index=making.output, equation=making.equation)


def terms_between(wanted: Iterable[Term], known: Mapping[int, Any]) -> list[Term]:
    """Returns what must be computed to have some terms, in order. **Arguments:** `known`: numbers of those at hand."""
    found: dict[int, Term] = {}
    todo = [term for term in wanted if term.number not in known]
    while todo:
        term = todo.pop()
        if term.number not in found:
            found[term.number] = term
            todo += [operand for operand in term.operands if operand.number not in known]
    return [found[number] for number in sorted(found)]


def of_no_rows(wanted: Iterable[Term]) -> list[Term]:
    """Returns the values that some terms by rows are made of and that do not go by rows, in order."""
    found: dict[int, Term] = {}
    todo, seen = list(wanted), set[int]()
    while todo:
        term = todo.pop()
        if term.number in seen:
            continue
        seen.add(term.number)
        if term.table or (term.even and not term.is_literal):
            todo += term.operands
        elif not term.is_literal:
            found[term.number] = term
    return [found[number] for number in sorted(found)]


def compute(
    wanted: Sequence[Term],
    known: Mapping[int, Any],
    *,
    rows: tuple[Any, ...] | None = None,
) -> list[Any]:
    """Computes terms.

    **Arguments:** `known`: values by the numbers of terms, of all inputs that are needed, and of sums. `rows`: how many
    rows there are of everything that goes by rows, or is even; with more numbers, the shape of all that. None where
    these are whole.

    **Returns:** the values, in order.
    """
    values = dict(known)
    with jax.debug_nans(False):
        for term in terms_between(wanted, values):
            _compute(term, values, rows)
    return [values[term.number] for term in wanted]


def sums_below(wanted: Iterable[Term]) -> list[Term]:
    """Returns the terms that sum all rows of a table and that others are made of, in order."""
    found: dict[int, Term] = {}
    todo, seen = list(wanted), set[int]()
    while todo:
        term = todo.pop()
        if term.number not in seen:
            seen.add(term.number)
            if term.is_sum:
                found[term.number] = term
            todo += term.operands
    return [found[number] for number in sorted(found)]


def _compute(term: Term, values: dict[int, Any], rows: tuple[Any, ...] | None) -> None:
    shape = term.shape
    if rows is not None and (term.table or term.even):
        shape = (*rows, *shape[len(rows) :])
    making = term.making
    if making is None:
        assert term.value is not None, "inputs are known"
        whole = jnp.full(shape, term.value, term.dtype) if term.is_literal and shape else term.value
        values[term.number] = np.asarray(whole) if term.is_literal and not shape else whole
        return
    operands = [values[operand.number] for operand in term.operands]
    params = dict(making.params)
    sized = {"broadcast_in_dim": "shape", "reshape": "new_sizes"}.get(making.primitive.name)
    if rows is not None and sized:
        params[sized] = shape
    if making.equation is None:
        outputs = making.primitive.bind(*operands, **making.primitive.get_bind_params(params))
    else:
        source = making.equation.source_info
        names = current_name_stack() + source.name_stack
        with user_context(source.traceback, name_stack=names), making.equation.ctx.manager:
            outputs = making.primitive.bind(*operands, **making.primitive.get_bind_params(params))
    values[term.number] = outputs[making.output] if making.primitive.multiple_results else outputs


def terms_of(terms: Terms, closed: ClosedJaxpr, inputs: Sequence[Term]) -> list[Term]:
    """Returns the outputs of a closed jaxpr."""
    return terms.walk(closed.jaxpr, closed.consts, inputs)
