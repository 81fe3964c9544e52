"""Whether an optimizer may be given rows of a variable as if they were variables of their own."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from braidax.errors import ArgumentError
from braidax.parallel.given.arrays import strong
from braidax.parallel.given.optimizer import moves_of
from braidax.parallel.plan.plan import follow
from braidax.program import Term, Terms, named_leaves, terms_between, terms_of, trace

_CARRIED_ON = ("add", "convert_element_type")
_OF_SHAPE = frozenset({"shape", "new_sizes", "sharding"})


class _Traced(NamedTuple):
    """An update as terms: of each output what it is called, the term, and the variable whose rows it has, or ""."""

    names: list[str]
    inputs: list[str]
    outputs: list[Term]
    tables: list[str]


def check_by_rows(
    optimizer: optax.GradientTransformation, params: Any, cut: Sequence[int], divide: Callable[[Any], Any]
) -> None:
    """Checks that dividing variables by rows changes nothing of what an optimizer makes of them.

    It may move each row by what belongs to that row, and by sums over all variables, such as the norm of all gradients.
    What it decides by shapes and names must come out the same.

    **Arguments:** `params`: PyTree of specs. `cut`: which leaves are divided. `divide`: makes the divided tree.

    **Raises:** `ArgumentError` that says what it does otherwise.
    """
    if not cut:
        return
    structure = jax.tree.structure(params)
    names = [name for name, _ in named_leaves(params, "params")]
    of_tables = ["" if at not in cut else name for at, name in enumerate(names)]
    whole = _traced(optimizer, params, structure.unflatten(of_tables), {})
    for term, table in zip(whole.outputs, whole.tables, strict=True):
        if term.rows.blamed:
            _refuse(min(term.rows.blamed), term.rows.why)
        if table and term.table != table and not term.even:
            _refuse(table, "what becomes of it does not go by its rows")
    every = sum(1 << at for at in range(len(names)))
    for one, total in _sums(whole.outputs):
        if total.reads & every != every or len(names) == 1:
            _refuse(next(operand.table for operand in one.operands if operand.table), f"{one.name} over its rows alone")
    specs = jax.eval_shape(divide, params)
    pieces = {name: name.rpartition("/")[0] for name, _ in named_leaves(specs, "params") if name not in names}
    tables = jax.tree.unflatten(
        jax.tree.structure(specs), [pieces.get(name, "") for name, _ in named_leaves(specs, "params")]
    )
    apart = _traced(optimizer, specs, tables, pieces)
    numbers = dict[Any, int]()
    known = dict(zip(whole.names, _told(whole, numbers), strict=True))
    for name, told, table in zip(apart.names, _told(apart, numbers), apart.tables, strict=True):
        if known.get(name) != told:
            _refuse(table or name, "it does something else with rows of it")


def _traced(optimizer: optax.GradientTransformation, params: Any, tables: Any, pieces: Mapping[str, str]) -> _Traced:
    """Traces an update. **Arguments:** `tables`: like `params`, the variable whose rows each is, or ""."""
    state = jax.eval_shape(lambda params: strong(optimizer.init(params)), params)
    loss = jax.ShapeDtypeStruct((), jnp.float32)
    program = trace(functools.partial(moves_of, optimizer), params, state, params, loss)
    of_params = jax.tree.leaves(tables)
    of_state = jax.tree.leaves(follow(params, tables, state, lambda _: ""))
    owners = [*of_params, *of_state, *of_params, ""]
    terms = Terms(gradients=range(len(of_params)))
    pairs = zip(jax.tree.leaves(program.in_specs), owners, strict=True)
    inputs = [terms.given(at, spec, table=table) for at, (spec, table) in enumerate(pairs)]
    names = [pieces.get(name, name) for name, _ in named_leaves(params, "params")]
    of_pieces = {*pieces.values()}
    states = [
        name.rpartition("/")[0] if table in of_pieces else name
        for (name, _), table in zip(named_leaves(state, "state"), of_state, strict=True)
    ]
    gradients = [f"gradients/{name}" for name in names]
    return _Traced(
        [*names, *states], [*gradients, *states, *names, "loss"], terms_of(terms, program.closed, inputs),
        [*of_params, *of_state],
    )  # fmt: skip


def _told(traced: _Traced, numbers: dict[Any, int]) -> list[int]:
    """Returns for each output a number of how it is made, the same where only the number of rows differs.

    **Arguments:** `numbers`: that are known already, by what they are of.
    """
    known, totals = dict[int, int](), dict[int, bool]()
    for one in terms_between(traced.outputs, {}):
        operands = [operand.number for operand in one.operands]
        totals[one.number] = one.is_sum or (
            one.name in _CARRIED_ON and not one.shape and any(totals[operand] for operand in operands)
        )
        key: Any = "total"
        if not totals[one.number] and one.making is not None:
            params = sorted((name, str(value)) for name, value in one.making.params.items() if name not in _OF_SHAPE)
            key = one.name, tuple(params), one.making.output, tuple(known[operand] for operand in operands)
        elif not totals[one.number]:
            key = traced.inputs[one.at] if one.is_input else ("value", str(one.value), str(one.dtype))
        known[one.number] = numbers.setdefault(key, len(numbers))
    return [known[term.number] for term in traced.outputs]


def _sums(outputs: Sequence[Term]) -> list[tuple[Term, Term]]:
    """Returns sums over rows, each with what it is part of before anything but adding is done."""
    users: dict[int, list[Term]] = {}
    every = terms_between(outputs, {})
    for term in every:
        for operand in term.operands:
            users.setdefault(operand.number, []).append(term)
    found: list[tuple[Term, Term]] = []
    for one in every:
        if one.is_sum:
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
