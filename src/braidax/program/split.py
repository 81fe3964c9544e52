"""Splitting a traced training step in two: what the gradients need, and the rest."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var, jaxpr_as_fun
from jax.extend.core import Literal as Constant
from jax.extend.core.primitives import jit_p

from braidax.errors import ArgumentError

from .bodies import Path
from .cutting.part import closed_part, needed, variables
from .marks import is_marked
from .rewrite import Replacement, evaluate
from .trace import Program, trace


class Origin(NamedTuple):
    """Where an output of the whole program comes from: the index of an input, or of an output of one of its parts."""

    part: Literal["input", "gradients", "apply"]
    at: int


@dataclass(frozen=True)
class Part:
    """A piece of a program: called with flat arrays it gives a list of flat arrays, `num_outputs` of them."""

    closed: ClosedJaxpr

    @property
    def num_outputs(self) -> int:
        """The number of arrays that a call gives."""
        return len(self.closed.jaxpr.outvars)

    def __call__(self, *leaves: Any) -> list[Any]:
        """Computes the piece, on arrays or tracers."""
        return jaxpr_as_fun(self.closed)(*leaves)


@dataclass(frozen=True)
class Split:
    """A program in two parts.

    `gradients` takes the program's inputs `gradient_inputs`; `apply` takes `apply_inputs`, then the outputs
    `carried` of `gradients`. `outputs` says for each output of the program where it comes from.
    """

    gradients: Part
    apply: Part
    gradient_inputs: tuple[int, ...]
    apply_inputs: tuple[int, ...]
    carried: tuple[int, ...]
    outputs: tuple[Origin, ...]


def split_at_marks(program: Program) -> Split:
    """Cuts a program at the values that `value_and_grad` has marked.

    The first part computes the marked values and everything that they depend on; the second takes them as inputs and
    computes the rest. Cheap values that both need (a random key, a counter) are computed by both; effects stay single.

    **Arguments:** `program`: traced, with at least one mark, possibly within `jax.jit`.

    **Returns:** the `Split`. **Raises:** `ArgumentError` when nothing is marked.
    """
    closed = _opened(program)
    jaxpr, consts = closed.jaxpr, list(closed.consts)
    marked = [equation for equation in jaxpr.eqns if is_marked(equation)]
    if not marked:
        raise ArgumentError(
            "the decorated train_step takes no gradient that can be seen: take it with bx.value_and_grad (arguments "
            "and results of jax.value_and_grad), or call jax.value_and_grad, nnx.value_and_grad or "
            "eqx.filter_value_and_grad inside of the step, not before it; by jax.jacrev, jax.jacfwd and jax.linearize "
            "none is seen, by jax.vjp that of a scalar"
        )
    first = needed(jaxpr.eqns, variables(v for equation in marked for v in equation.outvars), set())
    cuts = [equation for equation in first if is_marked(equation) or equation.effects]
    cut_values = variables(v for equation in cuts for v in equation.outvars)
    inputs = {variable: index for index, variable in enumerate(jaxpr.invars)}
    outputs = variables(jaxpr.outvars) - cut_values - inputs.keys()
    done = {id(equation) for equation in cuts}
    rest = [equation for equation in jaxpr.eqns if id(equation) not in done]
    # An effect that no gradient needs belongs to the second part, with all that it reads.
    lone = [equation for equation in rest if equation.effects]
    wanted = outputs | variables(v for equation in lone for v in equation.invars)
    second = needed(rest, wanted, cut_values, always={id(equation) for equation in lone})

    read = variables(v for equation in second for v in equation.invars)
    leaving = [v for equation in cuts for v in equation.outvars if v in read or v in variables(jaxpr.outvars)]
    carried = tuple(index for index, variable in enumerate(leaving) if variable in read)
    first_inputs = _reads(first, inputs)
    second_inputs = _reads(second, inputs)
    produced = {variable: index for index, variable in enumerate(leaving)}
    origins: list[Origin] = []
    finals: list[Any] = []
    for variable in jaxpr.outvars:
        if not isinstance(variable, Constant) and variable in inputs:
            origins.append(Origin("input", inputs[variable]))
        elif not isinstance(variable, Constant) and variable in produced:
            origins.append(Origin("gradients", produced[variable]))
        else:
            origins.append(Origin("apply", len(finals)))
            finals.append(variable)
    gradients = Part(closed_part(jaxpr, consts, [jaxpr.invars[i] for i in first_inputs], leaving, first))
    arguments = [jaxpr.invars[i] for i in second_inputs] + [leaving[i] for i in carried]
    apply = Part(closed_part(jaxpr, consts, arguments, finals, second))
    return Split(gradients, apply, first_inputs, second_inputs, carried, tuple(origins))


def parted(closed: ClosedJaxpr, num_first: int) -> tuple[ClosedJaxpr, ClosedJaxpr]:
    """Cuts a jaxpr behind what its first outputs need.

    **Returns:** a jaxpr of the same inputs that gives these outputs, and then what is carried on; and one of the inputs
    and of what is carried that gives the other outputs.
    """
    jaxpr, consts = closed.jaxpr, list(closed.consts)
    first, others = jaxpr.outvars[:num_first], jaxpr.outvars[num_first:]
    before = needed(jaxpr.eqns, variables(first), set())
    done = {id(equation) for equation in before}
    known = variables(v for equation in before for v in equation.outvars)
    behind = [equation for equation in jaxpr.eqns if id(equation) not in done]
    read = variables(v for equation in behind for v in equation.invars) | variables(others)
    carried = [v for equation in before for v in equation.outvars if v in read & known]
    return (
        closed_part(jaxpr, consts, list(jaxpr.invars), [*first, *carried], before),
        closed_part(jaxpr, consts, [*jaxpr.invars, *carried], list(others), behind),
    )


def _reads(equations: Iterable[JaxprEqn], inputs: dict[Var, int]) -> tuple[int, ...]:
    return tuple(sorted({inputs[v] for e in equations for v in variables(e.invars) if v in inputs}))


def _opened(program: Program) -> ClosedJaxpr:
    """Opens, at any depth, the jitted functions that hold a mark, so that the marks stand at the top."""

    def rules_of(closed: ClosedJaxpr) -> dict[Path, Replacement]:
        calls = [at for at, one in enumerate(closed.jaxpr.eqns) if one.primitive is jit_p and is_marked(one)]
        return {(at,): lambda equation, inputs: run(equation.params["jaxpr"], inputs) for at in calls}

    def run(closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
        return evaluate(closed, rules_of(closed), args)[0]

    if not rules_of(program.closed):
        return program.closed
    return trace(lambda *args: run(program.closed, args), *jax.tree.leaves(program.in_specs)).closed
