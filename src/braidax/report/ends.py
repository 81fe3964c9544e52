"""When the last program of a step is done, without keeping the state that it made, which the next step takes over."""

import functools
import math
from collections.abc import Callable
from typing import Any, final

import jax
import jax.numpy as jnp

_LEAVES_EACH = 2


@final
class Ends:
    """Takes from states, at once, a number that is there when the step is done that made them.

    It is taken from the largest parameters of each group of devices, on one device of the group: a leaf that no
    optimizer moves may be there earlier. That is dispatched behind the step and before the next one can take the
    memory over, and costs some microseconds. What is not on devices of this process is left out.
    """

    def __init__(self) -> None:
        self._structure: Any = None
        self._chosen: list[int] = []

    def of(self, state: Any) -> tuple[jax.Array, ...]:
        """Returns the numbers of a state, none where it has no arrays."""
        leaves, structure = jax.tree.flatten(getattr(state, "params", state))
        if self._structure is None or structure != self._structure:
            self._structure, self._chosen = structure, _chosen(leaves)
        return tuple(_taking()(leaves[at].addressable_data(0)) for at in self._chosen)


def _chosen(leaves: list[Any]) -> list[int]:
    """Returns the places of the largest leaves of each group of devices."""
    groups: dict[frozenset[Any], list[int]] = {}
    for at, leaf in enumerate(leaves):
        is_array = isinstance(leaf, jax.Array) and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
        if is_array and leaf.size and leaf.sharding.addressable_devices:
            groups.setdefault(frozenset(leaf.sharding.device_set), []).append(at)
    by_size = (sorted(group, key=lambda at: -math.prod(leaves[at].shape)) for group in groups.values())
    return [at for group in by_size for at in group[:_LEAVES_EACH]]


@functools.cache
def _taking() -> Callable[[jax.Array], jax.Array]:
    """Compiled once for arrays of one form, whoever follows."""
    return jax.jit(lambda array: array.ravel()[:1])
