"""When the last program of a step is done, without keeping the state that it made, which the next step takes over."""

import functools
import math
from collections.abc import Callable
from typing import Any, final

import jax
import jax.numpy as jnp

_OF_ANY_STATE = 2


@final
class Ends:
    """Takes from states, at once, a number that is there when the step is done that made them.

    It is taken from the largest of the `params` of each group of devices, on one device of the group; from the two
    largest arrays of a state that has none, of which one may be what no step moves, and there earlier. That is
    dispatched behind the step and before the next one can take the memory over, and costs some microseconds. What is
    not on devices of this process is left out.
    """

    def __init__(self) -> None:
        self._structure: Any = None
        self._chosen: list[int] = []

    def of(self, state: Any) -> tuple[jax.Array, ...]:
        """Returns the numbers of a state, none where it has no arrays."""
        has_params = hasattr(state, "params")
        leaves, structure = jax.tree.flatten(state.params if has_params else state)
        if self._structure is None or structure != self._structure:
            self._structure, self._chosen = structure, _chosen(leaves, 1 if has_params else _OF_ANY_STATE)
        return tuple(taken(leaves[at]) for at in self._chosen)


def taken(leaf: jax.Array) -> jax.Array:
    """Returns the first number of an array as it is now, on one device; the array may be given up then."""
    return _taking()(leaf.addressable_data(0))


def _chosen(leaves: list[Any], each: int) -> list[int]:
    """Returns the places of the largest leaves of each group of devices."""
    groups: dict[frozenset[Any], list[int]] = {}
    for at, leaf in enumerate(leaves):
        is_array = isinstance(leaf, jax.Array) and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
        if is_array and leaf.size and leaf.sharding.addressable_devices:
            groups.setdefault(frozenset(leaf.sharding.device_set), []).append(at)
    by_size = (sorted(group, key=lambda at: -math.prod(leaves[at].shape)) for group in groups.values())
    return [at for group in by_size for at in group[:each]]


@functools.cache
def _taking() -> Callable[[jax.Array], jax.Array]:
    """Compiled once for arrays of one form, whoever follows."""
    return jax.jit(lambda array: array.ravel()[:1])
