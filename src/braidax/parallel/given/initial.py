"""What a run begins with: parameters and variables, traced from one key."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from braidax.errors import ArgumentError
from braidax.program import Program, named_leaves, trace

from .arrays import strong
from .loss import Loss


class Born(NamedTuple):
    """What `init` makes, and the key of the state."""

    params: Any
    variables: Any
    key: Any


def trace_init(init: Callable[..., Any], loss: Loss, key: jax.ShapeDtypeStruct | None = None) -> Program:
    """Traces `key -> Born`.

    **Arguments:** `init`: `init(key) -> params`, or `(params, variables)` when the loss asks for `variables`.
    `key`: spec of it; by default of the PRNG that JAX is configured for.

    **Returns:** the program. **Raises:** `ArgumentError` naming a leaf that cannot be trained.
    """

    def make(key: Any) -> Born:
        init_key, state_key = jax.random.split(key)
        made = init(init_key)
        variables: Any = {}
        if "variables" in loss.asks:
            if not isinstance(made, tuple) or len(made) != 2:  # pyright: ignore[reportUnknownArgumentType]
                raise ArgumentError(
                    f"init returned {type(made).__name__}, expected (params, variables), because loss_fn {loss.name} "
                    f"asks for `variables`"
                )
            made, variables = made
        _check_leaves(made, variables)
        return Born(strong(made), strong(variables), state_key)

    return trace(make, jax.eval_shape(lambda: jax.random.key(0)) if key is None else key)


def _check_leaves(params: Any, variables: Any) -> None:
    for path, leaf in [*named_leaves(params, "params"), *named_leaves(variables, "variables")]:
        if not isinstance(leaf, float | int | complex) and not hasattr(leaf, "dtype"):
            raise ArgumentError(
                f"{path} is {leaf!r}, expected an array: keep what is not an array out of what init returns (equinox: "
                f"params, static = eqx.partition(model, eqx.is_inexact_array), and eqx.combine in the loss)"
            )


def traced_loss(loss: Loss, born: Born, batch: Any, microbatches: int, mesh: Mesh | None = None) -> Program:
    """Traces a loss for training on one microbatch.

    **Arguments:** `born`, `batch`: PyTrees of specs. `mesh`: as of `Loss.trace`.
    """
    micro = jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct((spec.shape[0] // microbatches, *spec.shape[1:]), spec.dtype), batch
    )
    return loss.trace(born.params, born.variables, born.key, micro, train=True, mesh=mesh)
