"""The gradient of the weight that is used last, made and sent piece by piece behind all others.

It is the first gradient that can be made, and the last that must be. In pieces it is work under which the gradients of
the first layers cross, and a piece crosses while the next one is made: only the last waits for the wire. What other
uses of the weight leave is added to the pieces, and crosses with them. A compiler that keeps to no order cuts out all
pieces at once, for which there would have to be room: fully sharded, it makes the gradient in one.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from braidax.program import aval_of, dims_of_value

from .weights import Covered

_MOST = 8
_FEWEST = 4
_BEHIND = 2  # pieces that are made when all other gradients are there
_BEHIND_REST = 1  # the same, where all pieces wait for what other uses leave
_LEAST_BYTES = 2**23  # a smaller piece is not worth a message of its own


class PutOff(NamedTuple):
    """What a program takes whose last gradient is put off.

    **Fields:** `leaves`. `known`: what the product takes for its parts: nothing, whose gradients are what it knows.
    `rest`: what other uses of the weight take for theirs.
    """

    leaves: list[Any]
    known: tuple[Any, Any]
    rest: Any


@dataclass(frozen=True)
class Pieces:
    """How the gradient of a product's weight is cut.

    **Fields:** `dim` of the weight, `back_dim` of what comes back, and the `bounds` along them.
    """

    product: Covered
    dim: int
    back_dim: int
    bounds: tuple[int, ...]

    def put_off(self, leaves: Sequence[Any], weights: Collection[int]) -> PutOff:
        """Returns what a program takes in place of leaves. **Arguments:** `weights`: which of the leaves are."""
        at = [*weights].index(self.product.site.value.entry.leaf)

        @jax.custom_vjp
        def put_off(*values: Any) -> Any:
            other, result = (
                self.product.equation.invars[1 - self.product.site.operand],
                self.product.equation.outvars[0],
            )
            known = tuple(jnp.zeros(one.shape, one.dtype) for one in map(aval_of, (other, result)))
            return values, known, self.product.weight.no_parts(self._dtype)

        def forward(*given: Any) -> Any:
            values = [one.value for one in given]
            return put_off(*values), (tuple(one.perturbed for one in given), values[at])

        def backward(kept: Any, backs: Any) -> Any:
            (moving, value), (others, known, rest) = kept, backs
            is_used, has_rest = (not isinstance(one, SymbolicZero) for one in (known[0], rest))
            if not moving[at] or not (is_used or has_rest):
                return tuple(others)
            there = [i for i, one in enumerate(others) if moving[i] and not isinstance(one, SymbolicZero)]
            found, of_others = [*others], [others[i] for i in there]
            if is_used:
                total, of_others = self._summed(known, rest if has_rest else None, of_others)
            else:
                total = self.product.weight.scatter(rest)
            for i, one in zip(there, of_others, strict=True):
                found[i] = one
            (mine,) = jax.vjp(self.product.weight.shard, value)[1](total)
            found[at] = found[at] + mine if at in there else mine
            return tuple(found)

        put_off.defvjp(forward, backward, symbolic_zeros=True)
        values, known, rest = put_off(*(leaves[leaf] for leaf in weights))
        changed = dict(zip(weights, values, strict=True))
        return PutOff([changed.get(number, leaf) for number, leaf in enumerate(leaves)], known, rest)

    def _summed(self, known: Any, rest: Any, others: Any) -> tuple[Any, Any]:
        """Returns the shard of the gradient; and the other gradients, which are there before its last pieces are."""
        sums, behind = list[Any](), _BEHIND if rest is None else _BEHIND_REST
        for number, (start, stop) in enumerate(zip(self.bounds[:-1], self.bounds[1:], strict=True)):
            if number == len(self.bounds) - 1 - behind:
                known, others = jax.lax.optimization_barrier((known, others))
            operand, back = known
            sizes = [stop - start if dim == self.dim else size for dim, size in enumerate(self.product.weight.sizes)]
            of_back = jax.lax.slice_in_dim(back, start, stop, axis=self.back_dim)
            parts = self.product.parts(operand, of_back, jnp.zeros(sizes, self._dtype))
            if rest is not None:  # it is made late: the next product waits for it, and is left to cross under
                parts += jax.lax.slice_in_dim(rest, start, stop, axis=self.dim + 1)
                parts, known = jax.lax.optimization_barrier((parts, known))
            if sums:  # one behind the other: those that could go together would be made one
                parts, sums[-1] = jax.lax.optimization_barrier((parts, sums[-1]))
            sums.append(self.product.weight.scatter(parts))
        return jnp.concatenate(sums, axis=self.dim), others

    @property
    def _dtype(self) -> Any:
        return aval_of(self.product.equation.invars[self.product.site.operand]).dtype


def may_be_cut(weight: Any) -> bool:
    """Whether a weight is large enough for pieces. **Arguments:** `weight`: its spec."""
    return _most_pieces(weight) >= _FEWEST


def _most_pieces(weight: Any) -> int:
    return min(_MOST, weight.size * np.dtype(weight.dtype).itemsize // _LEAST_BYTES)


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
    count = min(_most_pieces(weight), weight.shape[kept[0]])
    if count < _FEWEST or product.weight.dims[dim]:
        return None
    back_dim = 0 if site.operand == 0 else aval_of(equation.outvars[0]).ndim - 1
    return Pieces(product, dim, back_dim, tuple(weight.shape[kept[0]] * at // count for at in range(count + 1)))
