"""Arrays with a dim for devices in front, as this process has them: part by part, on the host."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from numpy.typing import NDArray


def local_parts(array: jax.Array) -> dict[int, NDArray[Any]]:
    """Returns the parts of `[N, …]` that devices of this process have, by number, each once; it waits for them."""
    found: dict[int, NDArray[Any]] = {}
    for shard in array.addressable_shards:
        start = shard.index[0].start or 0
        if start not in found:
            for at, part in enumerate(np.asarray(shard.data)):
                found[start + at] = part
    return dict(sorted(found.items()))


def on_devices(parts: Mapping[int, NDArray[Any]], *, sharding: NamedSharding, num_parts: int) -> jax.Array:
    """Undoes `local_parts`. **Arguments:** `num_parts`: of all processes."""
    shape = (num_parts, *next(iter(parts.values())).shape)

    def part(index: Any) -> NDArray[Any]:
        start, stop, _ = index[0].indices(num_parts)
        return np.stack([parts[at] for at in range(start, stop)])

    return jax.make_array_from_callback(shape, sharding, part)
