"""Parts of a program: what some of its values need, from others that are given."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jax.extend.core import Literal as Constant
from jax.extend.core.primitives import slice_p

from braidax.program.bodies import aval_of
from braidax.program.kinds import ELEMENTWISE
from braidax.program.trace import Program

Rows = tuple[int, int]
"""Of the leading dim of a leaf, the first that is taken and the one behind the last."""


def part_of(
    program: Program, inputs: Sequence[Any], outputs: Sequence[Any], *, always: Collection[int] = ()
) -> tuple[Program, dict[int, Rows | None]]:
    """Returns the part of a program that computes some of its values when others are given.

    It holds the equations that the outputs need and the inputs do not give, so that what depends on the arguments of
    the program only may be in several parts. An argument of which it reads slices along dim 0 and nothing else arrives
    as the rows that it reads, also where they are read behind casts.

    **Arguments:** `inputs`, `outputs`: variables of the program's jaxpr. `always`: equations that stay in any case.

    **Returns:** a program of the arguments of the whole one, with None in place of leaves that it does not read, and
    the tuple of inputs behind; it gives the tuple of outputs. And which leaves it reads, by number, with the rows.
    """
    jaxpr = program.closed.jaxpr
    kept = {id(jaxpr.eqns[at]) for at in always}
    equations = needed(jaxpr.eqns, variables(outputs), variables(inputs), kept)
    equations = needed(_rows_first(equations), variables(outputs), variables(inputs), kept)
    wanted, taken = list(outputs), dict[int, Rows | None]()
    used = variables([*outputs, *(atom for one in equations for atom in one.invars)])
    leaves: list[tuple[int, Var]] = []
    for at, leaf in enumerate(jaxpr.invars):
        if leaf in used:
            taken[at] = rows = _rows_of(equations, leaf, wanted)
            if rows:
                leaf, equations, wanted = _taken(equations, leaf, rows, wanted)
            leaves.append((at, leaf))
    part = closed_part(jaxpr, program.closed.consts, [*(leaf for _, leaf in leaves), *inputs], wanted, equations)
    specs: list[Any] = [None] * len(jaxpr.invars)
    for at, leaf in leaves:
        specs[at] = spec_of_aval(aval_of(leaf))
    args = jax.tree.unflatten(jax.tree.structure(program.in_specs), specs)
    given, made = (tuple(spec_of_aval(aval_of(one)) for one in atoms) for atoms in (inputs, wanted))
    return Program(part, (*args, given), made), taken


def needed(
    equations: Sequence[JaxprEqn], wanted: set[Var], given: set[Var], always: Collection[int] = frozenset()
) -> list[JaxprEqn]:
    """Returns the equations, in order, that compute the wanted values when some are given.

    **Arguments:** `always`: the ids of those that stay in any case.
    """
    alive = wanted - given
    kept: list[JaxprEqn] = []
    for equation in reversed(equations):
        if id(equation) in always or any(v in alive for v in equation.outvars):
            kept.append(equation)
            alive |= variables(equation.invars) - given
    return kept[::-1]


def variables(atoms: Iterable[Any]) -> set[Var]:
    """Returns those that are no literals."""
    return {atom for atom in atoms if not isinstance(atom, Constant)}


def closed_part(
    jaxpr: Jaxpr, consts: Sequence[Any], invars: Sequence[Var], outvars: Sequence[Any], eqns: Sequence[JaxprEqn]
) -> ClosedJaxpr:
    """Returns some equations of a jaxpr as one of their own, with those of its constants that they read."""
    read = variables(v for e in eqns for v in e.invars) | variables(outvars)
    held = [(v, value) for v, value in zip(jaxpr.constvars, consts, strict=True) if v in read]
    effects = frozenset(effect for equation in eqns for effect in equation.effects)
    part = jaxpr.replace(
        constvars=[v for v, _ in held], invars=list(invars), outvars=list(outvars), eqns=list(eqns), effects=effects,
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )  # fmt: skip
    return ClosedJaxpr(part, [value for _, value in held])


def spec_of_aval(aval: Any) -> jax.ShapeDtypeStruct:
    """Returns shape, dtype and weak type as arguments of programs are told."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def _rows_first(equations: Sequence[JaxprEqn]) -> list[JaxprEqn]:
    """Takes rows of what an elementwise operation is given, and not of what it gives."""
    made = {one.outvars[0]: one for one in equations if is_cast(one)}
    found: list[JaxprEqn] = []
    for equation in equations:
        behind: list[JaxprEqn] = []
        while _takes_rows(equation) and (cast := made.get(_operand(equation))):
            (source,) = (atom for atom in cast.invars if not isinstance(atom, Constant))
            aval = aval_of(source)
            rows = Var(ShapedArray(aval_of(equation.outvars[0]).shape, aval.dtype, aval.weak_type))
            operands = [rows if atom is source else atom for atom in cast.invars]
            behind.append(cast.replace(invars=operands, outvars=equation.outvars))
            equation = equation.replace(invars=[source], outvars=[rows])
        found += [equation, *reversed(behind)]
    return found


