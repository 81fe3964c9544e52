"""Reading before subtracting: what is read of `a - b`, `b` being the same all along, is what is read of `a`, less `b`.

The label's entry of a log-softmax is then that of the logits less their normalizer: nothing needs all entries of it.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var, primitives

from braidax.program.bodies import Path, aval_of, bind, bodies, equation_at, equations_of
from braidax.program.prune import prune
from braidax.program.rewrite import evaluate
from braidax.program.trace import Program, trace


def with_reads_first(program: Program) -> Program:
    """Returns a program of the same values whose reads along a dim come before what is the same along it is subtracted.

    **Arguments:** `program`: without jitted calls.
    """
    jaxpr = program.closed.jaxpr
    found: dict[Path, list[Path]] = {}
    for path, equation in equations_of(jaxpr):
        if (dim := _read_dim(equation)) is not None:
            body = jaxpr if len(path) == 1 else _body(jaxpr, path)
            if subtractions := _subtractions(body, equation.invars[0], dim):
                found[path] = [(*path[:-1], at) for at in subtractions]
    if not found:
        return program
    operands: dict[Path, tuple[Any, Any]] = {}

    def subtract(path: Path, equation: JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
        operands[path] = inputs[0], inputs[1]
        return bind(equation, inputs)

    def read(subtractions: Sequence[Path], equation: JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
        (result,) = bind(equation, [operands[subtractions[-1]][0], inputs[1]])
        for path in reversed(subtractions):
            result = result - operands[path][1]
        return [result]

    rules: dict[Path, Any] = {one: partial(subtract, one) for paths in found.values() for one in paths}
    rules |= {path: partial(read, paths) for path, paths in found.items()}

    def run(*args: Any) -> Any:
        outputs, _ = evaluate(program.closed, rules, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(program.out_specs), outputs)

    made = trace(run, *program.in_specs)
    inner = made.closed.jaxpr
    closed, _ = prune(made.closed, [True] * len(inner.outvars), [False] * len(inner.invars))
    return Program(closed, made.in_specs, made.out_specs)


def _body(jaxpr: Jaxpr, path: Path) -> Jaxpr:
    return bodies(equation_at(jaxpr, path[:-2]))[path[-2]].jaxpr


def _read_dim(equation: JaxprEqn) -> int | None:
    """The one dim along which a gather reads single elements, of all others those of its own index."""
    if equation.primitive is not primitives.gather_p:
        return None
    numbers, ndim = equation.params["dimension_numbers"], aval_of(equation.invars[0]).ndim
    alone = tuple(numbers.collapsed_slice_dims) == tuple(numbers.start_index_map) and not numbers.offset_dims
    batched = len(numbers.operand_batching_dims) == ndim - 1
    in_place = aval_of(equation.outvars[0]).ndim == ndim and tuple(numbers.operand_batching_dims) == tuple(
        numbers.start_indices_batching_dims
    )
    return numbers.collapsed_slice_dims[0] if alone and batched and in_place else None


def _subtractions(body: Jaxpr, read: Any, dim: int) -> list[int]:
    """The equations, the last first, that subtract from what is read something that is the same along a dim."""
    makers = {var: at for at, one in enumerate(body.eqns) for var in one.outvars}
    found: list[int] = []
    while isinstance(read, Var) and (at := makers.get(read)) is not None:
        equation = body.eqns[at]
        if equation.primitive is not primitives.sub_p or isinstance(equation.invars[1], Literal):
            break
        first, second = (aval_of(atom) for atom in equation.invars)
        if second.ndim != first.ndim or second.shape[dim] != 1 or first.shape[dim] == 1:
            break
        found.append(at)
        read = equation.invars[0]
    return found
