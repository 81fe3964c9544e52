"""Optax' Adam and momentum are recognized by what they do, so that rows that lag behind are brought up in one move."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from braidax.errors import ArgumentError

from .catch_up import adam, momentum
from .optimizers import RowOptimizer

_COUNTS = (0, 1, 7, 100, 10_000)  # at which a learning rate that is the same counts as constant
_NUM_STEPS = 5
_TOLERANCE = 2e-5
_PASSIVE = (optax.EmptyState, optax.ScaleByScheduleState)
_KNOWN = (*_PASSIVE, optax.ScaleByAdamState, optax.TraceState)


def recognized(optimizer: optax.GradientTransformation) -> RowOptimizer | None:
    """Returns this package's own form of an optax optimizer, or None where it has none.

    An optimizer with the state of `optax.adam`, `adamw` or `sgd` with momentum is given numbers from which its factors
    can be read off; then both are compared on others. Learning rates may be schedules.
    """
    with jax.ensure_compile_time_eval():
        try:
            form = optimizer.init(jnp.zeros(1))
            moving = [part for part in _parts(form) if not isinstance(part, _PASSIVE)]
            if len(moving) != 1 or not all(isinstance(part, _KNOWN) for part in _parts(form)):
                return None
            probe = _Probe(optimizer, form)
            found = _adam(probe) if isinstance(moving[0], optax.ScaleByAdamState) else _momentum(probe)
        except (ArgumentError, ArithmeticError):
            return None
        return found if _agree(optimizer, found) else None


class _Probe:
    """Takes one step of an optimizer from a state made up for one element."""

    def __init__(self, optimizer: optax.GradientTransformation, form: Any) -> None:
        self._optimizer, self._form = optimizer, form

    def __call__(self, count: Any, *moments: float, gradient: float = 0.0, value: float = 0.0) -> tuple[Any, list[Any]]:
        """Returns the move and the new moments. **Arguments:** `moments`: `mu, nu`, or the trace."""
        held = iter(moments)
        leaves = [
            jnp.full(1, next(held)) if leaf.shape else jnp.asarray(count, leaf.dtype)
            for leaf in jax.tree.leaves(self._form)
        ]
        state = jax.tree.unflatten(jax.tree.structure(self._form), leaves)
        moves, state = self._optimizer.update(jnp.full(1, gradient), state, jnp.full(1, value))
        return jnp.asarray(moves)[0], [leaf[0] for leaf in jax.tree.leaves(state) if leaf.shape]

    def rate(self, move: Callable[[Any], Any]) -> float | Callable[[Any], Any]:
        """Returns a learning rate: a number, or a schedule where it changes. **Arguments:** `move`: count -> rate."""
        seen = [float(move(count)) for count in _COUNTS]
        if np.ptp(seen) <= _TOLERANCE * max(np.abs(seen)):
            return seen[0]
        return lambda count: jax.vmap(move)(jnp.ravel(count)).reshape(jnp.shape(count))


def _adam(probe: _Probe) -> RowOptimizer:
    b1, b2 = (1 - float(moment) for moment in probe(0, 0.0, 0.0, gradient=1.0)[1])

    def direction(count: Any) -> tuple[Any, Any]:
        count = jnp.asarray(count, jnp.int32) + 1  # rounded as optax rounds
        return b1 / (1 - b1**count), jnp.sqrt(b2 / (1 - b2**count))

    def move(count: Any) -> Any:
        return -probe(count, 1.0, 1.0)[0]

    # One move is divided by the root and eps, the other by eps alone.
    at = _moving(move)
    first, root = (float(value) for value in direction(at))
    small = -float(probe(at, 1.0, 0.0)[0])
    eps = root / (small / float(move(at)) - 1)
    rate = small * eps / first
    decay = -float(probe(at, 0.0, 1.0, value=1.0)[0]) / rate

    def rate_at(count: Any) -> Any:
        moment, root = direction(count)
        return move(count) * (root + eps) / moment

    learning_rate = probe.rate(rate_at)
    return adam(learning_rate, b1, b2, eps, weight_decay=decay)


def _momentum(probe: _Probe) -> RowOptimizer:
    at = _moving(lambda count: probe(count, 1.0)[0])
    decay = float(probe(at, 1.0)[1][0])
    with_gradient = float(probe(at, 0.0, gradient=1.0)[0])
    kept = float(probe(at, 1.0)[0]) / with_gradient  # decay, and squared and over 1 + decay with Nesterov's
    nesterov = abs(kept - decay) > abs(kept - decay**2 / (1 + decay))
    scale = 1 + decay if nesterov else 1.0
    return momentum(probe.rate(lambda count: -probe(count, 0.0, gradient=1.0)[0] / scale), decay, nesterov=nesterov)


def _moving(move: Callable[[Any], Any]) -> int:
    """Returns the first of some counts at which the learning rate is not 0, as it is where it warms up."""
    return next((count for count in _COUNTS if float(move(count))), 0)


def _agree(optimizer: optax.GradientTransformation, rows: RowOptimizer) -> bool:
    """Whether both do the same to elements with gradients of all sizes, which tells a limit to them, and with none."""
    table = jnp.array([0.5, -1.5, 2.0, -0.3, 0.7])[:, None, None]
    scales = jnp.array([1e-6, 1e-3, 1.0, 1e3, 1e6])[:, None, None]
    values, state = table, optimizer.init(table)
    ours, held = table[:, 0], rows.init(table)
    kept, shared = jax.tree.map(lambda leaf: leaf[:, 0], held.rows), held.shared
    for number in range(_NUM_STEPS):
        gradients = jnp.cos(3.0 * number + table) * scales * (number % 2 == 0)
        moves, state = optimizer.update(gradients, state, values)
        values = values + jnp.asarray(moves)
        added, kept, shared = rows.update(gradients[:, 0], ours, kept, shared)
        ours = ours + added
    moved = np.abs(np.asarray(values - table))[:, 0]
    rounded = _NUM_STEPS * np.finfo(np.float32).eps * np.abs(np.asarray(table))[:, 0]  # values are, at each step
    return bool((np.abs(np.asarray(values[:, 0] - ours)) <= _TOLERANCE * moved + rounded).all())


def _parts(state: Any) -> list[Any]:
    """Returns the states that an optimizer's state is a chain of."""
    return jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, _KNOWN))
