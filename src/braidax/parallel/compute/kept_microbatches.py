"""Microbatches of a loss in the middle of a traced step: its operands in pieces, and its results put together."""

from collections.abc import Sequence
from typing import Any, final

import jax
import jax.numpy as jnp

from braidax.errors import ArgumentError
from braidax.program import Kept, batch_dims_of_results, folded_keys, inputs_of, key_inputs

from .accumulate import averaged, wide_zeros


@final
class KeptMicrobatches:
    """How a loss is computed on microbatches.

    Sample `i` is in microbatch `i % microbatches`. Random keys are folded with the number of the microbatch, what else
    has no dim of the batch is the same for all. Results along samples are put together, others are averaged; integers
    among these must be the same for all.

    **Arguments:** `whole`: the gradient, traced with the whole batch. `kept`: the same, traced with a microbatch.
    `first`: which operands are weights. `dims`: of all operands, which one is the batch. `num_samples`: of the batch.

    **Raises:** `ArgumentError` for what cannot be divided.
    """

    def __init__(
        self,
        whole: Kept,
        kept: Kept,
        first: Sequence[int],
        dims: Sequence[int | None],
        num_samples: int,
        microbatches: int,
    ) -> None:
        self.kept, self.microbatches = kept, microbatches
        self._num_samples, self._line = num_samples // microbatches, whole.line
        operands = [at for at in range(len(dims)) if at not in first]
        specs, own = whole.closed.in_avals, kept.closed.in_avals
        self._dims = [self._divided(specs[at], own[at], dims[at]) for at in operands]
        keys = key_inputs(kept.closed)
        self._keys = [keys[at] if dim is None else None for at, dim in zip(operands, self._dims, strict=True)]
        results = batch_dims_of_results(kept.program([]), {1: dims})
        self._specs = kept.closed.out_avals
        pairs = zip(whole.closed.out_avals, self._specs, results, strict=True)
        self._of_results = [self._divided(spec, of_one, dim) for spec, of_one, dim in pairs]
        differs = {at for at in range(len(dims)) if keys[at] is not None}
        differs |= {at for at, dim in zip(operands, self._dims, strict=True) if dim is not None}
        for number, (spec, dim) in enumerate(zip(self._specs, self._of_results, strict=True)):
            is_mean = jnp.issubdtype(spec.dtype, jnp.inexact)
            if dim is None and not is_mean and differs & inputs_of(kept.closed, number):
                raise ArgumentError(
                    f"microbatches is {microbatches}, and the loss {self._line} computes {_told(spec)} of the samples, "
                    f"which is not averaged over microbatches: make it a float, or return what there is for each sample"
                )

    def of(self, others: Sequence[Any]) -> Any:
        """Returns what differs from microbatch to microbatch, with a leading dim for them."""
        pairs = zip(others, self._dims, strict=True)
        return jnp.arange(self.microbatches), [self._split(one, dim) for one, dim in pairs if dim is not None]

    def others(self, others: Sequence[Any], piece: Any) -> list[Any]:
        """Returns the operands of one microbatch. **Arguments:** `piece`: its slice of `of`."""
        number, parts = piece[0], iter(piece[1])
        found: list[Any] = []
        for one, dim, key in zip(others, self._dims, self._keys, strict=True):
            whole = one if key is None else folded_keys(one, number, key)
            found.append(whole if dim is None else next(parts))
        return found

    def no_scalars(self) -> list[jax.Array]:
        """Returns the sums of what is averaged, before the first."""
        return [wide_zeros(spec) for at, spec in enumerate(self._specs) if self._is_mean(at)]

    def parted(self, values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Returns the results that are averaged, and the others."""
        pairs = [(self._is_mean(at), value) for at, value in enumerate(values)]
        return [value for mean, value in pairs if mean], [value for mean, value in pairs if not mean]

    def results(self, sums: Sequence[Any], others: Sequence[Any]) -> list[Any]:
        """Undoes `parted`. **Arguments:** `others`: of all microbatches, stacked."""
        means, stacked, found = iter(sums), iter(others), list[Any]()
        for at, (spec, dim) in enumerate(zip(self._specs, self._of_results, strict=True)):
            if self._is_mean(at):
                found.append(averaged(next(means), spec, self.microbatches))
            else:
                found.append(next(stacked)[-1] if dim is None else self._joined(next(stacked), dim))
        return found

    def _is_mean(self, at: int) -> bool:
        return self._of_results[at] is None and jnp.issubdtype(self._specs[at].dtype, jnp.inexact)

    def _divided(self, whole: Any, piece: Any, dim: int | None) -> int | None:
        """The dim along which an array is divided into pieces; None where it is the same for all."""
        if whole.shape == piece.shape:
            return None
        if dim is not None and piece.shape[dim] % self._num_samples == 0:
            sizes = [*piece.shape]
            sizes[dim] *= self.microbatches
            if tuple(sizes) == whole.shape:
                return dim
        raise ArgumentError(
            f"microbatches is {self.microbatches}, and {_told(whole)}, which the loss {self._line} reads or gives, is "
            f"{list(piece.shape)} for a microbatch and does not go along the samples: compute it inside of the loss, "
            f"from the batch"
        )

    def _split(self, array: jax.Array, dim: int) -> jax.Array:
        shape, each = array.shape, array.shape[dim] // (self._num_samples * self.microbatches)
        sizes = (*shape[:dim], self._num_samples, self.microbatches, each, *shape[dim + 1 :])
        pieces = jnp.moveaxis(array.reshape(sizes), dim + 1, 0)
        return pieces.reshape(self.microbatches, *shape[:dim], self._num_samples * each, *shape[dim + 1 :])

    def _joined(self, pieces: jax.Array, dim: int) -> jax.Array:
        shape, each = pieces.shape[1:], pieces.shape[1 + dim] // self._num_samples
        sizes = (self.microbatches, *shape[:dim], self._num_samples, each, *shape[dim + 1 :])
        together = jnp.moveaxis(pieces.reshape(sizes), 0, dim + 1)
        return together.reshape(*shape[:dim], -1, *shape[dim + 1 :])


def _told(spec: Any) -> str:
    return f"{spec.dtype}{list(spec.shape)}"
