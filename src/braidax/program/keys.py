"""Random keys among the inputs of a program, also those that are numbers, as `jax.random.PRNGKey` makes them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn

from .flow import Place, flow

_SAME_KEYS = frozenset(
    {
        "broadcast_in_dim", "copy", "dynamic_slice", "gather", "optimization_barrier", "reshape", "rev", "slice",
        "squeeze", "stop_gradient", "transpose",
    }
)  # fmt: skip


def key_inputs(closed: ClosedJaxpr) -> list[str | None]:
    """Says of each input whether it is a random key, or an array of such: the implementation of one that is numbers,
    "" for one of JAX's own type, None for what is no key."""
    seeds = [at if aval.dtype == jnp.uint32 else None for at, aval in enumerate(closed.in_avals)]
    facts = _Wrapped({})
    flow(closed.jaxpr, seeds, facts)
    found: list[str | None] = []
    for at, aval in enumerate(closed.in_avals):
        is_key = jnp.issubdtype(aval.dtype, jax.dtypes.prng_key)
        found.append("" if is_key else facts.found.get(at))
    return found


def folded_keys(keys: Any, number: Any, implementation: str) -> Any:
    """Returns other keys than those given, each folded with a number. **Arguments:** as `key_inputs` tells them."""
    typed = jnp.issubdtype(keys.dtype, jax.dtypes.prng_key)
    wrapped = keys if typed else jax.random.wrap_key_data(keys, impl=implementation)
    folded = jax.vmap(lambda key: jax.random.fold_in(key, number))(wrapped.reshape(-1)).reshape(wrapped.shape)
    return folded if typed else jax.random.key_data(folded)


@dataclass(frozen=True)
class _Wrapped:
    """Finds which inputs become keys; a fact is the number of an input."""

    found: dict[int, str]

    def through(self, equation: JaxprEqn, facts: Sequence[Any], place: Place) -> Sequence[Any]:
        if equation.primitive.name == "random_wrap":
            self.found[facts[0]] = equation.params["impl"].name
        if equation.primitive.name in _SAME_KEYS:
            return facts if equation.primitive.multiple_results else [facts[0]]
        return [None] * len(equation.outvars)

    def into(self, equation: JaxprEqn, operand: int, fact: Any, place: Place) -> Any:
        return fact

    def out_of(self, equation: JaxprEqn, result: int, fact: Any, place: Place) -> Any:
        return fact

    def join(self, one: Any, other: Any) -> Any:
        return other if one is None else one
