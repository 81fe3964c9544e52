"""Splitting a traced training step in two: what the gradients need, and the rest."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var, jaxpr_as_fun
from jax.extend.core import Literal as Constant
from jax.extend.core.primitives import jit_p

from braidax.errors import ArgumentError

from .bodies import Path
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
    first = _needed(jaxpr.eqns, _variables(v for equation in marked for v in equation.outvars), set())
    cuts = [equation for equation in first if is_marked(equation) or equation.effects]
    cut_values = _variables(v for equation in cuts for v in equation.outvars)
    inputs = {variable: index for index, variable in enumerate(jaxpr.invars)}
    outputs = _variables(jaxpr.outvars) - cut_values - inputs.keys()
    done = {id(equation) for equation in cuts}
    rest = [equation for equation in jaxpr.eqns if id(equation) not in done]
    # An effect that no gradient needs belongs to the second part, with all that it reads.
    lone = [equation for equation in rest if equation.effects]
    wanted = outputs | _variables(v for equation in lone for v in equation.invars)
    second = _needed(rest, wanted, cut_values, always={id(equation) for equation in lone})

    read = _variables(v for equation in second for v in equation.invars)
    leaving = [v for equation in cuts for v in equation.outvars if v in read or v in _variables(jaxpr.outvars)]
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
    gradients = _part(jaxpr, consts, [jaxpr.invars[i] for i in first_inputs], leaving, first)
    arguments = [jaxpr.invars[i] for i in second_inputs] + [leaving[i] for i in carried]
    apply = _part(jaxpr, consts, arguments, finals, second)
    return Split(gradients, apply, first_inputs, second_inputs, carried, tuple(origins))


def parted(closed: ClosedJaxpr, num_first: int) -> tuple[ClosedJaxpr, ClosedJaxpr]:
    """Cuts a jaxpr behind what its first outputs need.

    **Returns:** a jaxpr of the same inputs that gives these outputs, and then what is carried on; and one of the inputs
    and of what is carried that gives the other outputs.
    """
    jaxpr, consts = closed.jaxpr, list(closed.consts)
    first, others = jaxpr.outvars[:num_first], jaxpr.outvars[num_first:]
    before = _needed(jaxpr.eqns, _variables(first), set())
    done = {id(equation) for equation in before}
    known = _variables(v for equation in before for v in equation.outvars)
    behind = [equation for equation in jaxpr.eqns if id(equation) not in done]
    read = _variables(v for equation in behind for v in equation.invars) | _variables(others)
    carried = [v for equation in before for v in equation.outvars if v in read & known]
    return (
        _part(jaxpr, consts, list(jaxpr.invars), [*first, *carried], before).closed,
        _part(jaxpr, consts, [*jaxpr.invars, *carried], list(others), behind).closed,
    )


def _needed(
    equations: Sequence[JaxprEqn], wanted: set[Var], given: set[Var], always: frozenset[int] | set[int] = frozenset()
) -> list[JaxprEqn]:
    """The equations, in order, that compute the wanted values when some are given."""
    alive = wanted - given
    kept: list[JaxprEqn] = []
    for equation in reversed(equations):
        if id(equation) in always or any(v in alive for v in equation.outvars):
            kept.append(equation)
            alive |= _variables(equation.invars) - given
    return kept[::-1]


def _reads(equations: Iterable[JaxprEqn], inputs: dict[Var, int]) -> tuple[int, ...]:
    return tuple(sorted({inputs[v] for e in equations for v in _variables(e.invars) if v in inputs}))


def _variables(atoms: Iterable[Any]) -> set[Var]:
    return {atom for atom in atoms if not isinstance(atom, Constant)}


def _part(jaxpr: Jaxpr, consts: list[Any], invars: list[Var], outvars: list[Any], eqns: list[JaxprEqn]) -> Part:
    read = _variables(v for e in eqns for v in e.invars) | _variables(outvars)
    held = [(v, value) for v, value in zip(jaxpr.constvars, consts, strict=True) if v in read]
    effects = {effect for equation in eqns for effect in equation.effects}
    part = jaxpr.replace(
        constvars=[v for v, _ in held], invars=invars, outvars=outvars, eqns=eqns, effects=frozenset(effects),
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )  # fmt: skip
    return Part(ClosedJaxpr(part, [value for _, value in held]))


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
