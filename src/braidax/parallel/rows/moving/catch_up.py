"""Rows that lag behind, brought to where the dense optimizer would have them: the steps they have missed are taken.

Where it is known how, they are summed up (`fading`). Others are taken one by one.
"""

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from braidax.program import compute

from .fading import summed_up
from .now import Now
from .table_update import CatchUp, TableUpdate

Rows = dict[str, Any]
Settle = Callable[[jax.Array, Rows, Any], tuple[jax.Array, Rows]]


def settling(table: TableUpdate) -> Settle:
    """Returns `settle(values, rows, now) -> (values, rows)`: rows as they are once every step has moved them.

    Rows are dicts of what is kept, `[m, D]` or `[m]`, of `last`, the number of steps each has seen, and of copies of
    what `Now` was then: `own`, its scalars of the kind "own", and `grown`.
    """
    catch_up = table.catch_up
    assert catch_up is not None, "asked for rows that move without a gradient"
    brought = _Steps(table, catch_up) if catch_up.form is None else summed_up(catch_up, catch_up.form)

    def settle(values: jax.Array, rows: Rows, now: Now) -> tuple[jax.Array, Rows]:
        missed = jnp.maximum(now.clock - rows["last"], 0)  # rows beyond the table, read as filler, have missed nothing
        kept, names = tuple(rows[one.name] for one in table.kept), [one.name for one in table.kept]
        values, kept = brought(values, kept, rows, missed, now)
        settled: Rows = {**dict(zip(names, kept, strict=True)), "last": jnp.maximum(rows["last"], now.clock)}
        return values, settled | copies(catch_up, now, missed.shape)

    return settle


def alike(table: TableUpdate, catch_up: CatchUp) -> Hashable:
    """Returns what is the same for tables whose rows are brought up by the same terms of the same numbers.

    None where missed steps are taken one by one, which would be as many for all as for the last of them.
    """
    if catch_up.form is None:
        return None
    return catch_up.form, catch_up.scalars, tuple(one.name for one in table.kept)


def copies(catch_up: CatchUp, now: Now, shape: tuple[Any, ...]) -> Rows:
    """Returns what rows keep of `Now`, a copy each. **Arguments:** `shape`: of one number a row."""
    own = [one for one, scalar in zip(now.scalars, catch_up.scalars, strict=True) if scalar.kind == "own"]
    found = {"own": tuple(own), "grown": now.grown}
    return {name: tuple(jnp.full(shape, one) for one in numbers) for name, numbers in found.items() if numbers}


def no_growth(table: TableUpdate) -> tuple[Any, ...]:
    """Returns `Now.grown` before the first step."""
    return () if table.growth is None else (jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32))


def next_grown(table: TableUpdate, now: Now) -> tuple[Any, ...]:
    """Returns `Now.grown` behind a step that is being taken."""
    if table.growth is None or table.catch_up is None:
        return ()
    known = {one.term.number: value for one, value in zip(table.catch_up.scalars, now.scalars, strict=True)}
    (growth,) = compute([table.growth], known)
    total, rest = now.grown
    # The step's own is far less than the sum: what the sum loses of it is kept beside it.
    step = jnp.log1p(growth.astype(jnp.float32)) + rest
    after = total + step
    return after, step - (after - total)


class _Steps:
    """Takes the missed steps one by one, as long as any row that has some is not asleep."""

    def __init__(self, table: TableUpdate, catch_up: CatchUp) -> None:
        self._table, self._scalars = table, catch_up.scalars
        own = [scalar.next for scalar in catch_up.scalars if scalar.kind == "own"]
        self._wanted = [catch_up.move, *catch_up.next, *own]
        self._sleeping = _sleeping(table, catch_up)

    def __call__(self, values: jax.Array, kept: Any, rows: Rows, missed: jax.Array, now: Now) -> tuple[jax.Array, Any]:
        table, own = self._table, rows.get("own", ())
        terms = [one.term for one in table.kept]
        start = table.shaped(values, table.value), tuple(map(table.shaped, kept, terms)), tuple(own)
        axes = {scalar.term.number: None if scalar.kind == "fixed" else 0 for scalar in self._scalars}
        step = jax.vmap(self._step, in_axes=(0, 0, axes))

        def late(number: jax.Array, kept: Any) -> jax.Array:
            return (number < missed) & _awake(kept, self._sleeping)

        def again(state: Any) -> Any:
            number, *old = state
            new, which = step(old[0], old[1], self._at(number, old[2], missed, now)), late(number, old[1])

            def choose(after: jax.Array, before: jax.Array) -> jax.Array:
                chosen = which.reshape(which.shape + (1,) * (before.ndim - 1))
                return jnp.where(chosen, after.astype(before.dtype), before)

            return number + 1, *jax.tree.map(choose, new, tuple(old))

        begun = (jnp.zeros((), jnp.int32), *start)
        _, moved, after, _ = jax.lax.while_loop(lambda state: jnp.any(late(state[0], state[2])), again, begun)
        return moved.reshape(values.shape), tuple(new.reshape(old.shape) for new, old in zip(after, kept, strict=True))

    def _step(self, value: jax.Array, kept: Any, scalars: Mapping[int, Any]) -> Any:
        """Of one row: its value, what is kept of it, and its own scalars."""
        table = self._table
        known: dict[int, Any] = {**scalars, table.value.number: value[None]}
        known |= {one.term.number: leaf[None] for one, leaf in zip(table.kept, kept, strict=True)}
        move, *after = compute(self._wanted, known, rows=table.sizes(value[None]))
        rows = tuple(leaf[0] for leaf in after[: len(kept)])
        return (value + move[0]).astype(value.dtype), rows, tuple(after[len(kept) :])

    def _at(self, number: jax.Array, own: Any, missed: jax.Array, now: Now) -> dict[int, Any]:
        """The scalars of each row when it has taken a number of the steps that it missed."""
        of_rows, found = iter(own), dict[int, Any]()
        for value, scalar in zip(now.scalars, self._scalars, strict=True):
            if scalar.kind == "count":
                found[scalar.term.number] = (value - missed + number).astype(value.dtype)
            else:
                found[scalar.term.number] = value if scalar.kind == "fixed" else next(of_rows)
        return found


def _sleeping(table: TableUpdate, catch_up: CatchUp) -> tuple[int, ...] | None:
    """Which of what is kept must be 0 for a row to rest until it has a gradient; None if that is not enough."""
    kept = [one.term for one in table.kept]
    moving = [at for at, after in enumerate(catch_up.next) if after is not kept[at]]
    reading = [at for at, one in enumerate(kept) if catch_up.move.reads & one.reads]
    zeros = {at: table.terms.literal(0, kept[at].shape, kept[at].dtype) for at in {*moving, *reading}}
    replaced = {kept[at]: zero for at, zero in zeros.items()}
    if not table.terms.rested(catch_up.move, replaced).equals(0):
        return None
    for at, after in enumerate(catch_up.next):
        rests = table.terms.rested(after, replaced)
        if not (rests.equals(0) if at in zeros else rests is kept[at]):
            return None
    return tuple(sorted(zeros))


def _awake(kept: Any, sleeping: tuple[int, ...] | None) -> jax.Array | bool:
    if sleeping is None:
        return True
    parts = [jnp.any(kept[at].reshape(kept[at].shape[0], -1) != 0, axis=1) for at in sleeping]
    return jnp.any(jnp.stack(parts), axis=0) if parts else True
