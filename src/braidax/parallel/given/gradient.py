"""`value_and_grad`: JAX's own, but inside a decorated training step, which keeps what is differentiated."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from braidax.program import kept_value_and_grad


def value_and_grad(
    fun: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False, **options: Any
) -> Callable[..., tuple[Any, Any]]:
    """Makes a function that computes value and gradient, exactly as `jax.value_and_grad` does.

    A step decorated with `parallelize` is cut where it takes gradients by this, and what is differentiated is changed
    as the placements of weights ask for; anywhere else it is JAX's own.

    **Arguments:** as `jax.value_and_grad`; `options` are its remaining keywords.

    **Returns:** a function with the arguments of `fun` that returns `(value, gradients)`.
    """
    return wraps(fun)(kept_value_and_grad(fun, argnums, has_aux, **options))
