"""Reading by indices what is in parts: each part gives what it has, and nothing for the others."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from .bodies import bind


def read_part(equation: JaxprEqn, part: Any, ids: Any, bounds: tuple[Any, Any, Any], size: int) -> Any:
    """Reads from one part of an operand what its indices find in it; results of all parts add up to that of the whole.

    **Arguments:** `equation`: a gather by one index, with the sizes of slices that the part has. `ids`: its indices,
    `[..., 1]`. `bounds`: along the dim that is read, of `size` in all: where the part begins, the first element of it
    that is read, and its end; int32.

    **Raises:** `TypeError` where what is out of range is filled with numbers that are no floats.
    """
    numbers, mode = equation.params["dimension_numbers"], equation.params["mode"]
    if mode is jax.lax.GatherScatterMode.CLIP:
        ids = jnp.clip(ids, 0, size - 1)
    start, first, end = bounds
    known, local = (ids >= 0) & (ids < size), ids - jnp.asarray(start, ids.dtype)
    here = known & (ids >= first) & (ids < end)
    params = dict(equation.params, mode=jax.lax.GatherScatterMode.CLIP, fill_value=None)
    (found,) = bind(equation.replace(params=params), [part, jnp.clip(local, 0, end - start - 1)])
    spread = [dim for dim in range(found.ndim) if dim not in numbers.offset_dims]

    def along(mask: Any) -> Any:
        return jax.lax.broadcast_in_dim(mask.squeeze(-1), found.shape, spread)

    result = jnp.where(along(here), found, jnp.zeros_like(found))
    if mode is jax.lax.GatherScatterMode.FILL_OR_DROP:
        if not jnp.issubdtype(found.dtype, jnp.inexact):
            raise TypeError("fills what is out of range with numbers that are no floats")
        fill = equation.params["fill_value"]
        lost = jnp.asarray(jnp.nan if fill is None else fill, found.dtype)
        result = jnp.where(along(~known & (first == 0)), lost, result)
    return result
