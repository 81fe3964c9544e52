"""Equations that hold jaxprs: which may be entered, and how their operands arrive inside."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.extend.core.primitives import closed_call_p, cond_p, conv_general_dilated_p, jit_p, remat_p, scan_p, while_p

Equation = JaxprEqn
"""One operation of a traced program."""

Path = tuple[int, ...]
"""Where an equation stands: its index in the jaxpr; or the index of the equation that holds it, which of that one's
bodies it is in, and so on inwards. Jaxprs are shared between calls, so that only a path names one equation."""


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
    if read is None or not all(isinstance(atom.aval, ShapedArray) for atom in equation.invars):
        return ()
    return read(equation.params, range(len(equation.invars)))


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


def grouped_convolutions(jaxpr: Jaxpr, here: Path = ()) -> list[Path]:
    """Returns the paths of all convolutions by groups of channels. **Arguments:** `here`: the path of the jaxpr."""
    found: list[Path] = []
    for index, equation in enumerate(jaxpr.eqns):
        if equation.primitive is conv_general_dilated_p and equation.params["feature_group_count"] > 1:
            found.append((*here, index))
        for which, body in enumerate(bodies(equation)):
            found += grouped_convolutions(body.jaxpr, (*here, index, which))
    return found


def _read_closed(closed: ClosedJaxpr, operands: Sequence[int], length: int | None = 1) -> Body:
    return Body(closed.jaxpr, tuple(closed.consts), tuple(operands), length)


def _read_while(params: dict[str, Any], operands: Sequence[int]) -> tuple[Body, ...]:
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    return (
        _read_closed(params["cond_jaxpr"], [*operands[:first], *operands[second:]], None),
        _read_closed(params["body_jaxpr"], operands[first:], None),
    )


_READERS: dict[Any, Any] = {
    jit_p: lambda params, operands: (_read_closed(params["jaxpr"], operands),),
    closed_call_p: lambda params, operands: (_read_closed(params["call_jaxpr"], operands),),
    remat_p: lambda params, operands: (Body(params["jaxpr"], (), tuple(operands)),),
    scan_p: lambda params, operands: (_read_closed(params["jaxpr"], operands, params["length"]),),
    while_p: _read_while,
    cond_p: lambda params, operands: tuple(_read_closed(branch, operands[1:]) for branch in params["branches"]),
}
