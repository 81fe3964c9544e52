"""The operands and results of a loop, and loops made of some of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jax.core import ShapedArray
from jax.extend.core import Jaxpr, JaxprEqn, Var

from braidax.program.bodies import aval_of
from braidax.program.cutting.part import closed_part


class Operand(NamedTuple):
    """An operand of a loop: `outer`, which arrives as `inner`; `result`: of a carry, what it is in the next step."""

    outer: Any
    inner: Var
    result: Any = None


@dataclass(frozen=True)
class LoopParts:
    """What a scan takes: the same in all steps, from step to step, and one slice a step."""

    equation: JaxprEqn
    consts: tuple[Operand, ...]
    carries: tuple[Operand, ...]
    slices: tuple[Operand, ...]

    @classmethod
    def of(cls, equation: JaxprEqn) -> "LoopParts":
        """Returns those of a scan."""
        body, num_consts = equation.params["jaxpr"].jaxpr, equation.params["num_consts"]
        end = num_consts + equation.params["num_carry"]
        pairs = [Operand(outer, inner) for outer, inner in zip(equation.invars, body.invars, strict=True)]
        carries = [
            one._replace(result=result) for one, result in zip(pairs[num_consts:end], body.outvars, strict=False)
        ]
        return cls(equation, tuple(pairs[:num_consts]), tuple(carries), tuple(pairs[end:]))

    @property
    def operands(self) -> tuple[tuple[Operand, ...], ...]:
        """All three."""
        return self.consts, self.carries, self.slices

    @property
    def body(self) -> Jaxpr:
        """What is computed in a step."""
        return self.equation.params["jaxpr"].jaxpr

    @property
    def length(self) -> int:
        """How many steps there are."""
        return self.equation.params["length"]


def stacked(one: Var, length: int) -> Var:
    """Returns a variable for the values of all steps."""
    aval = aval_of(one)
    return Var(ShapedArray((length, *aval.shape), aval.dtype, aval.weak_type))


def with_parts(
    parts: LoopParts,
    operands: Sequence[Sequence[Operand]],
    stacks: Sequence[tuple[Var, Any]],
    equations: Sequence[JaxprEqn],
) -> JaxprEqn:
    """Returns a loop of as many steps that computes some of it.

    **Arguments:** `operands`: that it takes, as `LoopParts.operands`. `stacks`: its results besides carries, with what
    they are in a step. `equations`: of its body.
    """
    consts, carries, slices = operands
    every = [*consts, *carries, *slices]
    results = {one.inner: result for one, result in zip(parts.carries, parts.equation.outvars, strict=False)}
    outputs = [*(one.result for one in carries), *(inner for _, inner in stacks)]
    closed = parts.equation.params["jaxpr"]
    body = closed_part(closed.jaxpr, closed.consts, [one.inner for one in every], outputs, equations)
    changed = {"jaxpr": body, "num_consts": len(consts), "num_carry": len(carries)}
    return parts.equation.replace(
        invars=[one.outer for one in every],
        outvars=[*(results[one.inner] for one in carries), *(outer for outer, _ in stacks)],
        params={**parts.equation.params, **changed},
    )
