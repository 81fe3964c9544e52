"""A step that looks at every number of a batch, computes for as long as it is told to, and reduces over all devices."""

from collections.abc import Callable, Mapping
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.parax.system import Arrays

_WIDTH = 256


@final
class Step:
    """A training step; where a batch lies on two meshes, one for each.

    **Arguments:** `shardings`: of the batch.
    """

    def __init__(self, shardings: Mapping[str, NamedSharding]) -> None:
        self._parts: list[tuple[list[str], Callable[..., jax.Array]]] = []
        self._weights: list[jax.Array] = []
        for mesh in dict.fromkeys(sharding.mesh for sharding in shardings.values()):
            leaves = {name: sharding for name, sharding in shardings.items() if sharding.mesh == mesh}
            if next(iter(leaves.values())).addressable_devices:
                self._parts.append((sorted(leaves), _on_mesh(mesh, {name: leaf.spec for name, leaf in leaves.items()})))
                weights = np.random.default_rng(0).standard_normal((_WIDTH, _WIDTH), np.float32)
                self._weights.append(jax.device_put(weights, NamedSharding(mesh, PartitionSpec())))

    def __call__(self, batch: Arrays, iterations: int) -> list[jax.Array]:
        """Returns the new weights, which need not be ready. **Arguments:** `iterations`: products of matrices."""
        self._weights = [
            part({name: batch[name] for name in names}, weights, iterations)
            for (names, part), weights in zip(self._parts, self._weights, strict=True)
        ]
        return self._weights


def _on_mesh(mesh: Any, specs: Mapping[str, PartitionSpec]) -> Callable[..., jax.Array]:
    assert isinstance(mesh, Mesh)

    def on_device(batch: Arrays, weights: jax.Array, iterations: jax.Array) -> jax.Array:
        seen = sum((leaf.astype(jnp.float32).mean() for leaf in batch.values()), jnp.float32(0))
        start = weights + 1e-6 * seen

        def product(_: Any, carry: jax.Array) -> jax.Array:
            return jnp.tanh(carry @ start / _WIDTH**0.5)

        return jax.lax.psum(jax.lax.fori_loop(0, iterations, product, start), mesh.axis_names) / mesh.size

    mapped = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(dict(specs), PartitionSpec(), PartitionSpec()),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    return jax.jit(mapped)
