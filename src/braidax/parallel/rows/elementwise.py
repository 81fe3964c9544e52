"""Whether an optax transformation is elementwise: what it does to an element depends on that element alone."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from braidax.errors import ArgumentError
from braidax.program import ELEMENTWISE

CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}  # primitive: the parameter that holds its jaxpr
SHAPE = (3, 5)


def check_elementwise(optimizer: optax.GradientTransformation) -> None:
    """Raises unless an optimizer may be applied to some rows of a table as it would be to all of them.

    **Raises:** `ArgumentError` naming the operation that mixes elements, or the state that has another form.
    """
    table = jax.ShapeDtypeStruct(SHAPE, jnp.float32)
    try:
        state = jax.eval_shape(optimizer.init, table)
        leaves = jax.tree.leaves(state)
        _check_state(leaves)
        traced: Any = jax.make_jaxpr(optimizer.update)(table, state, table)
    except ArgumentError:
        raise
    except Exception as error:
        raise ArgumentError(
            f"optimizer cannot be applied to one array of rows ({type(error).__name__}: {error}): expected an optax "
            f"transformation that takes any PyTree of parameters, such as optax.adagrad(0.1)"
        ) from error
    marks = [bool(leaf.shape) for leaf in [table, *leaves, table]]
    outputs, mixed = _follow(traced.jaxpr, marks)
    if not mixed:
        found = [variable.aval for variable, marked in zip(traced.jaxpr.outvars, outputs, strict=True) if marked]
        mixed = ["a scalar made from all elements"] if any(aval.shape != SHAPE for aval in found) else []
    if mixed:
        raise ArgumentError(
            f"optimizer is not elementwise: its update has {mixed[0]}, which mixes rows, so that it cannot be applied "
            f"to the touched rows alone; use an elementwise one (sgd, adagrad, adam, …), which may come behind "
            f"optax.clip_by_global_norm at the head of an optax.chain, or keep this table dense"
        )


def _check_state(leaves: list[Any]) -> None:
    for leaf in leaves:
        if leaf.shape not in ((), SHAPE):
            raise ArgumentError(
                f"optimizer keeps a state of shape {leaf.shape} for parameters of shape {SHAPE}, expected scalars and "
                f"arrays like the parameters: it is not elementwise, so it cannot be applied to the touched rows alone"
            )


def _follow(jaxpr: Any, marks: list[bool]) -> tuple[list[bool], list[str]]:
    """Follows which values depend on elements; returns that of the outputs, and the operations that mix elements."""
    known: dict[Any, bool] = dict(zip(jaxpr.invars, marks, strict=True))
    known |= {variable: bool(variable.aval.shape) for variable in jaxpr.constvars}
    mixed: list[str] = []
    for equation in jaxpr.eqns:
        marked = [known[atom] if not hasattr(atom, "val") else False for atom in equation.invars]
        outputs, found = _through(equation, marked)
        mixed += found
        known.update(zip(equation.outvars, outputs, strict=True))
    return [known[atom] if not hasattr(atom, "val") else False for atom in jaxpr.outvars], mixed


def _through(equation: Any, marked: list[bool]) -> tuple[list[bool], list[str]]:
    name, params = equation.primitive.name, equation.params
    outputs = [any(marked)] * len(equation.outvars)
    if name in CALLS and CALLS[name] in params:
        inner = params[CALLS[name]]
        return _follow(getattr(inner, "jaxpr", inner), marked)
    if name == "cond":
        results = [_follow(branch.jaxpr, marked[1:]) for branch in params["branches"]]
        outputs = [any(column) for column in zip(*(found for found, _ in results), strict=True)]
        return outputs, [*(["cond on elements"] if marked[0] else []), *(m for _, mixed in results for m in mixed)]
    shapes = {variable.aval.shape for variable in equation.outvars}
    if equation.primitive in ELEMENTWISE and shapes <= {(), SHAPE}:
        operands = {atom.aval.shape for atom, mark in zip(equation.invars, marked, strict=True) if mark}
        return outputs, [] if operands <= shapes else [name]
    if name == "broadcast_in_dim" and all(atom.aval.shape in ((), SHAPE) for atom in equation.invars):
        return outputs, [] if not any(marked) or shapes == {SHAPE} else [name]
    if not any(marked) and shapes <= {()}:
        return outputs, []
    return outputs, [name]
