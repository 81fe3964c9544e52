"""Missed steps, summed up: without a gradient moments fade by known factors.

So the moves that a dense optimizer would have made are a sum of known terms, cut off where what follows is lost in
float32. What values grow by, which is weight decay, is a product over all missed steps: where it differs from step to
step, its logarithm is kept for all rows, and each row keeps what it was when it was last moved.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from braidax.program import Term, compute

from .now import Now
from .recognize import num_nodes, num_terms
from .table_update import AdamFading, CatchUp, Fading

Brought = Callable[[jax.Array, Any, Mapping[str, Any], jax.Array, Now], tuple[jax.Array, Any]]
"""`(values, kept, rows, missed, now) -> (values, kept)`, of rows `[m, …]` and how many steps each has missed."""


def summed_up(catch_up: CatchUp, form: Fading | AdamFading) -> Brought:
    """Returns the function that brings rows up in one move."""
    return _faded(catch_up, form) if isinstance(form, Fading) else _adam_faded(catch_up, form)


class _Missed(NamedTuple):
    """The steps that rows have missed.

    **Fields:** `number`: int32 `[m]`. `log_growth`: the logarithm of what they all make of a value; None where they
    leave it. `growth`: by which part of itself a value grows in the missed step of a number, from 1.
    """

    number: jax.Array
    log_growth: Any
    growth: Callable[[Any], Any]

    def grown(self, values: jax.Array) -> jax.Array:
        """Returns what values become that nothing else moves."""
        return values if self.log_growth is None else values * jnp.exp(self.log_growth)[:, None]

    def total(self, term: Callable[[jax.Array], jax.Array], like: jax.Array, awake: jax.Array, most: int) -> jax.Array:
        """Sums up what is added to values in the missed steps 1, 2, …, which grows with them.

        **Arguments:** `term`: `number -> [..., m]`, shaped as `like`. `awake`: of which rows the sum matters. `most`:
        how many terms matter.
        """
        longest = jnp.minimum(jnp.where(awake, self.number, 0).max(initial=0), most)

        def grows(number: Any) -> Any:
            return 0.0 if self.log_growth is None else jnp.where(number <= self.number, self.growth(number), 0)

        def add(number: jax.Array, sums: Any) -> Any:
            total, passed, growth = sums
            if self.log_growth is not None:
                total, passed = total * (1 + growth), passed + jnp.log1p(growth)
            total = total + jnp.where(number <= self.number, term(number), 0)
            # Carried, since XLA would compute it, with the cosine of a schedule, for each row of the sums again.
            return total, passed, grows(number + 1)

        begun = jnp.zeros_like(like), jnp.zeros(self.number.shape, jnp.float32), grows(1)
        total, passed, _ = jax.lax.fori_loop(1, longest + 1, add, begun)
        return total if self.log_growth is None else total * jnp.exp(self.log_growth - passed)


def _missed(catch_up: CatchUp, grown: Term, rows: Mapping[str, Any], missed: jax.Array, now: Now) -> _Missed:
    if grown.equals(0):
        return _Missed(missed, None, lambda number: 0.0)
    if grown.is_literal:
        return _Missed(missed, missed * math.log1p(grown.value), lambda number: float(grown.value))
    (total, rest), (before, rest_before) = now.grown, rows["grown"]
    return _Missed(missed, (total - before) + (rest - rest_before), _scalar(catch_up, grown, missed, now))


def _scalar(catch_up: CatchUp, scalar: Term, missed: jax.Array, now: Now) -> Callable[[Any], jax.Array]:
    """A scalar term in the missed step of a number, from 1, of each row."""
    if scalar.is_literal:
        return lambda number: jnp.asarray(scalar.value, jnp.float32)
    used = [at for at, one in enumerate(catch_up.scalars) if scalar.reads & one.term.reads]

    def one(*counts: Any) -> Any:
        known = {catch_up.scalars[at].term.number: count for at, count in zip(used, counts, strict=True)}
        return compute([scalar], known)[0].astype(jnp.float32)

    return lambda number: jax.vmap(one)(*(now.scalars[at] - missed + (number - 1) for at in used))


def _faded(catch_up: CatchUp, form: Fading) -> Brought:
    """Sums up the moves of rows all of which fades."""

    def brought(
        values: jax.Array, kept: Any, rows: Mapping[str, Any], missed: jax.Array, now: Now
    ) -> tuple[jax.Array, Any]:
        steps = _missed(catch_up, form.grown, rows, missed, now)
        moved = steps.grown(values)
        for leaf, factor, rate in zip(kept, form.factors, form.rates, strict=True):
            if rate is not None:
                at = _scalar(catch_up, rate, missed, now)
                weight = steps.total(
                    lambda number, factor=factor, at=at: _power(factor, number - 1) * at(number),
                    jnp.zeros(missed.shape, jnp.float32),
                    _any(leaf),
                    num_terms(factor),
                )
                moved = moved + weight[:, None] * leaf
        factors = [_power(factor, missed) for factor in form.factors]
        after = [
            leaf if number == 1 else leaf * factor.reshape(factor.shape + (1,) * (leaf.ndim - 1))
            for leaf, factor, number in zip(kept, factors, form.factors, strict=True)
        ]
        return moved, tuple(after)

    return brought


def _any(leaf: jax.Array) -> jax.Array:
    """Which rows have anything but zeros."""
    return jnp.any(leaf.reshape(leaf.shape[0], -1) != 0, axis=1)


def _adam_faded(catch_up: CatchUp, form: AdamFading) -> Brought:
    at = next(at for at, scalar in enumerate(catch_up.scalars) if scalar.term is form.count)
    nodes = num_nodes(form.b1, form.b2)

    def brought(
        values: jax.Array, kept: Any, rows: Mapping[str, Any], missed: jax.Array, now: Now
    ) -> tuple[jax.Array, Any]:
        mu, nu = kept[form.mu], kept[form.nu]
        steps = _missed(catch_up, form.grown, rows, missed, now)
        adam = _Adam(form, steps, _scalar(catch_up, form.rate, missed, now), nodes)
        awake = _any(mu) & (missed > 0)
        moves = jax.lax.cond(
            jnp.any(awake), lambda: adam.moves(mu, nu, now.scalars[at] - missed, awake), lambda: jnp.zeros_like(mu)
        )
        after = {form.mu: mu * _power(form.b1, missed)[:, None], form.nu: nu * _power(form.b2, missed)[:, None]}
        return steps.grown(values) + moves, (after[0], after[1])

    return brought


class _Adam(NamedTuple):
    """The moves of Adam in steps without a gradient.

    The step `j` after the last gradient moves an element by `mu * weight_j / (sqrt(nu) + floor_j)`, where weight and
    floor depend on the row's step numbers only. As a function of the floor's logarithm `1 / (sqrt(nu) + floor)` is
    smooth, whatever `nu`: interpolated at a few Chebyshev nodes, the sum over all `j` becomes a sum over the nodes.
    """

    form: AdamFading
    missed: _Missed
    rate: Callable[[Any], jax.Array]
    num_nodes: int

    def moves(self, mu: jax.Array, nu: jax.Array, last: jax.Array, awake: jax.Array) -> jax.Array:
        """Sums the moves of all missed steps: `[m, D]`. **Arguments:** `last`: Adam's count in the row's last step."""
        b1 = self.form.b1
        most = num_terms(b1 / math.sqrt(self.form.b2))
        low = self._log_floor(last, 1)
        high = self._log_floor(last, jnp.clip(self.missed.number, 1, most))
        middle, half = (low + high) / 2, jnp.maximum((high - low) / 2, 1e-6)
        first = _power(b1, last)

        def term(number: jax.Array) -> jax.Array:
            fade = _power(b1, number)
            log_floor = self._log_floor(last, number)
            weight = self.rate(number) * fade / (1 - first * fade) * jnp.exp(log_floor - math.log(self.form.eps))
            place = jnp.clip((log_floor - middle) / half, -1, 1)
            values = [jnp.ones_like(place), place]
            for _ in range(2, self.num_nodes):
                values.append(2 * place * values[-1] - values[-2])
            return weight * jnp.stack(values[: self.num_nodes])

        sums = self.missed.total(term, jnp.zeros((self.num_nodes, *last.shape), mu.dtype), awake, most)
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


def _power(factor: float, number: jax.Array) -> jax.Array:
    """`factor ** number`, also of many steps; 0 ** 0 is 1."""
    if factor == 0:
        return jnp.where(number == 0, 1.0, 0.0)
    if factor == 1:
        return jnp.ones(jnp.shape(number))
    return jnp.exp(number * math.log(factor))
