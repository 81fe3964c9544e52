"""Rows that lag behind, brought to where the dense optimizer would have them: the steps they have missed are taken.

Without a gradient, moments often decay by known factors, so that the moves a dense optimizer would have made are a sum
of known terms, cut off where what follows is lost in float32. Other steps are taken one by one.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from braidax.program import Term, compute

from .recognize import AdamFading, Fading, recognized
from .split import CatchUp, TableUpdate

NEGLIGIBLE = 1e-9  # of a sum; float32 has 6e-8
MAX_NODES = 48

Rows = dict[str, Any]
Settle = Callable[[jax.Array, Rows, Any], tuple[jax.Array, Rows]]


class Now(NamedTuple):
    """What the rows of a table move by, besides themselves.

    **Fields:** `clock`: how many steps were taken, int32. `scalars`: of the state, those of a `CatchUp`, in its order.
    `context`: of a `TableUpdate`, in its order; empty where nothing is moved.
    """

    clock: Any
    scalars: tuple[Any, ...]
    context: tuple[Any, ...] = ()


def settling(table: TableUpdate) -> Settle:
    """Returns `settle(values, rows, now) -> (values, rows)`: rows as they are once every step has moved them.

    Rows are dicts of what is kept, `[m, D]` or `[m]`, of `last`, the number of steps each has seen, and of `own`, its
    scalars of the kind "own" then.
    """
    catch_up, form = table.catch_up, recognized(table)
    assert catch_up is not None, "asked for rows that move without a gradient"
    brought: Any = _Steps(table, catch_up)
    if isinstance(form, Fading):
        brought = _faded(table, catch_up, form)
    elif form is not None and _num_nodes(form.b1, form.b2) <= MAX_NODES:
        brought = _adam_faded(table, catch_up, form)

    def settle(values: jax.Array, rows: Rows, now: Now) -> tuple[jax.Array, Rows]:
        missed = jnp.maximum(now.clock - rows["last"], 0)  # rows beyond the table, read as filler, have missed nothing
        kept, names = tuple(rows[one.name] for one in table.kept), [one.name for one in table.kept]
        values, kept = brought(values, kept, rows.get("own", ()), missed, now)
        settled: Rows = {**dict(zip(names, kept, strict=True)), "last": jnp.maximum(rows["last"], now.clock)}
        return values, settled | own_scalars(catch_up, now, missed.shape)

    return settle


def own_scalars(catch_up: CatchUp, now: Now, shape: tuple[int, ...]) -> Rows:
    """Returns what rows keep of the scalars of the kind "own": a copy each."""
    own = [one for one, scalar in zip(now.scalars, catch_up.scalars, strict=True) if scalar.kind == "own"]
    return {"own": tuple(jnp.full(shape, one) for one in own)} if own else {}


class _Steps:
    """Takes the missed steps one by one, as long as any row that has some is not asleep."""

    def __init__(self, table: TableUpdate, catch_up: CatchUp) -> None:
        self._table, self._scalars = table, catch_up.scalars
        own = [scalar.next for scalar in catch_up.scalars if scalar.kind == "own"]
        self._wanted = [catch_up.move, *catch_up.next, *own]
        self._sleeping = _sleeping(table, catch_up)

    def __call__(self, values: jax.Array, kept: Any, own: Any, missed: jax.Array, now: Now) -> tuple[jax.Array, Any]:
        table = self._table
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


def _faded(table: TableUpdate, catch_up: CatchUp, form: Fading) -> Any:
    """Sums up the moves of rows all of which fades."""

    def brought(values: jax.Array, kept: Any, own: Any, missed: jax.Array, now: Now) -> tuple[jax.Array, Any]:
        moved = values if form.grown == 1 else values * _power(form.grown, missed)[:, None]
        for leaf, factor, rate in zip(kept, form.factors, form.rates, strict=True):
            if rate is not None:
                total = _rates(catch_up, rate, factor, form.grown, missed, now)
                moved = moved + total[:, None] * leaf
        factors = [_power(factor, missed) for factor in form.factors]
        after = [
            leaf if number == 1 else leaf * factor.reshape(factor.shape + (1,) * (leaf.ndim - 1))
            for leaf, factor, number in zip(kept, factors, form.factors, strict=True)
        ]
        return moved, tuple(after)

    return brought


def _rates(catch_up: CatchUp, rate: Term, factor: float, grown: float, missed: jax.Array, now: Now) -> jax.Array:
    """The sum of what the missed steps multiply something kept by, that fades by a factor."""
    at = _rate(catch_up, rate, missed, now)

    def term(number: jax.Array, total: jax.Array) -> jax.Array:
        weight = _power(factor, number - 1) * at(number)
        if grown != 1:
            weight = weight * _power(grown, jnp.maximum(missed - number, 0))
        return total + weight * (number <= missed)

    return _sum_terms(term, jnp.zeros(missed.shape, jnp.float32), missed, _num_terms(factor))


def _rate(catch_up: CatchUp, rate: Term, missed: jax.Array, now: Now) -> Callable[[Any], jax.Array]:
    """A scalar term in the missed step of a number, from 1, of each row."""
    if rate.is_literal:
        return lambda number: jnp.asarray(rate.value, jnp.float32)
    used = [at for at, scalar in enumerate(catch_up.scalars) if rate.reads & scalar.term.reads]

    def one(*counts: Any) -> Any:
        known = {catch_up.scalars[at].term.number: count for at, count in zip(used, counts, strict=True)}
        return compute([rate], known)[0].astype(jnp.float32)

    return lambda number: jax.vmap(one)(*(now.scalars[at] - missed + (number - 1) for at in used))


def _adam_faded(table: TableUpdate, catch_up: CatchUp, form: AdamFading) -> Any:
    at = next(at for at, scalar in enumerate(catch_up.scalars) if scalar.term is form.count)
    nodes = _num_nodes(form.b1, form.b2)

    def brought(values: jax.Array, kept: Any, own: Any, missed: jax.Array, now: Now) -> tuple[jax.Array, Any]:
        mu, nu = kept[form.mu], kept[form.nu]
        missing = _Missing(form, _rate(catch_up, form.rate, missed, now), nodes)
        moves = missing.moves(mu, nu, now.scalars[at] - missed, missed)
        moved = values if form.grown == 1 else values * _power(form.grown, missed)[:, None]
        after = {form.mu: mu * _power(form.b1, missed)[:, None], form.nu: nu * _power(form.b2, missed)[:, None]}
        return moved + moves, (after[0], after[1])

    return brought


class _Missing(NamedTuple):
    """The moves of Adam in steps without a gradient.

    The step `j` after the last gradient moves an element by `mu * weight_j / (sqrt(nu) + floor_j)`, where weight and
    floor depend on the row's step numbers only. As a function of the floor's logarithm `1 / (sqrt(nu) + floor)` is
    smooth, whatever `nu`: interpolated at a few Chebyshev nodes, the sum over all `j` becomes a sum over the nodes.
    """

    form: AdamFading
    rate: Callable[[Any], jax.Array]
    num_nodes: int

    def moves(self, mu: jax.Array, nu: jax.Array, last: jax.Array, missed: jax.Array) -> jax.Array:
        """Sums the moves of all missed steps: `[m, D]`. **Arguments:** `last`: Adam's count in the row's last step."""
        b1, grown = self.form.b1, self.form.grown
        num_terms = _num_terms(b1 / math.sqrt(self.form.b2))
        low = self._log_floor(last, 1)
        high = self._log_floor(last, jnp.clip(missed, 1, num_terms))
        middle, half = (low + high) / 2, jnp.maximum((high - low) / 2, 1e-6)
        first = _power(b1, last)

        def term(number: jax.Array, sums: jax.Array) -> jax.Array:
            fade = _power(b1, number)
            log_floor = self._log_floor(last, number)
            weight = self.rate(number) * fade / (1 - first * fade)
            weight = jnp.where(number <= missed, weight * jnp.exp(log_floor - math.log(self.form.eps)), 0)
            if grown != 1:
                weight = weight * _power(grown, jnp.maximum(missed - number, 0))
            place = jnp.clip((log_floor - middle) / half, -1, 1)
            values = [jnp.ones_like(place), place]
            for _ in range(2, self.num_nodes):
                values.append(2 * place * values[-1] - values[-2])
            return sums + weight * jnp.stack(values[: self.num_nodes])

        start = jnp.zeros((self.num_nodes, *missed.shape), mu.dtype)
        sums = _sum_terms(term, start, missed, num_terms)
        nodes, matrix = _chebyshev(self.num_nodes)
        weights = jnp.matmul(jnp.asarray(matrix, sums.dtype), sums, precision="highest")
        root, total = jnp.sqrt(nu), jnp.zeros_like(mu)
        for node, weight in zip(nodes.tolist(), weights, strict=True):
            total = total + weight[:, None] / (root + jnp.exp(middle + half * node)[:, None])
        return mu * total

    def _log_floor(self, last: jax.Array, number: jax.Array | int) -> jax.Array:
        b2, eps = self.form.b2, self.form.eps
        correction = -jnp.expm1((last + number) * math.log(b2))
        return math.log(eps) + jnp.log(correction) / 2 - number * (math.log(b2) / 2)


def _chebyshev(num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """The nodes in (-1, 1), and the matrix that takes sums of weighted polynomials to weights of the nodes."""
    nodes = np.cos(np.pi * (np.arange(num_nodes) + 0.5) / num_nodes)
    matrix = np.polynomial.chebyshev.chebvander(nodes, num_nodes - 1) * (2 / num_nodes)
    matrix[:, 0] /= 2
    return nodes, matrix


def _num_nodes(b1: float, b2: float) -> int:
    """How many nodes bring the interpolation below what float32 sees, over the widest range of floors there can be."""
    if b1 == 0:
        return 2
    ratio = b1 / math.sqrt(b2)
    if ratio >= 1 - 1e-3:
        return MAX_NODES + 1
    num_terms = _num_terms(ratio)
    length = -num_terms * math.log(b2) / 2 + math.log((1 - b2 ** (num_terms + 1)) / (1 - b2**2)) / 2
    reach = 2 * math.pi / length
    return max(2, math.ceil(math.log(NEGLIGIBLE) / -math.log(reach + math.sqrt(1 + reach**2))))


def _sum_terms(
    term: Callable[[jax.Array, jax.Array], jax.Array], start: jax.Array, missed: jax.Array, num_terms: int
) -> jax.Array:
    """Adds up terms 1, 2, …, as many as the longest absence needs, at most `num_terms`."""
    longest = jnp.minimum(missed.max(initial=0), num_terms)
    return jax.lax.fori_loop(1, longest + 1, lambda number, total: term(number, total), start)


def _num_terms(ratio: float) -> int:
    """How many terms of a series that fades by `ratio` matter."""
    return 1 if ratio == 0 else math.ceil(math.log(NEGLIGIBLE * (1 - ratio)) / math.log(ratio))


def _power(factor: float, number: jax.Array) -> jax.Array:
    """`factor ** number`, also of many steps; 0 ** 0 is 1."""
    if factor == 0:
        return jnp.where(number == 0, 1.0, 0.0)
    if factor == 1:
        return jnp.ones(jnp.shape(number))
    return jnp.exp(number * math.log(factor))
