"""The gradient of the weight that is used last, made and scattered piece by piece behind all others.

It is the first gradient that can be made, and the last that must be. In pieces it is work under which the gradients of
the first layers cross, and a piece crosses while the next one is made: only the last waits for the wire. A compiler
that keeps to no order cuts out all pieces at once, for which there would have to be room: it makes the gradient in one.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from braidax.program import aval_of, dims_of_value

from .weights import Covered

_MOST = 8
_FEWEST = 4
_BEHIND = 2  # pieces that are made when all other gradients are there
_LEAST_BYTES = 2**24  # a smaller piece is not worth a message of its own


@dataclass(frozen=True)
class Pieces:
    """How the gradient of a product's weight is cut.

    **Fields:** `dim` of the weight, `back_dim` of what comes back, and the `bounds` along them.
    """

    product: Covered
    dim: int
    back_dim: int
    bounds: tuple[int, ...]

    def put_off(self, leaves: Sequence[Any], weights: Collection[int]) -> tuple[list[Any], tuple[Any, Any]]:
        """Returns leaves, and what the product takes for its parts: nothing, whose gradients are what it knows.

        **Arguments:** `weights`: which of the leaves are.
        """
        at = [*weights].index(self.product.site.value.entry.leaf)

        @jax.custom_vjp
        def put_off(*values: Any) -> Any:
            other, result = (
                self.product.equation.invars[1 - self.product.site.operand],
                self.product.equation.outvars[0],
            )
            known = [aval_of(one) for one in (other, result)]
            return values, tuple(jnp.zeros(one.shape, one.dtype) for one in known)

        def forward(*given: Any) -> Any:
            values = [one.value for one in given]
            return put_off(*values), (tuple(one.perturbed for one in given), values[at])

        def backward(kept: Any, backs: Any) -> Any:
            (moving, value), (others, known) = kept, backs
            if not moving[at] or any(isinstance(one, SymbolicZero) for one in known):
                return tuple(others)
            there = [i for i, one in enumerate(others) if moving[i] and not isinstance(one, SymbolicZero)]
            shard, gradients = self._scattered(known, [others[i] for i in there])
            found = [*others]
            for i, one in zip(there, gradients, strict=True):
                found[i] = one
            (mine,) = jax.vjp(self.product.weight.shard, value)[1](shard)
            found[at] = found[at] + mine if at in there else mine
            return tuple(found)

        put_off.defvjp(forward, backward, symbolic_zeros=True)
        values, known = put_off(*(leaves[leaf] for leaf in weights))
        changed = dict(zip(weights, values, strict=True))
        return [changed.get(number, leaf) for number, leaf in enumerate(leaves)], known

    def _scattered(self, known: Any, others: Any) -> tuple[Any, Any]:
        """Returns the shard of the gradient; and the other gradients, which are there before its last pieces are."""
        weight, sums, count = self.product.weight, list[Any](), len(self.bounds) - 1
        for number, (start, stop) in enumerate(zip(self.bounds[:-1], self.bounds[1:], strict=True)):
            if number == count - _BEHIND:
                known, others = jax.lax.optimization_barrier((known, others))
            operand, back = known
            sizes = [stop - start if dim == self.dim else size for dim, size in enumerate(weight.sizes)]
            of_back = jax.lax.slice_in_dim(back, start, stop, axis=self.back_dim)
            parts = self.product.parts(operand, of_back, jnp.zeros(sizes, self._dtype))
            if sums:  # one behind the other: those that could go together would be made one
                parts, sums[-1] = jax.lax.optimization_barrier((parts, sums[-1]))
            sums.append(weight.scatter(parts))
        return jnp.concatenate(sums, axis=self.dim), others

    @property
    def _dtype(self) -> Any:
        return aval_of(self.product.equation.invars[self.product.site.operand]).dtype


def pieces_of(product: Covered) -> Pieces | None:
    """Returns how the gradient of a product's weight is cut: along the one dim that the product keeps, if it is whole.

    None where the product is in a loop or has no such dim, or the weight is too small.
    """
    site, equation = product.site, product.equation
    dims, value = dims_of_value(site.value), site.value
    if site.role != "product" or dims is None or value.entry.level or value.in_loop:
        return None
    contracted, batched = (numbers[site.operand] for numbers in equation.params["dimension_numbers"])
    kept = [at for at in range(len(dims)) if at not in contracted]
    if len(kept) != 1 or batched:
        return None
    dim, weight = value.entry.dims.index(dims[kept[0]]), aval_of(equation.invars[site.operand])
    count = min(_MOST, weight.size * np.dtype(weight.dtype).itemsize // _LEAST_BYTES, weight.shape[kept[0]])
    if count < _FEWEST or product.weight.dims[dim]:
        return None
    back_dim = 0 if site.operand == 0 else aval_of(equation.outvars[0]).ndim - 1
    return Pieces(product, dim, back_dim, tuple(weight.shape[kept[0]] * at // count for at in range(count + 1)))
