"""Clipping by the global norm where some gradients are rows."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax


def clip_scale(dense: Any, squared_norms: Sequence[jax.Array], *, max_norm: float) -> tuple[jax.Array, jax.Array]:
    """Computes what all gradients are multiplied by, so that their global norm is at most `max_norm`.

    **Arguments:** `dense`: PyTree of the gradients that are not rows. `squared_norms`: of each group of tables, from
    `squared_norm`. `max_norm`: as in `optax.clip_by_global_norm`, which this equals.

    **Returns:** the factor and the norm before clipping, scalars.
    """
    norm = jnp.sqrt(jnp.square(optax.tree.norm(dense)) + sum(squared_norms))
    return jnp.where(norm < max_norm, 1.0, max_norm / norm), norm
