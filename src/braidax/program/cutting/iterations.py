"""Loops in pieces: a scan becomes several, one behind the other."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jax.extend.core import Literal as Constant
from jax.extend.core.primitives import scan_p
from jax.extend.source_info_util import user_context

from braidax.errors import ArgumentError
from braidax.program.bodies import Path, aval_of, bodies, equation_at, with_body, with_equation
from braidax.program.trace import Program

from .part import spec_of_aval

Origin = tuple[int, int]
"""Where an equation comes from: the index of one of the uncut jaxpr, and the first iteration that it runs of a loop."""


def split_scan(program: Program, path: Path, lengths: Sequence[int]) -> Program:
    """Returns a program of the same values in which a scan is several, which run its iterations one after the other.

    Each takes its own slices of what the scan goes over, and what they stack is joined behind the last. A remat in the
    body stays in each.

    **Arguments:** `path`: of the scan. `lengths`: how many iterations each runs, the first of the scan first.

    **Raises:** `ArgumentError` when there is no scan, or the lengths do not add up to its own.
    """
    jaxpr = program.closed.jaxpr
    body = jaxpr if len(path) == 1 else _body_at(jaxpr, path[:-1])
    equation = body.eqns[path[-1]] if 0 <= path[-1] < len(body.eqns) else None
    if equation is None or equation.primitive is not scan_p:
        found = "nothing" if equation is None else equation.primitive.name
        raise ArgumentError(f"path={path} is where {found} stands, expected a scan")
    if not lengths or min(lengths) < 1 or sum(lengths) != equation.params["length"]:
        raise ArgumentError(
            f"lengths={[*lengths]}: expected numbers of 1 or more that add up to {equation.params['length']}, the "
            f"iterations of the scan at {path}"
        )
    body, _ = with_scans_split(body, {path[-1]: lengths})
    if len(path) > 1:
        outer = path[:-2]
        body = with_equation(jaxpr, outer, with_body(equation_at(jaxpr, outer), path[-2], body))
    return Program(ClosedJaxpr(body, program.closed.consts), program.in_specs, program.out_specs)


def with_scans_split(jaxpr: Jaxpr, lengths: Mapping[int, Sequence[int]]) -> tuple[Jaxpr, list[Origin]]:
    """Returns a jaxpr with scans in pieces, and where each of its equations comes from.

    **Arguments:** `lengths`: by the index of the scan.
    """
    equations: list[JaxprEqn] = []
    origins: list[Origin] = []
    for at, equation in enumerate(jaxpr.eqns):
        if len(lengths.get(at, ())) < 2:
            equations.append(equation)
            origins.append((at, 0))
            continue
        pieces, starts = _pieces(equation, lengths[at])
        equations += pieces
        origins += [(at, start) for start in starts]
    return jaxpr.replace(eqns=equations), origins


def _body_at(jaxpr: Jaxpr, path: Path) -> Jaxpr:
    return bodies(equation_at(jaxpr, path[:-1]))[path[-1]].jaxpr


def _pieces(equation: JaxprEqn, lengths: Sequence[int]) -> tuple[list[JaxprEqn], list[int]]:
    """Returns the equations that stand in place of a scan, and which iteration is the first that each runs."""
    specs = [spec_of_aval(aval_of(atom)) for atom in equation.invars]
    with user_context(equation.source_info.traceback, name_stack=equation.source_info.name_stack), equation.ctx.manager:
        closed = jax.make_jaxpr(lambda *inputs: _run(equation, lengths, inputs))(*specs)
    inner, names = closed.jaxpr, dict[Var, Any]()
    assert not closed.consts, "all that a scan reads are its operands"
    names.update(zip(inner.invars, equation.invars, strict=True))
    made = {variable for one in inner.eqns for variable in one.outvars}
    outputs = dict(zip(inner.outvars, equation.outvars, strict=True))
    assert len(outputs) == len(inner.outvars), "no two results are one"
    assert made >= outputs.keys(), "each result is of an equation of its own"
    names.update(outputs)
    starts: list[int] = []
    begin, remaining = 0, list(lengths)
    for one in inner.eqns:
        starts.append(begin)
        if one.primitive is scan_p:
            begin += remaining.pop(0)
    equations = [
        one.replace(
            invars=[atom if isinstance(atom, Constant) else names.get(atom, atom) for atom in one.invars],
            outvars=[names.get(atom, atom) for atom in one.outvars],
        )
        for one in inner.eqns
    ]
    return equations, starts


def _run(equation: JaxprEqn, lengths: Sequence[int], inputs: Sequence[Any]) -> list[Any]:
    params = equation.params
    num_consts, num_carry, whole = params["num_consts"], params["num_carry"], params["length"]
    consts, carry = inputs[:num_consts], inputs[num_consts : num_consts + num_carry]
    slices, stacks, begin = inputs[num_consts + num_carry :], list[Sequence[Any]](), 0
    for length in lengths:
        start = whole - begin - length if params["reverse"] else begin
        rows = [jax.lax.slice_in_dim(one, start, start + length) for one in slices]
        piece = {**params, "length": length, "unroll": min(params["unroll"], length)}
        results = scan_p.bind(*consts, *carry, *rows, **piece)
        carry, begin = results[:num_carry], begin + length
        stacks.append(results[num_carry:])
    ordered = reversed(stacks) if params["reverse"] else stacks
    return [*carry, *(jnp.concatenate(pieces) for pieces in zip(*ordered, strict=True))]
