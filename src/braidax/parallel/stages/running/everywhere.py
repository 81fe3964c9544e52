"""Scalars of single stages for all of them, and for every process."""

from collections.abc import Sequence
from typing import Any, final

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .home import Home


@final
class Everywhere:
    """Copies scalars to all devices, so that each process can read them.

    **Arguments:** `mesh`: of all. `homes`: into which it is divided.
    """

    def __init__(self, mesh: Mesh, homes: Sequence[Home]) -> None:
        self._homes = list(dict.fromkeys(homes))
        self._whole = NamedSharding(mesh, PartitionSpec())

    def __call__(self, values: Sequence[Any], sources: Sequence[Home]) -> tuple[list[Any], list[Any]]:
        """Copies them. **Arguments:** `sources`: of each value its home.

        **Returns:** them on all devices, and at the first home.
        """
        shards: list[list[Any]] = [[] for _ in values]
        at_first: list[Any] = list(values)
        groups = [(source, [at for at, one in enumerate(sources) if one is source]) for source in {*sources}]
        for source, own in sorted(groups, key=lambda group: group[1]):
            for home in self._homes:
                copies = home.bring([values[at] for at in own], source, [home.whole] * len(own))
                for at, copy in zip(own, copies, strict=True):
                    shards[at] += [shard.data for shard in copy.addressable_shards]
                    if home is self._homes[0]:
                        at_first[at] = copy
        whole = [jax.make_array_from_single_device_arrays((), self._whole, own) for own in shards]
        return whole, at_first
