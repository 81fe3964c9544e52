"""`value_and_grad`: JAX's own, with an outcome that a decorated training step can be cut at."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import jax

from braidax.program import mark_gradient


def value_and_grad(
    fun: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False, **options: Any
) -> Callable[..., tuple[Any, Any]]:
    """Makes a function that computes value and gradient, exactly as `jax.value_and_grad` does.

    Inside a step decorated with `parallelize` it also says where the gradients are, so that the step is cut there;
    anywhere else it is JAX's own.

    **Arguments:** as `jax.value_and_grad`; `options` are its remaining keywords.

    **Returns:** a function with the arguments of `fun` that returns `(value, gradients)`.
    """
    inner = jax.value_and_grad(fun, argnums, has_aux, **options)

    @wraps(fun)
    def value_and_gradient(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        value, gradients = inner(*args, **kwargs)
        return mark_gradient(value), mark_gradient(gradients)

    return value_and_gradient
