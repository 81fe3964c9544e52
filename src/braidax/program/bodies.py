"""Equations that hold jaxprs: which may be entered, and how their operands arrive inside."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxprs_in_params
from jax.extend.core.primitives import closed_call_p, cond_p, conv_general_dilated_p, jit_p, remat_p, scan_p, while_p

Equation = JaxprEqn
"""One operation of a traced program."""

Path = tuple[int, ...]
"""Where an equation stands: its index in the jaxpr; or the index of the equation that holds it, which of that one's
bodies it is in, and so on inwards. Jaxprs are shared between calls, so that only a path names one equation."""

CALLS: dict[str, str] = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}
"""Primitives that call a jaxpr, by name, and the parameter that holds it."""


@dataclass(frozen=True)
class Body:
    """One jaxpr that an equation holds: operand `operands[i]` of the equation arrives as its input `i`.

    `length` is the number of times that it runs: 1, that of the scan, or None when nothing says it (while).
    """

    jaxpr: Jaxpr
    consts: tuple[Any, ...]
    operands: tuple[int, ...]
    length: int | None = 1


def bodies(equation: JaxprEqn) -> tuple[Body, ...]:
    """Lists the jaxprs within an equation that analyses look into and rewriting can rebuild.

    **Arguments:** `equation`: of any primitive.

    **Returns:** one `Body` for jit, closed_call, remat and scan; condition and body of a while; the branches of a cond;
    nothing for any other, and nothing when an operand is no plain array (a reference).
    """
    read = _READERS.get(equation.primitive)
    if read is None or has_references(equation):
        return ()
    return read(equation.params, range(len(equation.invars)))


def has_references(equation: JaxprEqn) -> bool:
    """Whether an equation takes something that is no plain array: a reference, which it may change."""
    return not all(isinstance(atom.aval, ShapedArray) for atom in equation.invars)


def aval_of(atom: Any) -> Any:
    """Returns the shape and dtype of a variable or a literal, as JAX keeps them."""
    return atom.aval


def bind(equation: JaxprEqn, inputs: Sequence[Any]) -> list[Any]:
    """Computes an equation on other inputs, arrays or tracers. **Returns:** its results."""
    outputs = equation.primitive.bind(*inputs, **equation.primitive.get_bind_params(equation.params))
    return list(outputs) if equation.primitive.multiple_results else [outputs]


def equation_at(jaxpr: Jaxpr, path: Path) -> JaxprEqn:
    """Returns the equation that stands at a path."""
    equation = jaxpr.eqns[path[0]]
    return equation if len(path) == 1 else equation_at(bodies(equation)[path[1]].jaxpr, path[2:])


def with_equation(jaxpr: Jaxpr, path: Path, equation: JaxprEqn) -> Jaxpr:
    """Returns the jaxpr with another equation, of the same operands and results, at a path."""
    at, *inner = path
    if inner:
        body = with_equation(bodies(jaxpr.eqns[at])[inner[0]].jaxpr, tuple(inner[1:]), equation)
        equation = with_body(jaxpr.eqns[at], inner[0], body)
    return jaxpr.replace(eqns=[*jaxpr.eqns[:at], equation, *jaxpr.eqns[at + 1 :]])


def with_body(equation: JaxprEqn, which: int, jaxpr: Jaxpr) -> JaxprEqn:
    """Returns the equation with another jaxpr, of the same inputs and outputs, as one of its `bodies`."""
    params = dict(equation.params)
    if equation.primitive is cond_p:
        branches = list(params["branches"])
        branches[which] = ClosedJaxpr(jaxpr, branches[which].consts)
        return equation.replace(params=params | {"branches": tuple(branches)})
    name = _NAMES[equation.primitive][which]
    held = jaxpr if equation.primitive is remat_p else ClosedJaxpr(jaxpr, params[name].consts)
    return equation.replace(params=params | {name: held})


def equations_of(jaxpr: Jaxpr, here: Path = ()) -> list[tuple[Path, JaxprEqn]]:
    """Lists every equation of a jaxpr and of all that `bodies` opens, with its path; what holds others comes first."""
    found: list[tuple[Path, JaxprEqn]] = []
    for index, equation in enumerate(jaxpr.eqns):
        found.append(((*here, index), equation))
        for which, body in enumerate(bodies(equation)):
            found += equations_of(body.jaxpr, (*here, index, which))
    return found


def every_equation(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Yields the equations of a jaxpr and of all jaxprs in it, also of those that nothing may be changed in."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from every_equation(inner)


def grouped_convolutions(jaxpr: Jaxpr) -> list[Path]:
    """Returns the paths of all convolutions by groups of channels."""
    return [
        path
        for path, equation in equations_of(jaxpr)
        if equation.primitive is conv_general_dilated_p and equation.params["feature_group_count"] > 1
    ]


def _read_closed(closed: ClosedJaxpr, operands: Sequence[int], length: int | None = 1) -> Body:
    return Body(closed.jaxpr, tuple(closed.consts), tuple(operands), length)


def _read_while(params: dict[str, Any], operands: Sequence[int]) -> tuple[Body, ...]:
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    return (
        _read_closed(params["cond_jaxpr"], [*operands[:first], *operands[second:]], None),
        _read_closed(params["body_jaxpr"], operands[first:], None),
    )


_NAMES: dict[Any, tuple[str, ...]] = {
    jit_p: ("jaxpr",),
    closed_call_p: ("call_jaxpr",),
    remat_p: ("jaxpr",),
    scan_p: ("jaxpr",),
    while_p: ("cond_jaxpr", "body_jaxpr"),
}
_READERS: dict[Any, Any] = {
    jit_p: lambda params, operands: (_read_closed(params["jaxpr"], operands),),
    closed_call_p: lambda params, operands: (_read_closed(params["call_jaxpr"], operands),),
    remat_p: lambda params, operands: (Body(params["jaxpr"], (), tuple(operands)),),
    scan_p: lambda params, operands: (_read_closed(params["jaxpr"], operands, params["length"]),),
    while_p: _read_while,
    cond_p: lambda params, operands: tuple(_read_closed(branch, operands[1:]) for branch in params["branches"]),
}
