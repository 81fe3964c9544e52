"""A copy of a tree on its own devices: what may be saved while a step that donates goes on."""

from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

# JAX leaves some of itself unannotated.
_jax: Any = jax


def copied(tree: Any) -> Any:
    """Returns a copy of a tree, on the same devices, which nobody waits for; the arrays may be donated at once.

    `Checkpointer(path, interval, prepare=copied)` is for a step that is one jitted function and donates its state: on
    an accelerator the next one waits for this copy alone, and not for the way to the host. The copy takes as much
    device memory, until the snapshot is taken.

    **Arguments:** `tree`: a PyTree as `Checkpointer.update` takes it. Arrays of JAX keep sharding and memory kind.

    **Returns:** a tree of the same structure. **Raises:** what JAX does where there is no memory left.
    """
    leaves, structure = jax.tree.flatten(tree)
    places: dict[Hashable, list[int]] = {}
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, np.ndarray):
            leaves[number] = leaf.copy()
        elif isinstance(leaf, jax.Array) and not leaf.is_deleted():  # whoever saves it names a deleted one by its path
            places.setdefault(_place(leaf), []).append(number)
    with _jax.set_mesh(None):
        for place, numbers in places.items():
            arrays = [leaves[number] for number in numbers]
            for number, copy in zip(numbers, _copied(arrays) if place is not None else _moved(arrays), strict=True):
                leaves[number] = copy
    return jax.tree.unflatten(structure, leaves)


def _place(array: jax.Array) -> Hashable:
    """Returns what arrays have alike that one jitted function takes; None for those in no device's own memory."""
    sharding = array.sharding
    devices = sorted(sharding.device_set, key=lambda device: device.id)
    if sharding.memory_kind not in (None, devices[0].default_memory().kind):
        return None
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        devices = list(sharding.mesh.devices.flat)
    return (array.committed, *(device.id for device in devices))


@jax.jit
def _copied(arrays: list[jax.Array]) -> list[jax.Array]:
    return [jnp.copy(array) for array in arrays]


def _moved(arrays: list[jax.Array]) -> list[jax.Array]:
    return _jax.device_put(arrays, [array.sharding for array in arrays], may_alias=False)
