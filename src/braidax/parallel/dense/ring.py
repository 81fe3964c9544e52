"""A ring: each device computes its own samples with one part of some weights after another, as these go around.

A device begins with the part that is at home and hands on what it has, so that after N - 1 hops it has seen all; the
next part is on its way while this one is used. The backward pass begins at home again, computes what lies between
once more, and the sum of a part's gradient follows it from device to device: N - 1 hops for each of them. The gradient
of the part at home is made last, under the last hop. (RTP, arXiv 2311.01635, sends gradients when nothing is computed.)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec

from braidax.program import aval_of

from .turns import Turns

SAVED = "braidax_rotated"
"""The name of what a remat keeps of rings, so that it repeats no hop."""


@dataclass(frozen=True)
class Ring:
    """Computes a unit on a mesh. **Fields:** `turns`: what each device does."""

    turns: Turns

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """Returns the results of the unit, in the global view."""
        outputs = [checkpoint_name(value, SAVED) for value in self._computed(*inputs)]
        return [_like(*pair) for pair in zip(outputs, map(aval_of, self.turns.unit.outputs), strict=True)]

    def _computed(self, *inputs: Any) -> tuple[Any, ...]:
        def computed(inputs: Sequence[Any]) -> Any:
            return self._island(self.turns.forward, self._in_specs, self._out_specs)(*self._laid(inputs))

        @jax.custom_vjp
        def ring(*inputs: Any) -> Any:
            return computed(inputs)[0]

        def forward(*given: Any) -> Any:
            inputs = [one.value for one in given]
            outputs, *known = computed(inputs)
            return outputs, (inputs, known, tuple(one.perturbed for one in given))

        def backward(kept: Any, backs: Any) -> Any:
            inputs, known, moving = kept
            outputs, *of_known = self._out_specs
            asked = [at for at, one in enumerate(moving) if one and _is_float(inputs[at])]
            like = [aval_of(var) for var in self.turns.unit.outputs]
            pairs = zip(backs, self._shapes(like), like, strict=True)
            backs = [jnp.zeros(s, a.dtype) if isinstance(one, SymbolicZero) else one for one, s, a in pairs]
            in_specs = (self._in_specs, outputs, *of_known)

            def local(inputs: Any, backs: Any, maxima: Any, products: Any) -> Any:
                return self.turns.backward(inputs, backs, maxima, products, asked)

            specs = [self._in_specs[at] for at in asked]
            laid = self._laid(inputs, backs)
            found = self._island(local, in_specs, specs)(tuple(laid), tuple(backs), *known)
            gradients = {at: _like(one, inputs[at]) for at, one in zip(asked, found, strict=True)}
            return tuple(gradients.get(at) for at in range(len(inputs)))

        ring.defvjp(forward, backward, symbolic_zeros=True)
        return ring(*inputs)

    def _shapes(self, like: Sequence[Any]) -> list[tuple[int, ...]]:
        """Of results, of which those that are put together may be padded."""
        shapes: list[tuple[int, ...]] = []
        for aval, dim in zip(like, self.turns.stacked, strict=True):
            more = -aval.shape[dim] % self.turns.count if dim is not None else 0
            shapes.append(tuple(size + (more if at == dim else 0) for at, size in enumerate(aval.shape)))
        return shapes

    # Where things lie

    @property
    def _in_specs(self) -> tuple[PartitionSpec, ...]:
        specs: list[PartitionSpec] = []
        for at, var in enumerate(self.turns.unit.jaxpr.invars):
            if at in self.turns.weights:
                specs.append(PartitionSpec(*(axes or None for axes in self.turns.weights[at])))
            else:
                specs.append(self._along_batch(self.turns.unit.batch[at], aval_of(var).ndim))
        return tuple(specs)

    @property
    def _out_specs(self) -> tuple[tuple[PartitionSpec, ...], ...]:
        """Of the results, of the maxima, and of what is kept, turn by turn."""
        unit = self.turns.unit
        outputs = zip(unit.results, unit.outputs, strict=True)
        tops = zip(unit.tops, unit.maxima.batch, strict=True)
        return (
            tuple(self._along_batch(one.batch, aval_of(var).ndim) for one, var in outputs),
            tuple(self._along_batch(dim, aval_of(var).ndim) for var, dim in tops),
            tuple(self._along_batch(1 + dim, 1 + aval_of(var).ndim) for var, dim in unit.keeps.items()),
        )

    def _along_batch(self, dim: int | None, ndim: int) -> PartitionSpec:
        return PartitionSpec(*(self.turns.batch_axes if at == dim else None for at in range(ndim)))

    def _island(self, local: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
        names = {
            *self.turns.batch_axes,
            self.turns.axis,
            *(one for dims in self.turns.weights.values() for axes in dims for one in axes),
        }
        return jax.shard_map(local, in_specs=in_specs, out_specs=out_specs, axis_names=names, check_vma=False)

    def _laid(self, inputs: Sequence[Any], backs: Sequence[Any] = ()) -> list[Any]:
        """Returns the inputs, weights with dims that their devices divide; padded when all else is there."""
        laid = [*inputs]
        more = {at: self._more(at, inputs[at].shape) for at in self.turns.weights}
        if any(map(any, more.values())):
            there = [at for at, value in enumerate(laid) if _is_float(value)]
            held, _ = jax.lax.optimization_barrier(([laid[at] for at in there], [*backs]))
            for at, value in zip(there, held, strict=True):
                laid[at] = jnp.pad(value, [(0, one) for one in more[at]]) if any(more.get(at, ())) else value
        return laid

    def _more(self, at: int, shape: Sequence[int]) -> list[int]:
        return [-size % self.turns.num(axes) for size, axes in zip(shape, self.turns.weights[at], strict=True)]


def _like(value: Any, spec: Any) -> Any:
    """Returns a value without padding."""
    return value if value.shape == spec.shape else value[tuple(map(slice, spec.shape))]


def _is_float(value: Any) -> bool:
    return jnp.issubdtype(value.dtype, jnp.inexact)
