"""A traced program as values made of values, calls opened."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from braidax.program.bodies import CALLS, aval_of


@dataclass(frozen=True, eq=False)
class Value:
    """A value of a program.

    **Fields:** `number`: higher than those of its operands. `shape`, `dtype`. `equation`: that makes it of `operands`,
    as its output of the number `output`; None of inputs and constants. `at`: of an input, which one it is. `constant`.
    """

    number: int
    shape: tuple[int, ...]
    dtype: Any
    equation: JaxprEqn | None = None
    operands: "tuple[Value, ...]" = ()
    output: int = 0
    at: int = -1
    constant: Any = None

    @property
    def name(self) -> str:
        """Of the primitive that makes it, or ""."""
        return "" if self.equation is None else self.equation.primitive.name


def outputs_of(closed: ClosedJaxpr) -> list[Value]:
    """Returns the outputs of a program."""
    values = _Values()
    inputs = [values.new(variable, at=at) for at, variable in enumerate(closed.jaxpr.invars)]
    return values.walk(closed.jaxpr, closed.consts, inputs)


class _Values:
    """Makes values, and counts them."""

    def __init__(self) -> None:
        self._count = 0

    def new(self, atom: Any, **fields: Any) -> Value:
        self._count += 1
        aval = aval_of(atom)
        return Value(self._count, tuple(aval.shape), aval.dtype, **fields)

    def walk(self, jaxpr: Jaxpr, consts: Sequence[Any], inputs: Sequence[Value]) -> list[Value]:
        known: dict[Any, Value] = dict(zip(jaxpr.invars, inputs, strict=True))
        known |= {one: self.new(one, constant=value) for one, value in zip(jaxpr.constvars, consts, strict=True)}

        def read(atom: Any) -> Value:
            return self.new(atom, constant=atom.val) if isinstance(atom, Literal) else known[atom]

        for equation in jaxpr.eqns:
            operands, name = tuple(read(atom) for atom in equation.invars), equation.primitive.name
            if name in CALLS and CALLS[name] in equation.params:
                body: Any = equation.params[CALLS[name]]
                found = self.walk(getattr(body, "jaxpr", body), getattr(body, "consts", ()), operands)
            else:
                found = [
                    self.new(one, equation=equation, operands=operands, output=at)
                    for at, one in enumerate(equation.outvars)
                ]
            known.update(zip(equation.outvars, found, strict=True))
        return [read(atom) for atom in jaxpr.outvars]
