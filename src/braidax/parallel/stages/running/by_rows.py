"""Whether an optimizer may be given rows of a variable as if they were variables of their own."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from braidax.errors import ArgumentError
from braidax.parallel.given.arrays import strong
from braidax.parallel.given.optimizer import moves_of
from braidax.parallel.plan.plan import follow
from braidax.program import Term, Terms, named_leaves, terms_of, trace

_CARRIED_ON = ("add", "convert_element_type")


def check_by_rows(optimizer: optax.GradientTransformation, params: Any, cut: Sequence[int]) -> None:
    """Checks that dividing variables by rows changes nothing of what an optimizer makes of them.

    It may move each row by what belongs to that row, and by sums over all variables, such as the norm of all gradients.

    **Arguments:** `params`: PyTree of specs. `cut`: which leaves are divided.

    **Raises:** `ArgumentError` that says what it does otherwise.
    """
    if not cut:
        return
    names = [name for name, _ in named_leaves(params, "params")]
    state = jax.eval_shape(lambda params: strong(optimizer.init(params)), params)
    tables = ["" if at not in cut else name for at, name in enumerate(names)]
    structure = jax.tree.structure(params)
    of_state = jax.tree.leaves(follow(params, structure.unflatten(tables), state, lambda _: ""))
    loss = jax.ShapeDtypeStruct((), jnp.float32)
    program = trace(functools.partial(moves_of, optimizer), params, state, params, loss)
    terms = Terms(gradients=range(len(names)))
    owners = [*tables, *of_state, *tables, ""]
    pairs = zip(jax.tree.leaves(program.in_specs), owners, strict=True)
    inputs = [terms.given(at, spec, table=table) for at, (spec, table) in enumerate(pairs)]
    outputs = terms_of(terms, program.closed, inputs)
    for term, table in zip(outputs, [*tables, *of_state], strict=True):
        if term.rows.blamed:
            _refuse(min(term.rows.blamed), term.rows.why)
        if table and term.table != table and not term.even:
            _refuse(table, "what becomes of it does not go by its rows")
    every = sum(1 << at for at in range(len(names)))
    for one, whole in _sums(outputs):
        if whole.reads & every != every or len(names) == 1:
            _refuse(next(operand.table for operand in one.operands if operand.table), f"{one.name} over its rows alone")


def _sums(outputs: Sequence[Term]) -> list[tuple[Term, Term]]:
    """Returns sums over rows, each with what it is part of before anything but adding is done."""
    users: dict[int, list[Term]] = {}
    seen, todo, sums = set[int](), list(outputs), list[Term]()
    while todo:
        term = todo.pop()
        if term.number in seen:
            continue
        seen.add(term.number)
        for operand in term.operands:
            users.setdefault(operand.number, []).append(term)
            todo.append(operand)
        if term.is_sum:
            sums.append(term)
    found: list[tuple[Term, Term]] = []
    for one in sums:
        whole, following = one, users.get(one.number, [])
        while len(following) == 1 and following[0].name in _CARRIED_ON and not following[0].shape:
            whole, following = following[0], users.get(following[0].number, [])
        found.append((one, whole))
    return found


def _refuse(name: str, why: str) -> None:
    raise ArgumentError(
        f"optimizer takes {name} as a whole ({why}), and stages have rows of it: cut where no loop is, with layers as "
        f"variables of their own, or choose an optimizer that moves each row by itself"
    )
