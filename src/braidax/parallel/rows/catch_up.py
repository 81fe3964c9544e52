"""Momentum and Adam that equal the dense ones, with the steps that a row has missed taken in one.

Without a gradient, moments decay by known factors, so the moves that a dense optimizer would have made are a sum of
known terms. It is cut off where what follows is lost in float32.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from braidax.errors import ArgumentError

from .optimizers import RowOptimizer, RowState, row_optimizer

LearningRate = float | Callable[[Any], Any]
NEGLIGIBLE = 1e-9  # of a sum; float32 has 6e-8
MAX_NODES = 48


class MomentumRows(NamedTuple):
    """Rows of `momentum`: `trace [R, N, ...]`, and `last [R, N]`, the number of steps that a row has seen."""

    trace: jax.Array
    last: jax.Array


class AdamRows(NamedTuple):
    """Rows of `adam`: `mu`, `nu [R, N, ...]`, and `last [R, N]`, the number of steps that a row has seen."""

    mu: jax.Array
    nu: jax.Array
    last: jax.Array


def momentum(learning_rate: LearningRate, decay: float = 0.9, *, nesterov: bool = False) -> RowOptimizer:
    """Makes a row optimizer that equals `optax.sgd(learning_rate, decay, nesterov)` on the whole table.

    **Arguments:** `learning_rate`: a number, or a schedule. `decay`: of the trace, in [0, 1). `nesterov`: as in optax.
    """
    _check_decays(decay=decay)
    rounded, rate = float(np.float32(decay)), _schedule(learning_rate)
    num_terms = _num_terms(rounded)

    def init(table: jax.Array) -> RowState:
        return RowState(MomentumRows(jnp.zeros_like(table), _never(table)), jnp.zeros((), jnp.int32))

    def settle(values: jax.Array, rows: MomentumRows, step: jax.Array) -> tuple[jax.Array, MomentumRows]:
        missed = _missed(rows.last, step)

        def term(number: jax.Array, total: jax.Array) -> jax.Array:
            return total + _power(rounded, number) * rate(rows.last + number - 1) * (number <= missed)

        total = _sum_terms(term, jnp.zeros(missed.shape, values.dtype), missed, num_terms)
        moved = values - (total * (rounded if nesterov else 1.0))[:, None] * rows.trace
        trace = rows.trace * _power(rounded, missed)[:, None]
        return moved, MomentumRows(trace, jnp.maximum(rows.last, step))

    def update(gradients: jax.Array, values: jax.Array, rows: MomentumRows, step: jax.Array) -> Any:
        settled, rows = settle(values, rows, step)
        trace = gradients + decay * rows.trace
        direction = gradients + decay * trace if nesterov else trace
        return settled - rate(step) * direction - values, MomentumRows(trace, rows.last + 1), step + 1

    def going_on(arrays: tuple[jax.Array, ...], scalars: tuple[jax.Array, ...]) -> RowState:
        step = scalars[0] if scalars else jnp.zeros((), jnp.int32)  # a constant rate needs no count
        return RowState(MomentumRows(arrays[0], _seen(arrays[0], step)), step)

    return RowOptimizer(init, update, settle, going_on)


def adam(
    learning_rate: LearningRate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    *,
    eps_root: float = 0.0,
    weight_decay: float = 0.0,
) -> RowOptimizer:
    """Makes a row optimizer that equals `optax.adam`, or `optax.adamw` with a weight decay, on the whole table.

    **Arguments:** as optax has them. With an `eps_root`, or with decays for which missed moves do not fade soon, the
    missed steps are taken one by one, as by `row_optimizer`.
    """
    _check_decays(b1=b1, b2=b2)
    nodes = _num_nodes(b1, b2)
    if eps_root or not eps > 0 or nodes > MAX_NODES or (weight_decay and callable(learning_rate)):
        options: dict[str, Any] = {"b1": b1, "b2": b2, "eps": eps, "eps_root": eps_root}
        if weight_decay:
            return row_optimizer(optax.adamw(learning_rate, weight_decay=weight_decay, **options))
        return row_optimizer(optax.adam(learning_rate, **options))
    first, second, rate = float(np.float32(b1)), float(np.float32(b2)), _schedule(learning_rate)
    kept = 1.0 if callable(learning_rate) else 1.0 - learning_rate * weight_decay
    if not 0 < kept <= 1:
        raise ArgumentError(
            f"learning_rate={learning_rate} with weight_decay={weight_decay} shrinks a row to {kept} of itself each "
            f"step: expected more than 0 and at most 1"
        )
    missing = _Missing(first, second, eps, rate, kept, nodes)

    def init(table: jax.Array) -> RowState:
        return RowState(AdamRows(jnp.zeros_like(table), jnp.zeros_like(table), _never(table)), jnp.zeros((), jnp.int32))

    def settle(values: jax.Array, rows: AdamRows, step: jax.Array) -> tuple[jax.Array, AdamRows]:
        missed = _missed(rows.last, step)
        moved = values * _power(kept, missed)[:, None] - missing.moves(rows, missed)
        mu, nu = rows.mu * _power(first, missed)[:, None], rows.nu * _power(second, missed)[:, None]
        return moved, AdamRows(mu, nu, jnp.maximum(rows.last, step))

    def update(gradients: jax.Array, values: jax.Array, rows: AdamRows, step: jax.Array) -> Any:
        settled, rows = settle(values, rows, step)
        mu, nu = (1 - b1) * gradients + b1 * rows.mu, (1 - b2) * jnp.square(gradients) + b2 * rows.nu
        count = step + 1
        direction = (mu / (1 - b1**count)) / (jnp.sqrt(nu / (1 - b2**count)) + eps)
        moves = settled - rate(step) * (direction + weight_decay * settled) - values
        return moves, AdamRows(mu, nu, rows.last + 1), step + 1

    def going_on(arrays: tuple[jax.Array, ...], scalars: tuple[jax.Array, ...]) -> RowState:
        mu, nu = arrays
        return RowState(AdamRows(mu, nu, _seen(mu, scalars[0])), scalars[0])

    return RowOptimizer(init, update, settle, going_on)


class _Missing(NamedTuple):
    """The moves of Adam in steps without a gradient.

    The step `j` after the last gradient moves an element by `mu * weight_j / (sqrt(nu) + floor_j)`, where weight and
    floor depend on the row's step numbers only. As a function of the floor's logarithm `1 / (sqrt(nu) + floor)` is
    smooth, whatever `nu`: interpolated at a few Chebyshev nodes, the sum over all `j` becomes a sum over the nodes.
    """

    b1: float
    b2: float
    eps: float
    rate: Callable[[Any], jax.Array]
    kept: float
    num_nodes: int

    def moves(self, rows: AdamRows, missed: jax.Array) -> jax.Array:
        """Sums the moves of all missed steps: `[m, D]`, to be subtracted."""
        num_terms = _num_terms(self.b1 / math.sqrt(self.b2))
        low = self._log_floor(rows.last, 1)
        high = self._log_floor(rows.last, jnp.clip(missed, 1, num_terms))
        middle, half = (low + high) / 2, jnp.maximum((high - low) / 2, 1e-6)
        first = _power(self.b1, rows.last)

        def term(number: jax.Array, sums: jax.Array) -> jax.Array:
            fade = _power(self.b1, number)
            log_floor = self._log_floor(rows.last, number)
            weight = self.rate(rows.last + number - 1) * fade / (1 - first * fade)
            weight = jnp.where(number <= missed, weight * jnp.exp(log_floor - math.log(self.eps)), 0)
            if self.kept != 1:
                weight = weight * _power(self.kept, jnp.maximum(missed - number, 0))
            place = jnp.clip((log_floor - middle) / half, -1, 1)
            values = [jnp.ones_like(place), place]
            for _ in range(2, self.num_nodes):
                values.append(2 * place * values[-1] - values[-2])
            return sums + weight * jnp.stack(values[: self.num_nodes])

        start = jnp.zeros((self.num_nodes, *missed.shape), rows.mu.dtype)
        sums = _sum_terms(term, start, missed, num_terms)
        nodes, matrix = _chebyshev(self.num_nodes)
        weights = jnp.matmul(jnp.asarray(matrix, sums.dtype), sums, precision="highest")
        root, total = jnp.sqrt(rows.nu), jnp.zeros_like(rows.mu)
        for node, weight in zip(nodes.tolist(), weights, strict=True):
            total = total + weight[:, None] / (root + jnp.exp(middle + half * node)[:, None])
        return rows.mu * total

    def _log_floor(self, last: jax.Array, number: jax.Array | int) -> jax.Array:
        correction = -jnp.expm1((last + number) * math.log(self.b2))
        return math.log(self.eps) + jnp.log(correction) / 2 - number * (math.log(self.b2) / 2)


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
    return jnp.exp(number * math.log(factor))


def _missed(last: jax.Array, step: jax.Array) -> jax.Array:
    return jnp.maximum(step - last, 0)  # rows beyond the table, read as filler, have missed nothing


def _never(table: jax.Array) -> jax.Array:
    return jnp.zeros(table.shape[:2], jnp.int32)


def _seen(table: jax.Array, step: jax.Array) -> jax.Array:
    return jnp.full(table.shape[:2], step, jnp.int32)


def _schedule(learning_rate: LearningRate) -> Callable[[Any], jax.Array]:
    if callable(learning_rate):
        return lambda count: jnp.asarray(learning_rate(count))
    return lambda count: jnp.asarray(learning_rate, jnp.float32)


def _check_decays(**decays: float) -> None:
    for name, value in decays.items():
        if not 0 <= value < 1:
            raise ArgumentError(f"{name}={value} does not decay: expected a number in [0, 1)")
