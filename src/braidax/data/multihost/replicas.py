"""Whether processes that hold the same part of a batch hold the same numbers: a checksum, now and then."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from braidax.data.sharding.leaf_plan import bounds_of
from braidax.data.sharding.load_plan import LoadPlan
from braidax.data.sharding.load_sharding import Bounds, part_indices, process_indices
from braidax.errors import DataError

Sums = list[tuple[str, Bounds, jax.Array]]
"""Of parts of leaves: the leaf's path, which part, and its checksum, uint32."""


class Replicas:
    """Finds what several processes hold of the batches of a plan, and compares it.

    A file that differs between hosts, or code that draws other numbers on each, makes replicas diverge in silence; what
    is read once and exchanged cannot.

    **Arguments:** `every`: after so many batches.
    """

    def __init__(self, plan: LoadPlan, every: int) -> None:
        self.every = every
        self._shared = [number for number, leaf in enumerate(plan.leaves) if _is_shared(leaf.sharding, len(leaf.shape))]
        self._paths = [leaf.path for leaf in plan.leaves]
        self._checksum = jax.jit(_checksum)

    def sums(self, batch: Any) -> Sums:
        """Begins to sum the parts that this process holds of leaves that others hold too; does not wait.

        Each device sums its own part: there is no collective, and the arrays may be donated afterwards.
        """
        arrays: list[jax.Array] = jax.tree.leaves(batch)
        found: dict[tuple[str, Bounds], jax.Array] = {}
        for number in self._shared:
            shape = arrays[number].shape
            for shard in arrays[number].addressable_shards:
                bounds = bounds_of(shard.index, shape)
                if (self._paths[number], bounds) not in found:
                    found[self._paths[number], bounds] = self._checksum(shard.data)
        return [(path, bounds, value) for (path, bounds), value in found.items()]


def told(sums: Sums) -> bytes:
    """Returns checksums as a message; waits for them."""
    return json.dumps([[path, bounds, int(value)] for path, bounds, value in sums]).encode()


def compare(messages: dict[int, bytes], what: str) -> None:
    """Compares what every process told of a batch.

    **Arguments:** `messages`: by process. `what`: the batch, in words.

    **Raises:** `DataError` naming the leaf, the part and the processes that hold different numbers.
    """
    seen: dict[str, dict[int, list[int]]] = {}
    for process, message in sorted(messages.items()):
        for path, bounds, value in json.loads(message):
            part = ", ".join(f"{start}:{stop}" for start, stop in bounds)
            seen.setdefault(f"leaf {path}[{part}]", {}).setdefault(value, []).append(process)
    for part, holders in seen.items():
        if len(holders) > 1:
            groups = " and ".join(f"process {', '.join(map(str, members))}" for members in holders.values())
            raise DataError(
                f"{what}: {part} differs between {groups}, which should hold copies; expected the same bits: do the "
                "hosts have the same files, and does a transform draw random numbers of its own?"
            )


def _is_shared(sharding: Any, num_dims: int) -> bool:
    """Says whether any part of an array is held by several processes."""
    columns = [process_indices(sharding.mesh), *part_indices(sharding, num_dims)]
    held = np.unique(np.stack([column.ravel() for column in columns], axis=1), axis=0)
    return len(np.unique(held[:, 1:], axis=0)) < len(held)


def _checksum(array: jax.Array) -> jax.Array:
    """Sums the bits of an array, each number weighted by its place, modulo 2³²."""
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        array = jnp.stack([array.real, array.imag])
    if array.dtype == jnp.bool_:
        bits = array.astype(jnp.uint32)
    else:
        width = array.dtype.itemsize
        words = jax.lax.bitcast_convert_type(array, {1: jnp.uint8, 2: jnp.uint16}.get(width, jnp.uint32))
        bits = words.astype(jnp.uint32)
    flat = bits.reshape(-1)
    weights = 2 * jax.lax.iota(jnp.uint32, flat.size) + 1
    return jnp.sum(flat * weights, dtype=jnp.uint32)
