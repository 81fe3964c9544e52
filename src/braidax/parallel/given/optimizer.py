"""The user's optimizer, called as single-device training calls it."""

from typing import Any

import jax
import optax

from braidax.errors import ArgumentError

from .arrays import strong


def moves_of(
    optimizer: optax.GradientTransformation, gradients: Any, state: Any, params: Any, loss: jax.Array
) -> tuple[Any, Any]:
    """Returns what an optimizer adds to parameters, and its next state, with strong types.

    One that takes extra arguments (`optax.GradientTransformationExtraArgs`, which all of optax' chains are) is given
    `value`, the loss of the batch, and `grad`, its gradients.

    **Raises:** `ArgumentError` when it asks for more.
    """
    more = {"value": loss, "grad": gradients} if isinstance(optimizer, optax.GradientTransformationExtraArgs) else {}
    try:
        moves, state = optimizer.update(gradients, state, params, **more)
    except TypeError as error:
        if "missing" not in str(error) or "argument" not in str(error):
            raise
        raise ArgumentError(
            f"optimizer asks for more than a step has, which is the loss (value) and its gradients (grad): {error}; "
            f"choose one without it (no line search), or decorate a whole train step, which calls the optimizer itself"
        ) from error
    return moves, strong(state)


def applied(
    optimizer: optax.GradientTransformation, params: Any, opt_state: Any, gradients: Any, loss: jax.Array
) -> tuple[Any, Any]:
    """Returns the next parameters and optimizer state, with strong types."""
    moves, opt_state = moves_of(optimizer, gradients, opt_state, params, loss)
    return strong(optax.apply_updates(params, moves)), opt_state
