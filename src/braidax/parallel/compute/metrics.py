"""Metrics of a loss: what goes along the samples stays divided as these are, and is put together, not averaged."""

from collections.abc import Collection, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from braidax.parallel.plan.batch import along_batch
from braidax.program import Program, batch_dims_of_results

BATCH = 3
"""Which argument of a traced loss, `(params, variables, key, batch)`, is the batch."""


@final
class MetricDims:
    """Which dim of each metric goes along the samples, if one does.

    **Arguments:** `program`: `(params, variables, key, batch) -> (loss, (metrics, variables))`. `microbatches`: of how
    many runs of it the metrics of an update are put together.
    """

    def __init__(self, program: Program, *, microbatches: int = 1) -> None:
        self.microbatches = microbatches
        loss, (metrics, _) = program.out_specs
        self._specs = {"loss": loss, **metrics}
        self._num_samples = jax.tree.leaves(program.in_specs[BATCH])[0].shape[0]
        found, structure = batch_dims_of_results(program, {BATCH: 0}), jax.tree.structure(metrics)
        places = {"loss": 0, **structure.unflatten(range(1, 1 + structure.num_leaves))}
        pairs = zip(jax.tree.leaves(places), jax.tree.leaves(self._specs), strict=True)
        self._dims = [self._whole(found[place], spec) for place, spec in pairs]
        self._places: list[int] = jax.tree.leaves(places)

    def _whole(self, dim: int | None, spec: Any) -> int | None:
        """A dim, unless it is no multiple of the samples."""
        return None if dim is None or spec.shape[dim] % self._num_samples else dim

    @property
    def of_outputs(self) -> list[int | None]:
        """The dim along samples of the loss and of each metric, in the order in which the program gives them."""
        dims = dict(zip(self._places, self._dims, strict=True))
        return [dims[place] for place in range(len(dims))]

    def shardings(self, mesh: Mesh, axes: tuple[str, ...], others: Collection[str]) -> dict[str, Any]:
        """Returns the shardings of metrics: those along samples are split over mesh axes, the others on every device.

        **Arguments:** `axes`: over which samples are divided. `others`: names of what comes besides.
        """
        leaves, structure = jax.tree.flatten(self._specs)
        sizes = [tuple(size * self.microbatches for size in spec.shape) for spec in leaves]
        pairs = zip(sizes, self._dims, strict=True)
        found = structure.unflatten([along_batch(mesh, axes, *pair) for pair in pairs])
        return found | dict.fromkeys(others, along_batch(mesh, axes, (), None))

    def parted(self, metrics: Any) -> tuple[list[Any], list[Any]]:
        """Returns the leaves of metrics that microbatches average, and those that go along the samples."""
        pairs = list(zip(jax.tree.leaves(metrics), self._dims, strict=True))
        return [leaf for leaf, dim in pairs if dim is None], [leaf for leaf, dim in pairs if dim is not None]

    def joined(self, averaged: Sequence[Any], along: Sequence[Any]) -> Any:
        """Undoes `parted`.

        **Arguments:** `along`: of `k` microbatches, `[k, ...]`; sample `i` is in piece `i % k`.
        """
        one, other = iter(averaged), iter(along)
        found = [
            next(one) if dim is None else in_order_of_samples(next(other), dim, self._num_samples) for dim in self._dims
        ]
        return jax.tree.unflatten(jax.tree.structure(self._specs), found)


def in_order_of_samples(pieces: jax.Array, dim: int, num_samples: int) -> jax.Array:
    """Puts together what goes along samples of microbatches, of which sample `i` is in piece `i % k`.

    **Arguments:** `pieces`: `[k, ...]`. `dim`: of one piece that goes along its samples. `num_samples`: of one piece.
    """
    shape = pieces.shape[1:]
    pieces = jnp.moveaxis(pieces, 0, dim)  # [..., k, samples * m, ...]
    parts = (*shape[:dim], pieces.shape[dim], num_samples, shape[dim] // num_samples, *shape[dim + 1 :])
    together = jnp.swapaxes(pieces.reshape(parts), dim, dim + 1)
    return together.reshape(*shape[:dim], -1, *shape[dim + 1 :])