def is_cast(equation: JaxprEqn) -> bool:
    """Whether an equation makes of each element of one variable an element of its only result."""
    given = [atom for atom in equation.invars if not isinstance(atom, Constant)]
    if equation.primitive not in ELEMENTWISE or len(given) != 1 or len(equation.outvars) != 1 or equation.effects:
        return False
    return aval_of(given[0]).shape == aval_of(equation.outvars[0]).shape


def rows_taken(equation: JaxprEqn) -> Rows | None:
    """Returns the rows that a slice takes of its operand; None for what is no slice of rows."""
    if not _takes_rows(equation):
        return None
    return equation.params["start_indices"][0], equation.params["limit_indices"][0]


def _takes_rows(equation: JaxprEqn) -> bool:
    if equation.primitive is not slice_p or isinstance(equation.invars[0], Constant):
        return False
    params, shape = equation.params, aval_of(equation.invars[0]).shape
    whole = all(begin == 0 for begin in params["start_indices"][1:]) and params["limit_indices"][1:] == shape[1:]
    return bool(shape) and whole and not any(step != 1 for step in params["strides"] or ())


def _operand(equation: JaxprEqn) -> Var:
    (operand,) = variables(equation.invars)
    return operand


def _rows_of(equations: Sequence[JaxprEqn], leaf: Var, outputs: Sequence[Any]) -> Rows | None:
    """Returns which rows of a leaf are read, if nothing else of it is and there are others."""
    readers = [one for one in equations if leaf in variables(one.invars)]
    if leaf in variables(outputs) or not readers or not all(_takes_rows(one) for one in readers):
        return None
    begin = min(one.params["start_indices"][0] for one in readers)
    end = max(one.params["limit_indices"][0] for one in readers)
    return None if (begin, end) == (0, aval_of(leaf).shape[0]) else (begin, end)


def _taken(
    equations: Sequence[JaxprEqn], leaf: Var, rows: Rows, outputs: Sequence[Any]
) -> tuple[Var, list[JaxprEqn], list[Any]]:
    """Returns a variable of the rows of a leaf, and the equations and outputs that read that."""
    aval = aval_of(leaf)
    own = Var(ShapedArray((rows[1] - rows[0], *aval.shape[1:]), aval.dtype, aval.weak_type))
    same = dict[Var, Var]()
    found: list[JaxprEqn] = []
    for one in equations:
        if leaf not in variables(one.invars):
            found.append(one.replace(invars=[_named(same, atom) for atom in one.invars]))
            continue
        begin, end = (one.params[name][0] - rows[0] for name in ("start_indices", "limit_indices"))
        if (begin, end) == (0, rows[1] - rows[0]):
            same[one.outvars[0]] = own
            continue
        starts, limits = (begin, *one.params["start_indices"][1:]), (end, *one.params["limit_indices"][1:])
        found.append(one.replace(invars=[own], params={**one.params, "start_indices": starts, "limit_indices": limits}))
    return own, found, [_named(same, atom) for atom in outputs]


def _named(names: dict[Var, Var], atom: Any) -> Any:
    return atom if isinstance(atom, Constant) else names.get(atom, atom)
