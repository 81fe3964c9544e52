"""What belongs to the ids of lookups, laid flat device by device, and taken back."""

import math
from collections.abc import Mapping, Sequence
from typing import final

import jax
import jax.numpy as jnp

from braidax.program import Lookup


@final
class LaidFlat:
    """Lays arrays that belong to ids flat: `[devices, m, …]`, each device with those of its own samples.

    **Arguments:** `lookups`: of a program, each with ids `[*lengths, n]`. `microbatches`: how many pieces, each with
    its own ids, for which there is a dim in front; 1 has none.
    """

    def __init__(self, lookups: Sequence[Lookup], microbatches: int) -> None:
        self._lookups, self._lead = lookups, () if microbatches == 1 else (microbatches,)

    def of_table(self, name: str) -> tuple[int, ...]:
        """Returns the numbers of the lookups of a table."""
        return tuple(at for at, lookup in enumerate(self._lookups) if lookup.name == name)

    def num_ids(self, lookups: Sequence[int], num_parts: int) -> int:
        """Returns how many ids of lookups a device has. **Arguments:** `num_parts`: the number of devices."""
        return sum(self._num_ids(self._lookups[at], num_parts) for at in lookups)

    def pack(self, lookups: Sequence[int], arrays: Sequence[jax.Array], num_parts: int, *, filler: int) -> jax.Array:
        """Lays what belongs to ids `[*lengths, n, …]` device by device: `[devices, m, …]`.

        **Arguments:** `arrays`: of all lookups. `filler`: where devices do not divide the ids.
        """
        packed: list[jax.Array] = []
        for at in lookups:
            num_lengths = len(self._lead) + len(self._lookups[at].ids.shape) - 1
            array = jnp.moveaxis(arrays[at], num_lengths, 0)
            missing = -array.shape[0] % num_parts
            if missing:
                array = jnp.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1), constant_values=filler)
            rest = array.shape[1 + num_lengths :]
            packed.append(array.reshape(num_parts, self._num_ids(self._lookups[at], num_parts), *rest))
        return jnp.concatenate(packed, axis=1) if len(packed) > 1 else packed[0]

    def unpack(self, lookups: Sequence[int], packed: jax.Array) -> Mapping[int, jax.Array]:
        """Undoes `pack`: by the number of the lookup."""
        num_parts, found, start = packed.shape[0], dict[int, jax.Array](), 0
        for at in lookups:
            *lengths, num_ids = (*self._lead, *self._lookups[at].ids.shape)
            size = self._num_ids(self._lookups[at], num_parts)
            part = packed[:, start : start + size].reshape(-1, *lengths, *packed.shape[2:])[:num_ids]
            found[at] = jnp.moveaxis(part, 0, len(lengths))
            start += size
        return found

    def _num_ids(self, lookup: Lookup, num_parts: int) -> int:
        *lengths, num_ids = (*self._lead, *lookup.ids.shape)
        return -(-num_ids // num_parts) * math.prod(lengths)
