"""The mask of a padded batch: which of its samples are real."""

from collections.abc import Mapping
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from braidax.data.sharding.load_plan import LoadPlan
from braidax.data.sharding.specs import resolve_shardings, stacked
from braidax.errors import ArgumentError

MASK = "mask"


class Mask:
    """Makes the masks of a plan's batches, bool in the shape of the batch dims.

    **Arguments:** `mesh`, `spec`: as the user gave them; a `spec` of None is that of the first leaf.
    """

    def __init__(self, plan: LoadPlan, mesh: Mesh | None, spec: Any) -> None:
        first = plan.leaves[0]
        self._shape = first.outer_shape
        self._placement = plan.placement
        if spec is None:
            spec = NamedSharding(first.sharding.mesh, PartitionSpec(*first.sharding.spec[: len(self._shape)]))
        elif len(self._shape) > 1:
            _, spec = stacked(None, spec, self._shape[0])
        self.sharding = resolve_shardings(jax.ShapeDtypeStruct(self._shape, np.bool_), mesh, spec)[0]

    def added(self, batch: Mapping[str, Any], num_valid: int) -> dict[str, Any]:
        """Returns a batch with its mask, of which the first samples are real."""
        mask = (np.arange(np.prod(self._shape)) < num_valid).reshape(self._shape)
        if self._placement == "host":
            return {**batch, MASK: mask}
        array = jax.make_array_from_callback(mask.shape, self.sharding, lambda index: mask[index], dtype=np.bool_)
        return {**batch, MASK: array}


def split_mask(sample_spec: Any, specs: Any) -> tuple[Any, Any]:
    """Takes the spec of the mask, if the user gave one, out of the specs of a batch.

    **Raises:** `ArgumentError` for samples that a mask cannot be added to.
    """
    if not isinstance(sample_spec, Mapping) or MASK in sample_spec:
        raise ArgumentError(
            f"remainder='pad' adds the leaf {MASK!r} to every batch, so samples must be mappings without one, got "
            f"{jax.tree.structure(sample_spec)}; return a dict from a transform, or use remainder='drop'"
        )
    if isinstance(specs, Mapping) and MASK in specs:
        rest = {name: spec for name, spec in cast(Mapping[str, Any], specs).items() if name != MASK}
        return rest, specs[MASK]
    return specs, None
