"""The gradient of one weight, made and scattered piece by piece, so that a piece crosses while the next one is made.

The weight that is used last is the first whose gradient can be made, and the last that must be. Made in pieces it is
work under which the gradients of the first layers cross, and only its own last piece waits for the wire.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from braidax.program import Equation, Site, aval_of, dims_of_value

_MOST = 8
_LEAST_BYTES = 2**22  # a smaller piece is not worth a message of its own


class Pieces(NamedTuple):
    """How a gradient is cut. **Fields:** `dim` of the weight, `back_dim` of what comes back; `bounds` along them."""

    dim: int
    back_dim: int
    bounds: tuple[int, ...]

    def scattered(
        self, part: Callable[..., Any], scatter: Callable[[Any], Any], operand: Any, back: Any, full: Any
    ) -> Any:
        """Returns the shard of a gradient.

        **Arguments:** `part`: `(operand, back, full)` to all parts of a gradient; `scatter`: of these.
        """
        sums: list[Any] = []
        for start, stop in zip(self.bounds[:-1], self.bounds[1:], strict=True):
            of_back = jax.lax.slice_in_dim(back, start, stop, axis=self.back_dim)
            parts = part(operand, of_back, jax.lax.slice_in_dim(full, start, stop, axis=self.dim))
            if sums:  # one behind the other: those that could go together would be made one
                parts, sums[-1] = jax.lax.optimization_barrier((parts, sums[-1]))
            sums.append(scatter(parts))
        return jnp.concatenate(sums, axis=self.dim)


def pieces_of(site: Site, equation: Equation, split: tuple[tuple[str, ...], ...]) -> Pieces | None:
    """Returns how the gradient of a site's weight is cut: along the one dim that its product keeps, if it is whole.

    None where the product is in a loop or has no such dim, or the weight is too small.

    **Arguments:** `split`: the axes that split each dim of the entry's value.
    """
    dims, value = dims_of_value(site.value), site.value
    if site.role != "product" or dims is None or value.entry.level or value.in_loop:
        return None
    contracted, batched = equation.params["dimension_numbers"]
    kept = [at for at in range(len(dims)) if at not in contracted[site.operand] and at not in batched[site.operand]]
    if len(kept) != 1 or any(batched):
        return None
    aval = aval_of(equation.invars[site.operand])
    dim, size = value.entry.dims.index(dims[kept[0]]), aval.shape[kept[0]]
    count = min(_MOST, aval.size * np.dtype(aval.dtype).itemsize // _LEAST_BYTES, size)
    if count < 2 or split[dim]:
        return None
    back_dim = 0 if site.operand == 0 else aval_of(equation.outvars[0]).ndim - 1
    return Pieces(dim, back_dim, tuple(size * at // count for at in range(count + 1)))
