"""Units: several equations of a program become one, a jitted call with a name, so that one rule can replace them."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from jax.extend.core.primitives import jit_p
from jax.extend.source_info_util import user_context

from braidax.errors import ArgumentError

from .bodies import Path, aval_of, bodies, equation_at, equations_of, with_body, with_equation
from .lines import line_of
from .trace import Program


@dataclass(frozen=True)
class Unit:
    """Equations that become one.

    **Fields:** `name`: of the call. `body_path`: the path of the jaxpr that they stand in, () for the whole program.
    `equations`: their indices in it.
    """

    name: str
    body_path: Path
    equations: tuple[int, ...]


def outline(program: Program, units: Sequence[Unit]) -> Program:
    """Returns a program of the same values in which the equations of each unit are one call of a jitted function.

    **Arguments:** `units`: each is convex: nothing that is made of its results, outside of it, goes into it again. No
    equation is in two, but a unit may stand in the body of an equation of another.

    **Raises:** `ArgumentError` for a unit that is not convex, has the name of another call, or holds equations that
    are not there, are in two units, or use references.
    """
    jaxpr = program.closed.jaxpr
    _check(jaxpr, units)
    for path in sorted({unit.body_path for unit in units}, key=len, reverse=True):  # outer paths stay what they are
        body = before = _body_at(jaxpr, path)
        for unit in units:
            if unit.body_path == path:
                body = _outlined(body, unit.name, [before.eqns[at] for at in sorted(unit.equations)])
        if path:
            body = with_equation(jaxpr, path[:-1], with_body(equation_at(jaxpr, path[:-1]), path[-1], body))
        jaxpr = body
    return Program(ClosedJaxpr(jaxpr, program.closed.consts), program.in_specs, program.out_specs)


def unit_path(program: Program, name: str) -> Path:
    """Returns where the call of a unit stands. **Raises:** `ArgumentError` when the program has none of that name."""
    found = [path for path, one in equations_of(program.closed.jaxpr) if _name_of(one) == name]
    if len(found) != 1:
        raise ArgumentError(f"name is {name!r}, of which the program has {len(found)} calls: take that of one unit")
    return found[0]


def _outlined(jaxpr: Jaxpr, name: str, members: Sequence[JaxprEqn]) -> Jaxpr:
    """The jaxpr with one call in place of some equations; what is made of its results comes behind it."""
    own = {id(one) for one in members}
    members = [one for one in jaxpr.eqns if id(one) in own]  # another unit may have moved some behind others
    last = max(at for at, one in enumerate(jaxpr.eqns) if id(one) in own)
    made, behind = set[Hashable](), dict[Hashable, JaxprEqn]()
    before: list[JaxprEqn] = []
    after: list[JaxprEqn] = []
    for one in jaxpr.eqns[: last + 1]:
        reads, makes = _touched(one, one.invars), _touched(one, one.outvars)
        if id(one) in own:
            if between := [behind[value] for value in reads & behind.keys()]:
                raise ArgumentError(
                    f"units holds {name!r}, which is not convex: {_told(one)} reads what {_told(between[0])} makes of "
                    f"its results: take that in, or leave out what reads it"
                )
            made |= makes
        elif reads & (made | behind.keys()):
            after.append(one)
            behind |= dict.fromkeys(makes, one)
        else:
            before.append(one)
    after += jaxpr.eqns[last + 1 :]
    wanted = _variables([*jaxpr.outvars, *(atom for one in after for atom in one.invars)])
    inputs = [value for value in _variables(atom for one in members for atom in one.invars) if value not in made]
    outputs = [value for one in members for value in one.outvars if value in wanted]
    effects = frozenset(effect for one in members for effect in one.effects)
    unknown = jaxpr.debug_info.with_unknown_names()
    inner = Jaxpr([], inputs, outputs, list(members), effects, unknown)
    return jaxpr.replace(eqns=[*before, _call(name, inner, members[0]), *after])


def _call(name: str, jaxpr: Jaxpr, first: JaxprEqn) -> JaxprEqn:
    def call(*args: Any) -> list[Any]:
        return jaxpr_as_fun(ClosedJaxpr(jaxpr, []))(*args)

    call.__name__ = call.__qualname__ = name
    avals = [aval_of(value) for value in jaxpr.invars]
    specs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type) for aval in avals]
    with user_context(first.source_info.traceback), first.ctx.manager:
        (equation,) = jax.make_jaxpr(jax.jit(call))(*specs).jaxpr.eqns
    return equation.replace(invars=list(jaxpr.invars), outvars=list(jaxpr.outvars))


def _touched(equation: JaxprEqn, atoms: Iterable[Any]) -> set[Hashable]:
    """What an equation reads or makes. Effects count as made one of the other, so that they stay in order."""
    return {*_variables(atoms), *(["effect"] if equation.effects else [])}


def _variables(atoms: Iterable[Any]) -> dict[Var, None]:
    return {atom: None for atom in atoms if not isinstance(atom, Literal)}


def _check(jaxpr: Jaxpr, units: Sequence[Unit]) -> None:
    names = [*(_name_of(one) for _, one in equations_of(jaxpr)), *(unit.name for unit in units)]
    places = [(unit.body_path, at) for unit in units for at in unit.equations]
    for unit in units:
        if names.count(unit.name) > 1:
            raise ArgumentError(f"units holds {unit.name!r}, the name of another call: give each unit one of its own")
        found = _body_at(jaxpr, unit.body_path).eqns
        if not unit.equations or not {*unit.equations} <= {*range(len(found))}:
            raise ArgumentError(
                f"units holds {unit.name!r} with the equations {list(unit.equations)}, expected at least one, of the "
                f"{len(found)} at {unit.body_path}"
            )
        for at in unit.equations:
            one = found[at]
            if places.count((unit.body_path, at)) > 1:
                raise ArgumentError(f"units holds {unit.name!r} with {_told(one)} twice: each equation is in one unit")
            if not all(isinstance(aval_of(atom), ShapedArray) for atom in (*one.invars, *one.outvars)):
                raise ArgumentError(f"units holds {unit.name!r} with {_told(one)}, a use of a reference: leave it out")


def _body_at(jaxpr: Jaxpr, path: Path) -> Jaxpr:
    for at, which in zip(path[::2], (*path[1::2], -1), strict=False):
        inner = bodies(jaxpr.eqns[at]) if 0 <= at < len(jaxpr.eqns) else ()
        if not 0 <= which < len(inner):
            raise ArgumentError(f"units has the body_path {path}, where no jaxpr is that can be rebuilt")
        jaxpr = inner[which].jaxpr
    return jaxpr


def _name_of(call: JaxprEqn) -> str | None:
    return call.params["name"] if call.primitive is jit_p else None


def _told(equation: JaxprEqn) -> str:
    return f"{equation.primitive.name} at {line_of(equation.source_info)}"
