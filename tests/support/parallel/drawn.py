"""First parameters, all from one draw: of several each would be compiled, which takes longer than it runs."""

import math
from collections.abc import Sequence

import jax
import numpy as np


def drawn(key: jax.Array, *shapes: Sequence[int]) -> list[jax.Array]:
    """Returns arrays of the standard normal distribution, one a shape."""
    ends = np.cumsum([math.prod(shape) for shape in shapes]).tolist()
    flat = jax.random.normal(key, (ends[-1],))
    return [
        flat[end - math.prod(shape) : end].reshape(shape) for end, shape in zip(ends, map(tuple, shapes), strict=True)
    ]
