"""An optimizer taken apart on its real tree: what it does to the rows of tables, and what it does to all the rest.

Its update is traced once, with all variables, so that masks, labels and whatever else looks at paths or shapes mean
what they mean on one device. How a table moves is then read off that program: `Term`s tell what goes by the rows of a
table, and what each operation comes to in a row that has no gradient.
"""

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import optax

from braidax.errors import ArgumentError
from braidax.parallel.given.arrays import strong
from braidax.parallel.given.optimizer import moves_of
from braidax.program import Program, Term, Terms, difference, named_leaves, of_no_rows, terms_of, trace

from .recognize import recognized
from .table_update import CatchUp, Kept, Scalar, TableUpdate


@dataclass(frozen=True)
class Split:
    """An optimizer, split.

    **Fields:** `program`: of `(gradients, state, params, loss) -> (moves, state)`, on all variables. `inputs`: terms.
    `moves`, `states`: those of the outputs. `tables`: by name. `refused`: why others are none. `kept`: which leaves of
    the state have the rows of a table, and of which one.
    """

    program: Program
    inputs: tuple[Term, ...]
    moves: tuple[Term, ...]
    states: tuple[Term, ...]
    tables: Mapping[str, TableUpdate]
    refused: Mapping[str, str]
    kept: Mapping[int, str]


class TracedOptimizer:
    """An optimizer, traced on a tree of parameters.

    **Arguments:** `params`: PyTree of specs. `loss`: spec of what extra arguments are told.

    **Raises:** `ArgumentError` where it does not take such a tree, or gives back another one.
    """

    def __init__(
        self,
        optimizer: optax.GradientTransformation,
        params: Any,
        loss: jax.ShapeDtypeStruct | None = None,
    ) -> None:
        self.optimizer, self.params = optimizer, params
        self.state: Any = jax.eval_shape(lambda params: strong(optimizer.init(params)), params)

        loss = jax.ShapeDtypeStruct((), np.float32) if loss is None else loss
        self.program = trace(functools.partial(moves_of, optimizer), params, self.state, params, loss)
        moves, state = self.program.out_specs
        if message := difference(self.state, state, "state"):
            raise ArgumentError(f"optimizer.update returns another state than optimizer.init made: {message}")
        if jax.tree.structure(moves) != jax.tree.structure(params):
            raise ArgumentError(
                f"optimizer.update returns updates of the form {jax.tree.structure(moves)}, expected that of its "
                f"params: {jax.tree.structure(params)}"
            )

    @property
    def state_leaves(self) -> list[Any]:
        """Specs of the leaves of its state."""
        return jax.tree.leaves(self.state)

    @functools.cached_property
    def names(self) -> list[str]:
        """Of the parameters."""
        return [name or "params" for name, _ in named_leaves(self.params)]

    def split(self, tables: Collection[str], *, apart: Collection[str] = ()) -> Split:
        """Splits it.

        **Arguments:** `tables`: names of the variables whose rows should be moved. `apart`: of those that are moved by
        others, and whose gradients it does not see. Those for which that cannot be proven to be right are refused.
        """
        refused: dict[str, str] = {}
        while True:
            wanted, others = ([name for name in names if name not in refused] for names in (tables, apart))
            found, more = self._tried(wanted, others)
            if not more:
                return replace(found, refused=refused)
            refused |= more

    def _tried(self, tables: Sequence[str], apart: Collection[str]) -> tuple[Split, dict[str, str]]:
        names, num = self.names, len(self.names)
        kept = self._kept_rows([*tables, *apart])
        terms = Terms(gradients=range(num))
        leaves = jax.tree.leaves(self.program.in_specs)
        owners = {index: name for index, name in enumerate(names) if name in tables or name in apart}
        owners |= {index + num + len(self.state_leaves): name for index, name in owners.items()}
        owners |= {num + at: name for at, name in kept.items()}
        inputs = [terms.given(at, leaf, table=owners.get(at, "")) for at, leaf in enumerate(leaves)]
        seen = list(inputs)
        for at, name in enumerate(names):
            if name in apart:
                seen[at] = terms.literal(0, leaves[at].shape, leaves[at].dtype)
        outputs = terms_of(terms, self.program.closed, seen)
        moves, states = tuple(outputs[:num]), tuple(outputs[num:])
        refused = self._blamed(moves, states, kept, tables, apart)
        found: dict[str, TableUpdate] = {}
        for name in tables:
            if name not in refused:
                at = tuple(at for at, owner in kept.items() if owner == name)
                try:
                    found[name] = _of_table(name, self, terms, inputs, moves[names.index(name)], states, at)
                except ArgumentError as error:
                    refused[name] = str(error)
        return Split(self.program, tuple(inputs), moves, states, found, {}, kept), refused

    def _kept_rows(self, tables: Collection[str]) -> dict[int, str]:
        """The leaves of the state at the path of a table, with as many rows: what becomes of them is checked."""
        paths = jax.tree_util.tree_flatten_with_path(self.params)[0]
        known = [(tuple(path), spec, name) for (path, spec), name in zip(paths, self.names, strict=True)]
        known.sort(key=lambda one: -len(one[0]))
        kept: dict[int, str] = {}
        for at, (path, leaf) in enumerate(jax.tree_util.tree_flatten_with_path(self.state)[0]):
            for suffix, spec, name in known:
                if tuple(path[len(path) - len(suffix) :]) == suffix:
                    if name in tables and leaf.shape[:1] == spec.shape[:1]:
                        kept[at] = name
                    break
        return kept

    def _blamed(
        self,
        moves: Sequence[Term],
        states: Sequence[Term],
        kept: Mapping[int, str],
        tables: Sequence[str],
        apart: Collection[str],
    ) -> dict[str, str]:
        """Says of which tables the rows alone are not enough."""
        owners = [*self.names, *(kept.get(at, "") for at in range(len(states)))]
        refused: dict[str, str] = {}
        for number, (term, owner) in enumerate(zip([*moves, *states], owners, strict=True)):
            if owner in apart:
                continue
            if term.rows.why:
                for name in term.rows.blamed:
                    refused.setdefault(name, f"its update has {term.rows.why}")
            elif owner in tables and term.table != owner and not term.even:
                part = "what it keeps" if number >= len(moves) else "its update"
                refused.setdefault(owner, f"{part} is an array of its shape that is not made of its rows")
            elif owner not in tables and term.table:
                refused.setdefault(term.table, "the rest of the state is made of its rows")
        if self.program.closed.effects:
            refused |= dict.fromkeys(tables, "its update has side effects")
        return {name: mixing(why) for name, why in refused.items()}


def mixing(why: str) -> str:
    """Says that rows cannot be moved alone, and what to do. **Arguments:** `why`: its update has …"""
    return (
        f"optimizer does not move its rows one by one: {why}; use one that does (sgd, adagrad, adam, …), which may "
        f"come behind optax.clip_by_global_norm, or keep this table dense"
    )


def _of_table(
    name: str,
    traced: TracedOptimizer,
    terms: Terms,
    inputs: Sequence[Term],
    move: Term,
    states: Sequence[Term],
    at: tuple[int, ...],
) -> TableUpdate:
    num, which = len(traced.names), traced.names.index(name)
    names = _short(name, [named_leaves(traced.state)[one][0] for one in at])
    kept = tuple(Kept(one, called, inputs[num + one], states[one]) for one, called in zip(at, names, strict=True))
    found = TableUpdate(
        name=name,
        terms=terms,
        value=inputs[num + len(traced.state_leaves) + which],
        gradient=inputs[which],
        move=move,
        kept=kept,
        catch_up=_catch_up(traced, terms, inputs, states, kept, move),
    )
    return found if found.catch_up is None else replace(found, catch_up=replace(found.catch_up, form=recognized(found)))


def _short(name: str, paths: Sequence[str]) -> tuple[str, ...]:
    """Names of what is kept: `mu` of `0/mu/table`, unless two are called so."""
    roots = [path.removesuffix(name).rstrip("/") for path in paths]
    last = [root.rsplit("/", 1)[-1] for root in roots]
    return tuple(last if len({*last, "last", "own"}) == len(last) + 2 else [root.replace("/", ".") for root in roots])


def _catch_up(
    traced: TracedOptimizer,
    terms: Terms,
    inputs: Sequence[Term],
    states: Sequence[Term],
    kept: Sequence[Kept],
    move: Term,
) -> CatchUp | None:
    resting, rested = terms.rested(move), tuple(terms.rested(one.next) for one in kept)
    if resting.equals(0) and all(after is one.term for after, one in zip(rested, kept, strict=True)):
        return None
    num, scalars = len(traced.names), dict[int, Scalar]()
    todo = [(one, "") for one in of_no_rows([resting, *rested])]
    while todo:
        term, through = todo.pop()
        for index in (at for at in range(len(inputs)) if term.reads >> at & 1):
            at = index - num
            if not 0 <= at < len(states) or inputs[index].shape or inputs[index].table:
                raise ArgumentError(_unforeseen(traced, index, through))
            if at not in scalars:
                scalars[at] = found = _scalar(terms, at, inputs[index], states[at])
                if found.kind == "own":
                    todo.append((found.next, f"{named_leaves(traced.state, 'state')[at][0]}, which "))
    return CatchUp(resting, rested, tuple(scalars[at] for at in sorted(scalars)))


def _unforeseen(traced: TracedOptimizer, index: int, through: str) -> str:
    roots = ("the gradient of params", "state", "params", "the loss (value)")
    pairs = zip(roots, traced.program.in_specs, strict=True)
    told = [path for root, specs in pairs for path, _ in named_leaves(specs, root)][index]
    return (
        f"optimizer moves rows that have no gradient, by {through or 'something that '}depends on {told}: the updates "
        f"that a row has missed cannot be made up for; keep this table dense"
    )


def _scalar(terms: Terms, at: int, term: Term, after: Term) -> Scalar:
    after = terms.rested(after)
    kind = "fixed" if after is term else "count" if _is_count(term, after) else "own"
    return Scalar(at, term, after, kind)


def _is_count(term: Term, after: Term) -> bool:
    """Whether it is one more, or one more below the largest integer."""
    if not np.issubdtype(term.dtype, np.integer):
        return False
    if after.made_by("select_n") and len(after.operands) == 3:
        below, largest, after = after.operands
        limit = np.iinfo(term.dtype).max
        if not (below.made_by("lt") and below.operands[0] is term and below.operands[1].equals(limit)):
            return False
        if not largest.equals(limit):
            return False
    return after.made_by("add") and after.operands[0] is term and after.operands[1].equals(1)
